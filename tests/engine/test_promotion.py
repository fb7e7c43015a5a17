"""Plans that have to prove themselves: every stage, and candidates that fail in each of them."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyjax.compiler.program import Kind, ProgramKey, ProgramRequest, compile_program
from polyjax.core.buckets import Bucket
from polyjax.core.errors import RequestError
from polyjax.core.plan import Plan
from polyjax.engine import canary
from polyjax.engine.engine import Engine
from polyjax.engine.promotion import Policy
from tests.engine.audit import audit
from tests.engine.candidates import (
    FirstRuns,
    Switch,
    Wrap,
    breaks,
    nan_hidden,
    nan_prefill,
    offer,
    raising,
    scaled_hidden,
    serve,
    settle,
    shifted_kv,
)
from tests.engine.serving import assert_greedy


@pytest.fixture
def engine(small_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each test finds the plan that the one before left, nothing on its way, a quick policy.

    How long steps really take on a busy machine decides nothing.
    """
    monkeypatch.setattr(small_engine, "_step_us", lambda: None)
    small_engine.installer.policy = Policy(work_share=1.0, shadow_every=1, shadow_steps=6)
    small_engine.installer._first_runs = FirstRuns()  # type: ignore[assignment]
    settle(small_engine)
    return small_engine


@pytest.fixture
def speed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the canary find candidates this much slower than the plan in force."""
    rng = np.random.default_rng(3)

    def set_speed(factor: float) -> None:
        def timed(state: Any) -> Any:
            real = canary.timed(state)

            def timer(programs: Any, key: Any, flat: Any) -> float:
                real(programs, key, flat)
                slower = 1.0 if programs is engine.programs.current else factor
                return float(100.0 * slower * rng.uniform(0.99, 1.01))

            return timer

        monkeypatch.setattr("polyjax.engine.live_trial.timed", timed)

    set_speed(0.5)
    return set_speed


def propose(engine: Engine, plan: Plan) -> int:
    payload = {"plan": plan.to_json(), "lineage": "seed 1 > wider tiles", "agent": "test"}
    told = engine.admin("plan/propose", payload)
    assert told["stage"] == "queued"
    number: int = told["proposal_id"]
    return number


def stage(engine: Engine, proposal: int) -> str:
    told: str = engine.admin("plan/proposal", {"proposal_id": proposal})["stage"]
    return told


def ended(engine: Engine, proposal: int) -> bool:
    told = engine.admin("plan/proposal", {"proposal_id": proposal})
    watching = told.get("watch") is not None and told["watch"]["state"] == "running"
    return told["stage"] in ("refused", "rolled_back") or (
        told["stage"] == "current" and not watching
    )


def kinds(engine: Engine, after: int) -> list[str]:
    return [
        event["kind"] + (f":{event['stage']}" if event["kind"] == "promotion_stage" else "")
        for event in engine.admin("events", {"after": after})["events"]
    ]


def check_unharmed(engine: Engine, streams: Any) -> None:
    """Every stream said what the model says; no page is lost."""
    for request, stream in streams:
        assert_greedy(engine, request, stream.tokens)
    audit(engine.scheduler.allocator, [])


def test_a_faster_candidate_takes_the_whole_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any
) -> None:
    """And shadow steps leave every page alone that is not scratch."""
    after, before = engine.events.last, engine.programs.current.plan.digest
    plan = offer(engine, monkeypatch)
    shadow, changed = engine.installer.after_launch, []

    def after_launch(running: Any) -> None:
        trial = engine.installer._trial
        if trial is None or not trial._runner.is_busy:
            return shadow(running)
        usable = slice(1, engine.spec.num_pages[0] - engine.spec.scratch_pages)

        def live() -> list[np.ndarray]:
            slots = np.array(engine.state.last_tokens)[:-1]
            return [*(np.array(pool)[usable] for pool in engine.state.kv), slots]

        was = live()
        shadow(running)
        changed.append(not all(map(np.array_equal, was, live())))

    monkeypatch.setattr(engine.installer, "after_launch", after_launch)
    number = propose(engine, plan)
    streams = serve(engine, lambda: ended(engine, number))
    check_unharmed(engine, streams)
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert (told["stage"], told["watch"]["state"]) == ("current", "survived"), told
    assert len(changed) >= 6
    assert not any(changed)
    assert sum(told["shadow"]["shadowed"].values()) >= 6
    assert {c["decision"] for c in told["canary"].values()} == {"faster"}
    assert kinds(engine, after) == [
        *("proposed", "promotion_started", "promotion_stage:first_run"),
        *("promotion_stage:gating", "verdict", "promotion_stage:shadow", "verdict"),
        *("promotion_stage:canary", "verdict", "promotion_stage:pending", "swap", "watch_ended"),
    ]
    swap = next(e for e in engine.events.after(after) if e["kind"] == "swap")
    assert (swap["plan"], swap["before"]) == (plan.digest, before)
    assert (swap["agent"], swap["lineage"]) == ("test", "seed 1 > wider tiles")
    assert swap["epoch"] == engine.programs.epoch
    # The candidate's tokens are exposed from the swap on, never before it.
    epochs = {output.epoch for _, stream in streams for output in stream.outputs}
    assert epochs == {swap["epoch"] - 1, swap["epoch"]}


def test_a_finer_ladder_is_judged_on_its_own_rungs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any
) -> None:
    """Rows run in the bucket that the candidate would put them in, though it has theirs, too."""
    widest = max(engine.programs.current.ladder.decode, key=lambda b: (b.sequences, b.pages))
    key = ProgramKey(Kind.DECODE_GREEDY, Bucket(1, widest.sequences, widest.pages // 2))
    assert key not in engine.programs.current.programs
    request = ProgramRequest(engine.spec, Plan(), key)
    rung = compile_program(request, engine.source.mesh)
    number = propose(engine, offer(engine, monkeypatch, rung=rung))
    check_unharmed(engine, serve(engine, lambda: ended(engine, number)))
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert told["stage"] == "current", told
    assert told["shadow"]["shadowed"][str(key)] > 0
    assert told["canary"][str(key)]["decision"] == "faster"
    assert str(ProgramKey(Kind.DECODE_GREEDY, widest)) not in told["canary"]
    before = engine.programs.epoch
    engine.admin("plan/rollback", {})
    serve(engine, lambda: engine.programs.epoch > before)


@pytest.mark.parametrize(
    ("factor", "reason"), [(1.5, "slower on"), (1.0, "faster nowhere beyond the noise floor")]
)
def test_a_candidate_that_is_not_faster_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any, factor: float, reason: str
) -> None:
    speed(factor)
    before = engine.programs.current
    number = propose(engine, offer(engine, monkeypatch))
    check_unharmed(engine, serve(engine, lambda: ended(engine, number)))
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert told["stage"] == "refused"
    assert told["reason"].startswith(f"canary: {reason}")
    assert engine.programs.current is before
    # What an operator asks for comes into force all the same.
    engine.admin("plan/install", {"plan": offer(engine, monkeypatch).to_json()})
    serve(engine, lambda: not engine.installer.active and engine.probation.watch is None)
    assert engine.admin("plan", {})["installation"]["state"] == "current"


@pytest.mark.parametrize(
    ("change", "kind", "sequences", "reason"),
    [
        (scaled_hidden, Kind.DECODE_GREEDY, 0, "last hidden state is off by"),
        (scaled_hidden, Kind.DECODE_GREEDY, 4, "last hidden state is off by"),  # one bucket only
        (nan_prefill, Kind.PREFILL, 0, "a hidden state is not finite"),
        (shifted_kv, Kind.DECODE_GREEDY, 0, "KV pages are off by"),
        (raising, Kind.DECODE_GREEDY, 0, "RuntimeError: injected"),
    ],
)
def test_a_candidate_that_turns_bad_after_its_gates_is_caught_by_a_shadow_step(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    kind: Kind,
    sequences: int,
    reason: str,
) -> None:
    after, switch = engine.events.last, Switch()
    number = propose(engine, offer(engine, monkeypatch, breaks(switch, change, kind, sequences)))

    def arm() -> None:
        switch.on = stage(engine, number) == "shadow"

    streams = serve(engine, lambda: ended(engine, number), arm)
    check_unharmed(engine, streams)
    assert switch.calls
    refusal = engine.admin("events", {"after": after})["events"][-1]
    assert (refusal["kind"], refusal["stage"]) == ("promotion_refused", "shadow")
    assert reason in refusal["reason"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(nan_hidden, "is not finite"), (raising, "device error: injected")],
)
def test_a_plan_that_turns_bad_in_force_is_rolled_back_and_nothing_of_it_is_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any, change: Any, reason: str
) -> None:
    after, switch = engine.events.last, Switch()
    before = engine.programs.current.plan.digest
    number = propose(engine, offer(engine, monkeypatch, breaks(switch, change)))
    steps = iter(range(10**6))

    def arm() -> None:  # some good steps first
        switch.on = stage(engine, number) == "current" and next(steps) > 10

    check_unharmed(engine, serve(engine, lambda: ended(engine, number), arm))
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert told["stage"] == "rolled_back"
    assert reason in told["reason"]
    assert engine.programs.current.plan.digest == before
    assert kinds(engine, after)[-3:] == ["swap", "watch_ended", "rollback"]


def test_a_plan_whose_steps_are_slower_in_force_is_rolled_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any
) -> None:
    rng = np.random.default_rng(4)
    before = engine.programs.current.plan.digest

    def step_us() -> float:
        slow = engine.programs.current.plan.digest != before
        return float(rng.uniform(99, 101) * (2.0 if slow else 1.0))

    monkeypatch.setattr(engine, "_step_us", step_us)
    serve(engine, iter([False] * 60 + [True] * 10**4).__next__)  # so that there is a before
    number = propose(engine, offer(engine, monkeypatch))
    check_unharmed(engine, serve(engine, lambda: ended(engine, number)))
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert told["stage"] == "rolled_back"
    assert "take 20" in told["reason"] and "before" in told["reason"]
    assert engine.programs.current.plan.digest == before


def test_a_program_that_hangs_in_its_first_run_never_reaches_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = FirstRuns("the first-run did not finish within 900 s")
    engine.installer._first_runs = runs  # type: ignore[assignment]
    switch = Switch(on=True)
    wrap: Wrap = breaks(switch, raising)
    number = propose(engine, offer(engine, monkeypatch, wrap))
    check_unharmed(engine, serve(engine, lambda: ended(engine, number)))
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert told["stage"] == "refused"
    assert told["reason"].startswith("first run of decode_greedy[T=1,B=1,C=16]: the first-run did")
    assert not switch.calls


def test_proposals_take_turns_and_an_operator_passes_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any
) -> None:
    first = propose(engine, offer(engine, monkeypatch))
    second = propose(engine, offer(engine, monkeypatch))
    seen = set()

    def look() -> None:
        seen.add((stage(engine, first), stage(engine, second)))

    serve(engine, lambda: ended(engine, second), look)
    assert ("canary", "queued") in seen
    assert ("current", "queued") in seen  # not before the watch of the first is over
    assert ("current", "canary") in seen, engine.admin("plan/proposal", {"proposal_id": second})
    third = propose(engine, offer(engine, monkeypatch))
    serve(engine, lambda: stage(engine, third) == "shadow")
    assert not engine.has_work  # it waits for traffic, and no step is wanted for that
    before = engine.programs.current.plan.digest
    engine.admin("plan/rollback", {})
    assert stage(engine, third) == "refused"
    serve(engine, lambda: engine.programs.current.plan.digest != before)
    with pytest.raises(RequestError, match="no proposal 99"):
        engine.admin("plan/proposal", {"proposal_id": 99})


def test_the_plan_that_survived_is_on_disk_and_the_audit_log_tells_it_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, speed: Any
) -> None:
    good = propose(engine, offer(engine, monkeypatch))
    serve(engine, lambda: ended(engine, good))
    survived = engine.programs.current.plan
    switch = Switch()
    bad = propose(engine, offer(engine, monkeypatch, breaks(switch, nan_hidden)))

    def arm() -> None:
        switch.on = stage(engine, bad) == "current"

    serve(engine, lambda: ended(engine, bad), arm)
    engine.probation.close()
    assert engine.config.state_dir is not None
    assert engine.config.audit_log is not None
    kept = json.loads((Path(engine.config.state_dir) / "last_good_plan.json").read_text())
    assert kept["digest"] == survived.digest
    assert Plan.from_json(kept["plan"]) == survived
    audit_log, deadline_s = Path(engine.config.audit_log), time.monotonic() + 20
    while audit_log.read_text().count("\n") < engine.events.last and time.monotonic() < deadline_s:
        time.sleep(0.01)  # a thread of its own writes it
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert [line["number"] for line in lines] == list(range(1, engine.events.last + 1))
    assert lines[-1]["kind"] == "rollback"
