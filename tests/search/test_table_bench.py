"""The bench of tables: what it would measure, what it records, and how it goes on after a crash."""

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import jax
import pytest

from pallas_kernels.shapes import array
from polyjax.core.chips import chip
from polyjax.core.ops import MATMUL
from search.table_bench import (
    compile_job,
    fill,
    legal_jobs,
    measure_job,
    plan_tables,
    prepare,
    watched,
)
from search.tables import Table, TableRow, TableWriter, partial_of, path_of, read
from tests.search import dying_runs

ROOT = Path(__file__).resolve().parents[2]
H200 = chip("NVIDIA H200")
TOY = "tests.search.toy_kernel:KERNEL"
WORKLOAD = MATMUL.workload(array(4, 64, dtype="float32"), array(32, 64, dtype="float32"))
EMPTY = Table(WORKLOAD, "cpu", {})
JOBS = [(TOY, (("kind", kind),)) for kind in ("right", "wrong", "broken")]


def compiled(prepared, job):
    """The future of a worker's result, had at once."""
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepared.arguments)
    future = Future()
    try:
        future.set_result(compile_job(WORKLOAD, job, prepared.spec, avals))
    except Exception as error:
        future.set_exception(error)
    return future


def test_schedules_are_compiled_judged_and_timed(tmp_path):
    prepared = prepare(WORKLOAD, cold_bytes=1 << 14)
    writer = TableWriter(tmp_path, EMPTY)
    submit = lambda job: compiled(prepared, job)  # noqa: E731
    count = fill(writer, JOBS, submit, lambda job, f: measure_job(prepared, job, f), ahead=2)
    writer.close(finished=True)
    right, wrong, broken = read(writer.path).rows
    assert count == 3
    assert right.status == "passed" and len(right.samples_us) == 5 and min(right.samples_us) > 0
    assert wrong.status == "rejected" and WORKLOAD.key in wrong.reason
    assert broken.status == "compile_error" and "does not compile" in broken.reason


def test_what_ended_the_process_is_recorded_and_not_tried_again(tmp_path):
    tried = []

    def measure(job, future):
        tried.append(job)
        if len(tried) == 2:
            raise KeyboardInterrupt  # as good as a kill: nothing after it runs
        return TableRow(*job, "passed", (1.0,))

    submit = lambda job: Future()  # noqa: E731
    writer = TableWriter(tmp_path, EMPTY)
    with pytest.raises(KeyboardInterrupt):
        fill(writer, JOBS, submit, measure, ahead=8)
    writer.close(finished=False)
    assert partial_of(path_of(tmp_path, "cpu", WORKLOAD)).exists()
    again = TableWriter(tmp_path, EMPTY)
    assert fill(again, JOBS, submit, measure, ahead=8) == 1
    again.close(finished=True)
    assert tried == JOBS
    assert [row.status for row in read(again.path).rows] == ["passed", "crashed", "passed"]


def test_a_run_that_dies_is_started_again_while_it_gets_anywhere(tmp_path):
    assert watched(str(tmp_path / "a"), [], 1, dying_runs.once) == 0
    assert len([*(tmp_path / "a" / "cpu").iterdir()]) == 2
    assert watched(str(tmp_path / "b"), [], 1, dying_runs.always) == 7


def test_plans_are_legal_distinct_and_large_enough():
    plans = [*plan_tables(["matmul"], 2, 256, H200)]
    assert len({p.workload for p in plans}) == 2
    assert all(len(set(p.jobs)) == len(p.jobs) >= 256 for p in plans)
    assert set(plans[0].jobs) == set(legal_jobs(plans[0].workload, H200))
    (few,) = plan_tables(["matmul"], 1, 256, H200, most=40)
    assert len(few.jobs) == 40 and set(few.jobs) < set(plans[0].jobs)
    assert few.device_minutes == pytest.approx(plans[0].device_minutes * 40 / len(plans[0].jobs))


def test_the_script_says_what_it_would_do():
    command = [sys.executable, str(ROOT / "scripts" / "bench_tables"), "--dry_run", "--ops=matmul"]
    done = subprocess.run(
        [*command, "--workloads_per_op=1"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "1 tables" in done.stdout and "minutes of NVIDIA H200" in done.stdout
    command[-1] = "--ops=matmull"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "matmull" in done.stderr
