"""A run on one op: going on has to be asked for, and it ends by its number of trials."""

from __future__ import annotations

import dataclasses

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from polyjax.gates.inputs import in_dtype
from polyjax.gates.small_workloads import small_workload
from search.compile_jobs import OpCandidate
from search.ledger import Ledger
from search.paired import Effort
from search.run import RunConfig, in_force, tune_op, with_choice

WORKLOAD = in_dtype(small_workload("rms_norm"), "float32")


def test_a_plan_says_what_computes_a_workload_and_takes_a_winner():
    winner = OpCandidate(WORKLOAD, "mosaic_gpu.rms_norm.row", (("dependent_launch", True),))
    assert in_force(Plan(), WORKLOAD, "cpu") == OpCandidate(WORKLOAD, form="platform")
    plan = with_choice(Plan(), WORKLOAD, winner)
    assert dict(plan.choices)[WORKLOAD.key] == Choice(winner.kernel, winner.schedule)
    assert in_force(plan, WORKLOAD, "cpu") == winner
    by_xla = OpCandidate(WORKLOAD, form="platform")
    assert with_choice(plan, WORKLOAD, by_xla) == Plan()
    filled = with_choice(Plan(unlisted="default"), WORKLOAD, by_xla)
    assert dict(filled.choices)[WORKLOAD.key] == Choice("reference"), "else a default would return"
    assert in_force(filled, WORKLOAD, "NVIDIA H200") == by_xla


def test_an_unknown_agent_is_named(tmp_path):
    with pytest.raises(ConfigError, match="oracle"):
        RunConfig(tmp_path / "ledger.sqlite", agent="oracle")


@pytest.mark.slow
def test_going_on_has_to_be_asked_for_and_trials_are_counted(tmp_path):
    effort = Effort(noise_pairs=10, max_pairs=10, sample_ms=0.5)
    run = RunConfig(tmp_path / "ledger.sqlite", max_trials=2, effort=effort, workers=1)
    heard = []
    winner, gain = tune_op(WORKLOAD, run, None, lambda name, progress: heard.append(progress))
    assert winner.workload == WORKLOAD and gain > 0
    assert [progress.new_trials for progress in heard] == [1, 2]
    with pytest.raises(ConfigError, match="--resume"):
        tune_op(WORKLOAD, run)
    tune_op(WORKLOAD, dataclasses.replace(run, resume=True))
    trials = list(Ledger(run.ledger, None).trials())
    assert len(trials) == 4 and len({trial.key for trial in trials}) == 4
