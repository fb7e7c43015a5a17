"""Tuning tables: merged by workload, whole or not there, named when broken."""

import json

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.op import Choice
from polyjax.core.tables import SHIPPED, load_tables, merge_tables

MATMUL, NORM = "matmul[M=8|x:bfloat16]", "rms_norm[M=8|x:bfloat16]"


def choice(**schedule):
    return Choice("mosaic_gpu.some.kernel", tuple(sorted(schedule.items())))


def test_choices_are_merged_by_workload_into_a_file_an_op(tmp_path):
    first = {MATMUL: choice(tile=64, pdl=True), NORM: choice(rows=2)}
    written = merge_tables(tmp_path, "Some GPU", first)
    assert [path.name for path in written] == ["matmul.json", "rms_norm.json"]
    assert load_tables(tmp_path, "Some GPU") == first
    second = {MATMUL: choice(tile=128, pdl=False), MATMUL.replace("8", "16"): choice(tile=32)}
    assert [path.name for path in merge_tables(tmp_path, "Some GPU", second)] == ["matmul.json"]
    assert load_tables(tmp_path, "Some GPU") == first | second
    assert load_tables(tmp_path, "Another GPU") == {}
    assert {path.suffix for path in (tmp_path / "Some GPU").iterdir()} == {".json"}


@pytest.mark.parametrize("text", ['{"a": 3}', "[]", "{", '{"a": {"kernel": "k"}}'])
def test_a_broken_table_is_named_and_left_as_it_is(tmp_path, text):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "matmul.json").write_text(text)
    with pytest.raises(ConfigError, match=r"matmul\.json"):
        load_tables(tmp_path, "cpu")
    with pytest.raises(ConfigError, match=r"matmul\.json"):
        merge_tables(tmp_path, "cpu", {MATMUL: choice(tile=64)})
    assert (tmp_path / "cpu" / "matmul.json").read_text() == text


def test_shipped_tables_are_found_and_sorted_by_op():
    files = list(SHIPPED.glob("*/*.json"))
    assert files
    for path in files:
        keys = list(json.loads(path.read_text()))
        assert keys == sorted(keys) and {key.partition("[")[0] for key in keys} == {path.stem}
