"""Tuning beside a server: its verdict is part of each decision; a restart goes on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyjax.core.errors import RequestError
from polyjax.core.plan import Plan
from search.agents.random import Random
from search.background import Round, eaten_by_borders
from search.job_process import Answer
from search.ledger import Ledger
from search.live import (
    LiveServer,
    LiveTuner,
    PlanChanged,
    has_drifted,
    observed_traffic,
)
from search.measure import Measurement
from search.paired import Effort
from search.space import Point, Space
from search.targets import Job
from search.traffic import draw, padded_tokens
from search.tuner import Budget
from tests import tiny_llama

PLANS = {
    name: Plan(ladder=tiny_llama.LADDER, compiler_options=(("speed", name),))
    for name in ("start", "same", "fast", "slow")
}
COSTS_US = {"start": 100.0, "same": 100.0, "fast": 50.0, "slow": 150.0}


def point(name: str) -> Point:
    return (("speed", name),)


def plan_of(at: Point) -> Plan:
    return PLANS[dict(at)["speed"]]


class ToyTarget:
    name = "toy"
    space = Space([point(name) for name in PLANS])
    start = point("start")

    def key(self, at: Point) -> str:
        return f"toy {dict(at)['speed']}"

    def candidate(self, at: Point) -> dict[str, Any]:
        return dict(at)

    def point(self, candidate: Mapping[str, Any]) -> Point | None:
        return point(candidate["speed"])

    def prerequisites(self) -> list[Job]:
        return []

    def jobs(self, at: Point) -> list[Job]:
        return [Job(dict(at)["speed"], print, ())]

    def final_jobs(self, at: Point) -> list[Job]:
        return []

    def measured(self, at: Point, incumbent: Point) -> tuple[Any, ...]:
        return dict(at)["speed"], dict(incumbent)["speed"]

    def judged(self, at: Point) -> Any:
        return at

    def samples_us(self, arms: Mapping[str, Any], arm: str) -> list[float]:
        return list(arms["op"][arm])

    def predicted_us(self, at: Point) -> float | None:
        return None

    def winner(self, at: Point) -> dict[str, Any]:
        return {"plan": plan_of(at).to_json()}


class ToyPool:
    """Compiles at once; each candidate is another program."""

    size = 1

    def __init__(self) -> None:
        self._done: list[tuple[Any, Answer]] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, tag: Any, function: Any, *arguments: Any) -> None:
        result = {"digest": str(tag), "lower_s": 0.0, "compile_s": 0.0}
        self._done.append((tag, Answer("ok", result)))

    def poll(self, wait_s: float = 0.0) -> list[tuple[Any, Answer]]:
        done, self._done = self._done, []
        return done

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class ToyMeasurer:
    def __init__(self) -> None:
        self.measured: list[str] = []

    def measure(self, name: str, incumbent: str) -> Measurement:
        self.measured.append(name)
        jitter = [1.0 + 0.001 * (n % 3) for n in range(20)]
        arms = {"candidate_us": COSTS_US[name], "incumbent_us": COSTS_US[incumbent]}
        return Measurement(
            "passed",
            arms={"op": {arm: [us * j for j in jitter] for arm, us in arms.items()}},
            noise={"op": {"first_us": jitter, "second_us": jitter[::-1]}},
        )

    def judge(self, candidate: Any) -> Measurement:
        return Measurement("passed")


class ToyEngine:
    """Knows the plan in force and answers proposals with `verdict`."""

    def __init__(self, verdict: Mapping[str, Any]):
        self.plan = PLANS["start"]
        self.verdict = verdict
        self.proposed: list[dict[str, Any]] = []

    def __call__(self, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        if command == "plan":
            return {"plan": {**self.plan.to_json(), "ladder": None}}
        if command == "ladder":
            return {"ladder": dataclasses.asdict(tiny_llama.LADDER)}
        if command == "plan/propose":
            self.proposed.append(dict(payload))
            return {"proposal_id": len(self.proposed), "stage": "queued", "reason": ""}
        if isinstance(self.verdict.get("raises"), Exception):
            raise self.verdict["raises"]
        if self.verdict["stage"] == "current":
            self.plan = Plan.from_json(self.proposed[-1]["plan"])
        return {"proposal_id": len(self.proposed), "reason": "", **self.verdict}


SURVIVED = {"stage": "current", "watch": {"state": "survived"}}
REFUSED = {"stage": "refused", "reason": "canary: no faster"}
ROLLED_BACK = {"stage": "rolled_back", "reason": "steps take longer"}


def tuner(
    folder: Path, engine: ToyEngine, measurer: ToyMeasurer, target: ToyTarget | None = None
) -> LiveTuner:
    made: Any = LiveTuner
    return made(
        LiveServer(engine, "test"),
        plan_of,
        Ledger(folder / "ledger.sqlite", {"machine": "toy"}),
        target or ToyTarget(),
        measurer,
        ToyPool(),
        Random(ToyTarget.space, 0),
        Budget(),
        Effort(max_pairs=20),
    )


def statuses(made: LiveTuner) -> dict[str, str]:
    return {trial.candidate["speed"]: trial.status for trial in made._ledger.trials("toy")}


def test_a_plan_the_server_keeps_is_promoted(tmp_path: Path) -> None:
    engine, measurer = ToyEngine(SURVIVED), ToyMeasurer()
    made = tuner(tmp_path, engine, measurer)
    made.run()
    assert engine.plan == PLANS["fast"] and made.best.point == point("fast")
    [proposal] = engine.proposed
    assert proposal["agent"] == "test" and "speed=fast" in proposal["lineage"]
    [decision] = [p for p in made._ledger.promotions() if p.promoted]
    assert decision.evidence["server"]["accepted"]
    assert statuses(made)["fast"] == "passed"


def test_a_win_that_is_none_in_a_step_is_not_proposed(tmp_path: Path) -> None:
    engine, measurer = ToyEngine(SURVIVED), ToyMeasurer()
    made = tuner(tmp_path, engine, measurer)
    made._unworthy = lambda at, arms: f"{dict(at)['speed']} costs more around it"
    made.run()
    assert not engine.proposed and made.best.point == point("start")
    fast = next(t for t in made._ledger.trials("toy") if t.candidate["speed"] == "fast")
    assert (fast.status, fast.reason) == ("passed", "fast costs more around it")
    assert fast.verdicts["relative"]["cost_us"] == pytest.approx(50.0, rel=0.01)
    [decision] = [p for p in made._ledger.promotions() if p.trial == fast.id]
    assert not decision.promoted and "but fast costs more around it" in decision.evidence["reason"]


def test_a_kernel_must_save_more_than_its_borders_take() -> None:
    samples = {"incumbent_us": [30.0, 31.0, 32.0], "candidate_us": [20.0, 21.0, 22.0]}
    assert eaten_by_borders(samples) == ""
    samples["candidate_us"] = [28.0, 29.0, 30.0]
    assert eaten_by_borders(samples).startswith("saves 2.0 us a call")


@pytest.mark.parametrize("verdict", [REFUSED, ROLLED_BACK])
def test_a_plan_the_server_does_not_keep_is_rejected(
    tmp_path: Path, verdict: Mapping[str, Any]
) -> None:
    engine, measurer = ToyEngine(verdict), ToyMeasurer()
    made = tuner(tmp_path, engine, measurer)
    made.run()
    assert len(engine.proposed) == 1
    assert made.best.point == point("start")
    assert statuses(made) == {
        "start": "passed", "same": "passed", "slow": "passed", "fast": "rejected"
    }  # fmt: skip
    fast = next(t for t in made._ledger.trials("toy") if t.candidate["speed"] == "fast")
    assert verdict["reason"] in fast.reason
    assert fast.verdicts["relative"]["cost_us"] is None  # what the agent heard
    assert not any(p.promoted for p in made._ledger.promotions())
    again = tuner(tmp_path, engine, ToyMeasurer())
    again.run()
    assert len(engine.proposed) == 1 and not again._measurer.measured  # type: ignore[attr-defined]


def test_a_tuner_that_dies_in_a_proposal_loses_that_trial_alone(tmp_path: Path) -> None:
    engine, measurer = ToyEngine({"raises": RuntimeError("killed")}), ToyMeasurer()
    made = tuner(tmp_path, engine, measurer)
    with pytest.raises(RuntimeError, match="killed"):
        made.run()
    before = statuses(made)
    assert "fast" not in before
    engine.verdict, later = SURVIVED, ToyMeasurer()
    again = tuner(tmp_path, engine, later)
    again.run()
    assert engine.plan == PLANS["fast"]
    assert not set(later.measured) & set(before)


def test_a_server_started_anew_gets_what_was_best(tmp_path: Path) -> None:
    tuner(tmp_path, ToyEngine(SURVIVED), ToyMeasurer()).run()
    fresh, measurer = ToyEngine(SURVIVED), ToyMeasurer()
    again = tuner(tmp_path, fresh, measurer)
    again.run()
    assert fresh.plan == PLANS["fast"] and not measurer.measured
    refusing = ToyEngine(REFUSED)
    third = tuner(tmp_path, refusing, ToyMeasurer())
    third.run()
    assert third.best.point == point("start") and refusing.plan == PLANS["start"]


def test_a_search_that_starts_from_an_earlier_winner_measures_nothing_again(tmp_path: Path) -> None:
    """Nor does it for ever: a turn without a new trial is how a tuner knows that it is done."""

    class Later(ToyTarget):
        start = point("fast")

        def point(self, candidate: Mapping[str, Any]) -> Point | None:
            """What the earlier one started from is no point of it."""
            return None if candidate["speed"] == "start" else super().point(candidate)

    engine, later = ToyEngine(SURVIVED), ToyMeasurer()
    tuner(tmp_path, engine, ToyMeasurer()).run()
    again = tuner(tmp_path, engine, later, Later())
    again.run()
    assert not later.measured and not again.new_trials
    assert again.best.point == point("fast")
    assert again.start_us == pytest.approx(50.0, rel=0.01)


def test_another_plan_in_force_ends_the_search(tmp_path: Path) -> None:
    engine = ToyEngine(SURVIVED)
    made = tuner(tmp_path, engine, ToyMeasurer())
    engine.plan = Plan(ladder=tiny_llama.LADDER, compiler_options=(("speed", "operator's"),))
    with pytest.raises(PlanChanged):
        made.run()


def test_an_operators_change_while_measuring_is_not_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(SURVIVED)
    made = tuner(tmp_path, engine, ToyMeasurer())
    measure = made._measure

    def measured(at: Point) -> Measurement:
        found = measure(at)
        if at == point("fast"):
            engine.plan = PLANS["slow"]
        return found

    monkeypatch.setattr(made, "_measure", measured)
    with pytest.raises(PlanChanged):
        made.run()
    assert not engine.proposed


def test_a_full_queue_is_a_refusal() -> None:
    def full(command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        raise RequestError("16 proposals are waiting already", status=409)

    verdict = LiveServer(full, "test").propose(PLANS["fast"], "x" * 1000)
    assert not verdict.accepted and "waiting already" in verdict.reason


LAUNCHES = {
    "decode_sequences": {"1": 30, "2": 70},
    "decode_pages": {"3": 50, "6": 50},
    "prefill_tokens": {"16": 10},
}


def test_traffic_is_that_of_the_launches() -> None:
    traffic = observed_traffic(LAUNCHES, page_size=8, seed=1)
    assert traffic is not None
    assert set(traffic.concurrency) == {1, 2} and traffic.concurrency.count(1) in (4, 5)
    assert set(traffic.prompt_tokens) == {16}
    assert set(traffic.output_tokens) == {2 * (24 - 16), 2 * (48 - 16)}
    few = {**LAUNCHES, "decode_sequences": {"1": 3}}
    assert observed_traffic(few, 8, 1) is None
    assert observed_traffic({**LAUNCHES, "prefill_tokens": {}}, 8, 1) is None


def test_drift() -> None:
    before = observed_traffic(LAUNCHES, 8, 1)
    assert before is not None
    assert not has_drifted(before, before)
    assert has_drifted(before, dataclasses.replace(before, concurrency=(9,)))
    assert has_drifted(before, dataclasses.replace(before, prompt_tokens=(4,)))


def test_a_round_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "round.json"
    assert Round.load(path) is None
    made = Round("model", PLANS["fast"].to_json(), {"seed": 3}, 5)
    made.save(path)
    found = Round.load(path)
    assert found is not None and Plan.from_json(found.plan) == PLANS["fast"]
    path.write_text('{"model": "torn')
    assert Round.load(path) is None


def test_a_ladder_that_pads_less_is_predicted_to_cost_less() -> None:
    spec = observed_traffic(LAUNCHES, 8, 1)
    assert spec is not None
    traffic = draw(spec, 128, 4, 32)
    narrow = tiny_llama.LADDER
    wide = dataclasses.replace(narrow, decode=narrow.decode[-1:])
    few, many = (padded_tokens(traffic, ladder, 8, 16) for ladder in (narrow, wide))
    assert 0 < few < many
