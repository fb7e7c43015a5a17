"""Tables survive interruption and merge by schedule; bad files are named."""

import gzip

import pytest

from pallas_kernels.shapes import array
from polyjax.core.errors import ConfigError
from polyjax.core.ops import MATMUL, PAGED_ATTENTION
from search.tables import (
    Table,
    TableRow,
    TableWriter,
    partial_of,
    path_of,
    read,
    read_all,
    write,
)

DEVICE = "NVIDIA H200"
WORKLOAD = MATMUL.workload(array(1, 2048), array(3072, 2048), None, None, out_dtype="float32")
EMPTY = Table(WORKLOAD, DEVICE, {"jax": "0.11.2"})


def row(stages, status="passed", *samples):
    return TableRow("mosaic_gpu.matmul.stream", (("stages", stages),), status, samples)


def test_a_table_is_read_as_written_and_equal_tables_give_equal_files(tmp_path):
    table = EMPTY.merged([row(2, "passed", 3.0, 4.0, 5.0), row(3, "compile_error")])
    path = path_of(tmp_path, DEVICE, WORKLOAD)
    write(path, table)
    assert read(path) == table
    assert read(path).workload.key == WORKLOAD.key
    assert read(path).passed()[0].us == 4.0
    first = path.read_bytes()
    write(path, table)
    assert path.read_bytes() == first and [*read_all(tmp_path)] == [table]


def test_static_arguments_survive(tmp_path):
    i32 = lambda *s: array(*s, dtype="int32")  # noqa: E731
    arrays = (array(1, 1, 8, 64), array(3, 2, 4, 16, 64), i32(1, 2), i32(1), i32(1))
    workload = PAGED_ATTENTION.workload(*arrays, None, scale=0.125, window=0)
    path = path_of(tmp_path, DEVICE, workload)
    write(path, Table(workload, DEVICE, {}))
    assert read(path).workload == workload


def test_a_measured_row_is_not_lost_to_a_later_failure():
    table = EMPTY.merged([row(2, "passed", 3.0), row(3, "crashed")])
    table = table.merged([row(2, "crashed"), row(3, "passed", 5.0), row(4, "timeout")])
    assert [(r.status, r.samples_us) for r in table.rows] == [
        ("passed", (3.0,)),
        ("passed", (5.0,)),
        ("timeout", ()),
    ]


def test_an_interrupted_run_goes_on_and_a_torn_line_is_dropped(tmp_path):
    writer = TableWriter(tmp_path, EMPTY)
    writer.add(row(2, "passed", 3.0))
    writer.add(row(3, "passed", 4.0))
    writer.close(finished=False)
    partial = partial_of(path_of(tmp_path, DEVICE, WORKLOAD))
    partial.write_text(partial.read_text() + '{"kernel": "mosaic_gpu.ma')
    again = TableWriter(tmp_path, EMPTY)
    assert again.known == {row(2).key, row(3).key}
    again.add(row(4, "passed", 5.0))
    again.close(finished=True)
    assert not partial.exists()
    assert [r.us for r in read(again.path).rows] == [3.0, 4.0, 5.0]


def test_a_finished_table_can_be_added_to(tmp_path):
    for stages in (2, 3):
        writer = TableWriter(tmp_path, EMPTY)
        writer.add(row(stages, "passed", float(stages)))
        writer.close(finished=True)
    assert len(read(writer.path).rows) == 2


def test_a_run_killed_before_its_first_line_starts_anew(tmp_path):
    path = path_of(tmp_path, DEVICE, WORKLOAD)
    path.parent.mkdir(parents=True)
    partial_of(path).touch()
    writer = TableWriter(tmp_path, EMPTY)
    assert writer.known == frozenset()
    writer.close(finished=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not gzip", "is no table"),
        (gzip.compress(b'{"kernel": "x"}\n'), "no table line"),
        (gzip.compress(b'{"table": 99}\n'), "version 99"),
        (gzip.compress(b""), "no header"),
    ],
    ids=["not gzip", "other rows", "other version", "empty"],
)
def test_bad_files_are_named(tmp_path, content, reason):
    path = tmp_path / "matmul__0.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        read(path)
    assert path.name in str(caught.value)
