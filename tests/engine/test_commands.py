"""Limits, ladders, leases and restarts through the door that plans take."""

import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from polyjax.core.buckets import Bucket
from polyjax.core.errors import RequestError
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from polyjax.engine.engine import Engine
from polyjax.engine.installation import InstallState
from polyjax.engine.types import Request
from tests.engine.candidates import FirstRuns, serve, settle
from tests.engine.serving import greedy, prompt, run

_names = itertools.count()


@pytest.fixture
def engine(small_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(small_engine, "_step_us", lambda: None)
    settle(small_engine)
    limits = small_engine.scheduler.limits
    yield small_engine
    small_engine.scheduler.set_limits(limits)
    small_engine.leases.set_duty(0.005)


def renamed(plan: Plan) -> Plan:
    """Another plan with the same programs: it chooses for an op that no program calls."""
    unused = (f"nothing[N={next(_names)}]", Choice("none", ()))
    return dataclasses.replace(plan, choices=(*plan.choices, unused))


def refusal(engine: Engine, command: str, payload: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        engine.admin(command, payload)
    return refused.value


def test_limits_change_between_steps_and_requests_go_on(engine: Engine) -> None:
    after = engine.events.last
    told = engine.admin("limits", {})
    assert (told["max_num_seqs"], told["slots"], told["tune_duty"]) == (4, 4, 0.005)
    most = []

    def each_step(step: int) -> None:
        if step == 8:
            told = engine.admin("limits/set", {"max_num_seqs": 2, "max_num_batched_tokens": 16})
            assert (told["max_num_seqs"], told["max_num_batched_tokens"]) == (2, 16)
        most.append(engine.scheduler.num_running)

    requests = [Request(f"l{index}", prompt(20, index), greedy(20)) for index in range(8)]
    streams = run(engine, requests, each_step)
    assert {len(stream.tokens) for stream in streams.values()} == {20}
    assert (max(most), most[-4]) == (4, 2)  # those that ran went on, fewer were admitted
    [event] = engine.admin("events", {"after": after})["events"]
    assert event["kind"] == "limits"
    assert event["changed"] == {"max_num_seqs": [4, 2], "max_num_batched_tokens": [32, 16]}


@pytest.mark.parametrize(
    ("payload", "status", "message"),
    [
        ({}, 400, "at least one of"),
        ({"max_num_seqs": 5}, 409, "restart it with a larger"),
        ({"max_num_seqs": 0}, 400, "must be an integer in"),
        ({"max_num_seqs": True}, 400, "must be an integer"),
        ({"max_num_batched_tokens": 3}, 409, "must be at least max_num_seqs"),
        ({"max_num_seqs": 2, "tune_duty": 1.5}, 400, "tune_duty must be a number"),
        ({"max_sequences": 2}, 400, "unknown fields max_sequences"),
    ],
)
def test_bad_limits_change_nothing(
    engine: Engine, payload: dict[str, Any], status: int, message: str
) -> None:
    before = engine.admin("limits", {})
    error = refusal(engine, "limits/set", payload)
    assert (error.status, message in str(error)) == (status, True), error
    assert engine.admin("limits", {}) == before


def test_a_ladder_is_derived_from_what_was_launched(engine: Engine) -> None:
    engine.shapes.__init__()  # type: ignore[misc]  # as after a start
    assert "too few" in str(refusal(engine, "ladder/set", {"derive": True}))
    for index in range(40):
        run(engine, [Request(f"d{index}-{k}", prompt(6, k), greedy(6)) for k in range(3)])
    told = engine.admin("ladder", {})
    assert set(told["launches"]["decode_sequences"]) <= {"1", "2", "3"}
    assert told["launches"]["prefill_tokens"] == {"6": 120}
    started = engine.admin("ladder/set", {"derive": True, "max_programs": 4})
    ladder = engine.installer.current.ladder
    assert Bucket(1, 3, 16) in ladder.decode
    assert started["installation"]["promotion"] == "immediate"
    assert max(bucket.sequences for bucket in ladder.decode) == 4  # still holds any step
    engine.admin("plan/rollback", {})  # compiling it is tested with plans
    assert not engine.installer.active


def test_bad_ladders(engine: Engine) -> None:
    for payload in ({}, {"derive": True, "ladder": {}}, {"derive": False}):
        assert "give either" in str(refusal(engine, "ladder/set", payload))
    assert refusal(engine, "ladder/set", {"ladder": {"decode": 3}}).status == 400
    short = {
        "decode": [{"tokens": 1, "sequences": 4, "pages": 2}],
        "prefill": [{"tokens": 8, "sequences": 1, "pages": 2}],
        "sampler_sequences": [1, 4],
    }
    assert refusal(engine, "ladder/set", {"ladder": short}).status == 409
    assert refusal(engine, "plan/install", {"plan": {}, "promotion": "fast"}).param == "promotion"


def test_a_lease_is_revoked_within_a_step_when_load_rises(engine: Engine) -> None:
    after = engine.events.last
    engine.admin("limits/set", {"tune_duty": 0.5})
    lease = engine.admin("tune/lease", {"ms": 1000, "agent": "tuner"})
    assert lease["granted"]
    assert 0 < lease["expires_monotonic_s"] - time.monotonic() <= 1.0
    identity = {"lease_id": lease["lease_id"]}
    if engine.admin("tune/check", identity)["valid"]:  # unless a busy machine took a second
        active = engine.stats().tune["active"]
        assert active["id"] == lease["lease_id"]
        engine.add(Request("rising", prompt(5), greedy(3)))
        engine.step()
        assert engine.admin("tune/check", identity) == {
            "valid": False,
            "reason": "revoked: load has risen",
        }
    while engine.has_work:
        engine.step()
    assert not engine.admin("tune/release", identity)["released"]
    assert engine.stats().tune["active"] is None
    kinds = [event["kind"] for event in engine.admin("events", {"after": after})["events"]]
    assert kinds == ["limits", "lease", "lease_ended"]
    assert refusal(engine, "tune/check", {"lease_id": 10**6}).status == 404
    assert refusal(engine, "tune/lease", {"ms": 0}).param == "ms"
    assert refusal(engine, "tune/lease", {"ms": 5000}).param == "ms"


def test_a_compiler_killed_mid_promotion_costs_the_candidate_only(engine: Engine) -> None:
    options = {"compiler_options": {"xla_cpu_prefer_vector_width": "128"}}
    current = engine.programs.current
    engine.admin("plan/install", options)
    while (pid := engine.installer._compiler.pid) is None:
        engine.step()
    os.kill(pid, signal.SIGKILL)
    serve(engine, lambda: not engine.installer.active)
    assert engine.installer.current is not None
    assert engine.installer.current.state is InstallState.REFUSED
    assert "the compiler process ended with code -9" in engine.installer.current.reason
    assert engine.events.answer(0)["events"][-1]["kind"] == "promotion_refused"
    assert engine.programs.current is current


def test_a_weaker_promise_is_refused_and_fingerprints_stay_true(engine: Engine) -> None:
    current = engine.programs.current.plan
    weaker = dataclasses.replace(current, numerics="quality")
    error = refusal(engine, "plan/install", {"plan": weaker.to_json()})
    assert (error.status, "promises less than 'bounded'" in str(error)) == (409, True)
    with pytest.raises(RequestError, match="not what the plan in force guarantees"):
        engine.add(Request("n", prompt(3), greedy(1, numerics="batch_invariant")))
    # A stronger plan takes such requests, and going back waits until none is left.
    stronger = dataclasses.replace(renamed(current), numerics="batch_invariant")
    engine.programs.install(
        dataclasses.replace(engine.programs.current, plan=stronger), engine.step_number
    )
    engine.step()
    engine.add(Request("n", prompt(3), greedy(6, numerics="batch_invariant")))
    engine.admin("plan/rollback", {})
    with pytest.raises(RequestError, match="not what the plan in force guarantees"):
        engine.add(Request("late", prompt(3), greedy(1, numerics="batch_invariant")))
    epochs = []
    while engine.has_work:
        epochs += [output.epoch for output in engine.step()]
    assert len(set(epochs)) == 1
    assert engine.programs.current.plan == current


def test_an_operator_goes_before_a_tuner(engine: Engine) -> None:
    engine.installer._first_runs = FirstRuns()  # type: ignore[assignment]
    current = engine.programs.current.plan
    payload = {"plan": renamed(current).to_json(), "agent": "tuner"}
    number = engine.admin("plan/propose", payload)["proposal_id"]
    serve(engine, lambda: engine.installer.active)
    mine = renamed(current)
    engine.admin("plan/install", {"plan": mine.to_json()})
    told = engine.admin("plan/proposal", {"proposal_id": number})
    assert (told["stage"], told["reason"]) == ("refused", "an operator's plan goes first")
    serve(engine, lambda: not engine.installer.active)
    assert engine.programs.current.plan == mine
    assert engine.admin("plan", {})["installation"]["agent"] == "operator"


def test_a_restart_comes_back_on_the_last_plan_that_survived(engine: Engine) -> None:
    """Whatever was in force: the second plan is new when the engine goes away."""
    good = renamed(engine.programs.current.plan)
    engine.admin("plan/install", {"plan": good.to_json()})
    serve(engine, lambda: not engine.installer.active and engine.probation.watch is None)
    engine.probation.close()  # it is written
    fresh = renamed(good)
    engine.admin("plan/install", {"plan": fresh.to_json()})
    while engine.installer.active:
        engine.step()
    assert engine.programs.current.plan == fresh
    assert engine.probation.watch is not None
    again = Engine(dataclasses.replace(engine.config, audit_log=None))
    try:
        assert again.programs.current.plan == good
        assert again.stats().compiles_after_ready == 0
        assert again.source.cache.misses == {}  # every program came from the compile cache
    finally:
        again.close()
    explicit = Engine(dataclasses.replace(engine.config, plan="reference", audit_log=None))
    try:  # what an operator names on the command line goes first
        assert explicit.programs.current.plan == Plan()
    finally:
        explicit.close()
