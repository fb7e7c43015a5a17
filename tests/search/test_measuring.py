"""Whatever a candidate does, the ledger says so and the next one is measured."""

from __future__ import annotations

import functools
import os
import time

import jax
import jax.numpy as jnp
import pytest

from polyjax.core.ops import MATMUL
from search.compile_jobs import OpCandidate
from search.compile_pool import CompilePool
from search.decisions import replay
from search.job_process import JobProcess
from search.ledger import Ledger
from search.measure import MeasuringProcess
from search.op_bench import OpSetup
from search.paired import Effort
from search.targets import OpTarget
from search.tuner import Budget, Tuner
from tests.search.bad_kernel import KERNEL
from tests.search.jobs import double, poison

EFFORT = Effort(noise_pairs=12, max_pairs=20, sample_ms=1.0)


def workload():
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return MATMUL.workload(array((4, 64)), array((64, 64)))


def test_a_job_answers_fails_crashes_or_times_out_and_the_next_one_runs():
    process = JobProcess("test")
    try:
        assert process.call(double, 21, timeout_s=60).result == 42
        failed = process.call(int, "x", timeout_s=60)
        assert (failed.status, failed.poisoned) == ("failed", False)
        assert "ValueError" in failed.error
        crashed = process.call(os.abort, timeout_s=60)
        assert crashed.status == "crashed" and "SIGABRT" in crashed.error
        assert process.call(time.sleep, 60, timeout_s=0.2).status == "timeout"
        assert process.call(object, timeout_s=60).status == "failed"  # no JSON
        assert process.call(double, 4, timeout_s=60).result == 8
        assert process.starts == 3
    finally:
        process.kill()


def test_a_paused_job_does_not_time_out():
    process = JobProcess("test")
    try:
        process.call(double, 1, timeout_s=60)
        process.submit(time.sleep, 0.1, timeout_s=0.6)
        process.pause()
        assert process.poll(1.0) is None
        process.resume()
        assert process.poll(30.0).status == "ok"
    finally:
        process.kill()


def test_a_pool_loses_one_job_to_a_crash():
    with CompilePool(2) as pool:
        for number in range(6):
            pool.submit(number, os.abort if number == 2 else double, *[number] * (number != 2))
        found = {}
        while pool.pending:
            found |= dict(pool.poll(1.0))
    assert found.pop(2).status == "crashed"
    assert {number: answer.result for number, answer in found.items()} == {
        n: 2 * n for n in (0, 1, 3, 4, 5)
    }


def test_a_failure_that_poisons_the_device_is_told():
    process = JobProcess("test")
    try:
        answer = process.call(poison, timeout_s=60)
        assert (answer.status, answer.poisoned) == ("failed", True)
    finally:
        process.kill()


class InOrder:
    """Asks for the points in the order the space lists them."""

    name = "in order"

    def __init__(self, space):
        self.waiting = list(space.points)

    def ask(self):
        return self.waiting.pop(0) if self.waiting else None

    def tell(self, point, cost_us):
        if point in self.waiting:
            self.waiting.remove(point)


def candidate(mode):
    return OpCandidate(workload(), KERNEL.name, (("mode", mode),))


def tune(ledger_path, folder):
    """A run over every mode of the bad kernel, from its slow one."""
    with MeasuringProcess(trial_timeout_s=20.0) as measurer, CompilePool(1) as pool:
        opened = measurer.open(OpSetup(workload(), 5, EFFORT))
        ledger = Ledger(ledger_path, opened.environment)
        target = OpTarget(workload(), opened, folder, KERNEL.name, candidate("slow"))
        agent = InOrder(target.space)
        tuner = Tuner(ledger, target, measurer, pool, agent, Budget(), EFFORT, share_cores=True)
        tuner.run()
        return tuner, ledger, measurer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    tuner, ledger, measurer = tune(folder / "ledger.sqlite", folder)
    return tuner, ledger, measurer, folder


def by_mode(ledger):
    return {t.candidate["schedule"]["mode"]: t for t in ledger.trials()}


def test_each_misbehaviour_is_a_status_in_the_ledger(run):
    tuner, ledger, measurer, _ = run
    found = by_mode(ledger)
    assert {mode: trial.status for mode, trial in found.items()} == {
        "slow": "passed",  # the baseline
        "aborts": "crashed",
        "fast": "passed",
        "twin": "duplicate",
        "wrong": "rejected",
        "hang": "timeout",
        "slower": "slow",
        "raises": "compile_error",
    }  # and the illegal one was refused before anything was compiled
    assert "bound" in found["wrong"].reason
    assert "SIGABRT" in found["aborts"].reason
    assert "does not build" in found["raises"].reason
    assert measurer.restarts == {"crashed": 1, "timeout": 1}
    assert tuner.new_trials == len(found)


def test_a_duplicate_is_not_timed_and_costs_what_its_twin_costs(run):
    _, ledger, _, _ = run
    twin, fast = (by_mode(ledger)[mode] for mode in ("twin", "fast"))
    assert not twin.samples_us and "time" not in twin.spent
    assert twin.verdicts["relative"]["same_as"] == fast.id
    assert twin.verdicts["relative"]["cost_us"] == fast.verdicts["relative"]["cost_us"]


def test_a_slow_candidate_is_stopped_after_its_first_runs(run):
    _, ledger, _, _ = run
    slower = by_mode(ledger)["slower"]
    assert len(slower.samples_us) == 2
    assert slower.verdicts["relative"]["ratio"] > EFFORT.slow_ratio


def test_the_fast_one_is_promoted_and_the_one_that_died_in_a_gate_is_not(run):
    tuner, ledger, _, _ = run
    found = by_mode(ledger)
    made = {decision.trial: decision for decision in ledger.promotions()}
    assert made[found["fast"].id].promoted
    assert made[found["fast"].id].evidence["choice"] == candidate("fast").to_json()
    assert not made[found["aborts"].id].promoted
    assert "SIGABRT" in made[found["aborts"].id].evidence["refused"]
    assert tuner.best.trial == found["fast"].id
    assert tuner.gain > 1.0
    assert found["fast"].verdicts["all gates"]["op_equivalence"]["passed"]


def test_every_decision_can_be_taken_again_from_its_samples(run):
    _, ledger, _, _ = run
    made = replay(ledger)
    assert made
    assert all(decision.promoted == again for decision, again, _ in made)


def test_resuming_measures_nothing_that_is_known(run):
    tuner, ledger, _, folder = run
    before = list(ledger.trials())
    again, reopened, measurer = tune(folder / "ledger.sqlite", folder)
    assert again.new_trials == 0
    assert [t.key for t in reopened.trials()] == [t.key for t in before]
    assert again.best == tuner.best
    assert measurer.restarts == {}
    assert again.start_us == tuner.start_us


def test_the_baseline_is_the_start_against_itself(run):
    _, ledger, _, _ = run
    first = next(iter(ledger.trials()))
    assert first.agent == "baseline" and first.candidate["schedule"] == {"mode": "slow"}
    assert first.verdicts["relative"]["ratio"] == 1.0
    assert len(first.verdicts["noise"]["samples"]["op"]["first_us"]) == EFFORT.noise_pairs
