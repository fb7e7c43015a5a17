"""The bench of tables: what it would measure, what it records, and how it goes on after a crash."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_kernels import CATALOGUE
from pallas_kernels.shapes import array
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.ops import MATMUL
from search import table_bench
from search.compile_pool import CompilePool
from search.findings import workload_of
from search.measure import Measurement, MeasuringProcess
from search.op_bench import OpBench, OpSetup, describe_chain
from search.paired import Effort
from search.space import legal_schedules
from search.table_bench import (
    TableBench,
    TablePlan,
    Work,
    plan_table,
    results,
    stratified,
    timed_row,
)
from search.tables import Table, TableRow, TableWriter, partial_of, path_of, read
from tests.search.bad_kernel import KERNEL

ROOT = Path(__file__).resolve().parents[2]
H200 = chip("NVIDIA H200")
WORKLOAD = MATMUL.workload(array(4, 64, dtype="float32"), array(32, 64, dtype="float32"))
OTHER = MATMUL.workload(array(2, 64, dtype="float32"), array(32, 64, dtype="float32"))
BROKEN = MATMUL.workload(array(3, 64, dtype="float32"), array(32, 64, dtype="float32"))
STREAM = "mosaic_gpu.matmul.stream"
QKV = workload_of("matmul[M=8,K=2048,N=3072|x:bfloat16,w:bfloat16]")
QKV_WRITE = workload_of(
    "norm_qkv_rope_write[M=2,D=64,K=1,C=4,H=16,R=16,Z=16|x:float32,norm:float32,w:float32,"
    "cos_sin:float32,kv:float32,slots:int32|eps=1e-05]"
)
EFFORT = Effort(noise_pairs=10, max_pairs=10, sample_ms=0.2)


def plan(*modes, workload=WORKLOAD):
    points = tuple((("mode", mode),) for mode in modes)
    return TablePlan(workload, KERNEL.name, points)


def run(root, plans, deadline_s=float("inf")):
    """What a run leaves: its tables by workload, and the result line, if it measured anything."""
    with CompilePool(1) as pool, MeasuringProcess(trial_timeout_s=10.0) as measurer:
        done = TableBench(root, plans, pool, measurer, EFFORT, deadline_s).run()
        assert measurer.restarts in ({}, {"timeout": 1})
    return done


def test_schedules_are_compiled_judged_and_timed_beside_the_incumbent(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(table_bench, "HOPELESS", 1)
    broken = plan("wrong", "fast", "twin", workload=BROKEN)
    plans = [plan("fast", "wrong", "raises", "twin"), broken, plan("twin", workload=OTHER)]
    first, left, second = done = run(tmp_path, plans)
    assert left.missing == 2 and not left.writer.path.exists()
    assert f"left: {BROKEN.key}: the first 1 schedules all fail" in capsys.readouterr().out
    rows = {row.schedule[0][1]: row for row in read(first.writer.path).rows}
    assert {mode: row.status for mode, row in rows.items()} == {
        "fast": "passed",
        "wrong": "rejected",
        "raises": "compile_error",
        "twin": "passed",
    }
    assert rows["fast"].incumbent_us > 0 and len(rows["fast"].samples_us) == EFFORT.max_pairs
    assert "does not build" in rows["raises"].reason and WORKLOAD.key in rows["wrong"].reason
    assert rows["twin"].digest == rows["fast"].digest != rows["wrong"].digest
    assert read(first.writer.path).noise_floor > 0
    assert (first.missing, second.missing) == (0, 0)
    result, on_device = results(
        done, 1, EFFORT
    )  # a duplicate, a rejected and a broken one are no trials
    assert result.value == pytest.approx(2 / second.ended_s * 3600) and len(result.samples) == 2
    assert 0 < max(on_device.samples) < second.ended_s


@pytest.mark.slow
def test_a_run_stops_at_its_deadline_and_the_next_goes_on_past_a_hang(tmp_path):
    plans = [plan("fast", "hang", "twin")]
    (stopped,) = run(tmp_path, plans, deadline_s=time.monotonic())
    assert stopped.missing == 3 and not stopped.writer.path.exists()
    with pytest.raises(PolyjaxError, match="no schedule"):
        results([stopped], 1, EFFORT)
    (work,) = run(tmp_path, plans)
    found = read(work.writer.path)
    assert [row.status for row in found.rows] == ["passed", "timeout", "passed"]
    (again,) = run(tmp_path, plans)
    assert not again.digests and found.noise_floor > 0
    assert read(work.writer.path) == found


def test_a_schedule_far_behind_has_the_sample_without_recording():
    arms = {"op": {"candidate_us": [90.0, 70.0], "incumbent_us": [10.0, 11.0]}}
    row = timed_row(KERNEL.name, (("mode", "slow"),), Measurement("slow", arms=arms), "d")
    assert (row.status, row.us, row.incumbent_us) == ("passed", 70.0, 0.0) and row.reason
    row = timed_row(KERNEL.name, (("mode", "slow"),), Measurement("passed", arms=arms), "d")
    assert (row.us, row.incumbent_us) == (80.0, 10.5)
    assert TableRow.from_json(row.to_json()) == row


def test_what_a_run_did_not_come_to_is_measured_by_the_next(tmp_path):
    path = path_of(tmp_path, "cpu", WORKLOAD)
    writer = TableWriter(tmp_path, Table(WORKLOAD, "cpu", {}))
    one, two, three = plan("fast", "slow", "twin").points
    writer.add(TableRow(KERNEL.name, two, "passed", (1.0,)))
    work = Work(plan("fast", "slow", "twin"), writer, None, None)
    assert work.todo == [0, 2] and work.missing == 2
    work.writer.close(finished=False)
    assert partial_of(path).exists() and not path.exists()
    writer = TableWriter(tmp_path, Table(WORKLOAD, "cpu", {}))
    for point in (one, three):
        writer.add(TableRow(KERNEL.name, point, "passed", (1.0,)))
    work = Work(plan("fast", "slow", "twin"), writer, None, None)
    assert work.todo == [] and work.missing == 0
    work.close(print)
    assert path.exists()


def test_plans_are_legal_distinct_and_vary_every_field():
    made = plan_table(QKV, STREAM, H200, 256, seed=0)
    assert made == plan_table(QKV, STREAM, H200, 256, seed=0)
    assert made.points != plan_table(QKV, STREAM, H200, 256, seed=1).points
    space, _ = legal_schedules(CATALOGUE[STREAM], QKV, H200)
    assert len(set(made.points)) == 256 and set(made.points) < set(space.points)
    assert dict(made.points[0]) == CATALOGUE[STREAM].default(QKV, H200).to_json()
    few = stratified(space.points, 60, seed=3)
    for name, values in space.values.items():
        assert {dict(point)[name] for point in few} == set(values)
    with pytest.raises(ConfigError, match="486 legal schedules, not 500"):
        plan_table(QKV, STREAM, H200, 500, seed=0)


def test_the_chain_of_a_workload_is_known_without_its_bench():
    for workload in (WORKLOAD, QKV_WRITE):
        chain, avals = describe_chain(workload)
        opened = OpBench(OpSetup(workload, seed=7)).opened
        assert (chain, avals) == (opened.chain, opened.avals)


def test_the_script_says_what_it_would_do():
    command = [sys.executable, str(ROOT / "scripts" / "bench_tables"), "--dry_run", "--schedules=9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("9 schedules of mosaic_gpu.") == 9
    assert all(op in done.stdout for op in ("matmul", "norm_gate_up", "norm_qkv_rope_write"))
    command += ["--workload=matmull[M=1|]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "matmull" in done.stderr
