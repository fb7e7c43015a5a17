"""The order of a background tuner's searches, and what keeps it from none of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyjax.core.op import Workload
from polyjax.core.plan import Plan
from polyjax.engine.types import EngineConfig
from search import background
from search.background import FIRST_TRIALS, TRIALS_A_TURN, BackgroundTuner, Round, Setting
from search.live import PlanChanged, ServerVerdict
from search.measure import MeasureError
from search.measure_jobs import describe_model
from search.op_bench import OpSetup
from search.plan_bench import DescribedModel
from tests import tiny_llama

PLAN = Plan(ladder=tiny_llama.LADDER)
TRAFFIC = {"prompt_tokens": [8], "output_tokens": [8], "concurrency": [2]}
OPS = {name: Workload(name, (), (), ()) for name in ("bare", "cheap", "dear", "huge", "unused")}
COSTS_US = {OPS["cheap"].key: 1.0, OPS["dear"].key: 5.0, OPS["huge"].key: 9.0}


class Measurer:
    """Opens every bench but that of the huge op, and not the whole model a second time."""

    def __init__(self, *_: Any):
        self.opened: list[str] = []

    def ask(self, function: Any, *arguments: Any) -> Any:
        if function is describe_model:
            workloads = {w.key: w for w in OPS.values()}
            return DescribedModel("NVIDIA H200", "gpu", {"machine": "toy"}, PLAN, workloads)
        return COSTS_US

    def open(self, setup: Any) -> Any:
        self.opened.append(setup.workload.op if isinstance(setup, OpSetup) else "plan")
        if self.opened[-1] in ("huge", "plan"):
            raise MeasureError("out of memory")
        return SimpleNamespace(device_kind="NVIDIA H200")


class Server:
    def __init__(self, *_: Any):
        self.accepts = False
        self.proposed: list[Plan] = []

    def plan(self) -> Plan:
        return PLAN

    def propose(self, plan: Plan, lineage: str) -> ServerVerdict:
        self.proposed.append(plan)
        return ServerVerdict(self.accepts, "", {})


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """(op, most trials) of each turn; every op has six trials to do."""
    taken: list[tuple[str, float]] = []
    left = dict.fromkeys(OPS, 6)

    class Turn:
        def __init__(self, *arguments: Any, **options: Any):
            _, _, _, self.target, _, _, _, self.budget, *_ = arguments

        def run(self) -> None:
            name, most = self.target.workload.op, self.budget.max_trials
            taken.append((name, most))
            self.new_trials = min(left[name], int(most))
            left[name] -= self.new_trials

    def target(workload: Workload, *_: Any) -> Any:
        return SimpleNamespace(workload=workload, space=[1, 2], prior=None)

    def kernels(workload: Workload, platform: str) -> list[Any]:
        return [] if workload.op == "bare" else [SimpleNamespace(name="toy")]

    for name, made in (("LeasedMeasurer", Measurer), ("LiveServer", Server), ("LiveTuner", Turn)):
        monkeypatch.setattr(background, name, made)
    monkeypatch.setattr(background, "OpTarget", target)
    monkeypatch.setattr(background, "kernels_for", kernels)
    monkeypatch.setattr(background, "AGENTS", {"bandit": lambda *_: None})
    return taken


def test_the_costliest_ops_come_first_and_what_does_not_fit_stops_nobody(
    tmp_path: Path, turns: list[tuple[str, float]]
) -> None:
    setting = Setting(EngineConfig(), 8, tmp_path / "ledger.sqlite", str(tmp_path), tmp_path, 0.05)
    tuner = BackgroundTuner(setting, lambda command, payload: {})
    tuner._search(Round("", PLAN.to_json(), TRAFFIC, 0))  # returns once nothing is left to try
    order = ["dear", "cheap", "unused"]
    assert turns[:3] == [(name, FIRST_TRIALS) for name in order]
    assert turns[3:6] == [(name, TRIALS_A_TURN) for name in order]
    opened: Any = tuner._measurer
    assert opened.opened[:5] == ["huge", "dear", "cheap", "unused", "plan"]
    assert opened.opened.count("huge") == opened.opened.count("plan") == 1


def test_a_rung_that_the_traffic_lacks_comes_before_any_trial(
    tmp_path: Path, turns: list[tuple[str, float]]
) -> None:
    setting = Setting(EngineConfig(), 8, tmp_path / "ledger.sqlite", str(tmp_path), tmp_path, 0.05)
    tuner = BackgroundTuner(setting, lambda command, payload: {})
    server: Any = tuner._server
    begun = Round("", PLAN.to_json(), {**TRAFFIC, "concurrency": [3] * 4}, 0)
    server.accepts = True
    with pytest.raises(PlanChanged):
        tuner._search(begun)
    (proposal,) = server.proposed
    assert 3 in {bucket.sequences for bucket in proposal.ladder.decode}
    assert not turns
    tuner._search(begun)  # it was taken and rolled back since: not proposed a second time
    assert len(server.proposed) == 1 and turns
