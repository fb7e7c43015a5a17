"""Turns and leases: nothing is timed outside a lease; a revoked one ends between two samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyjax.core.errors import RequestError
from search import turns
from search.leases import LeaseKeeper
from search.turns import Turns
from tests.server.serving import wait_for


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "_clock", made)
    monkeypatch.setattr(turns, "_NAP_S", -1.0)  # waiting raises ValueError
    return made


def begins(end: Turns, clock: Clock, sample_s: float) -> bool:
    """Whether a sample may begin now; if so, it takes `sample_s`."""
    try:
        end.wait()
    except ValueError:
        return False
    clock.now_s += sample_s
    return True


def test_samples_begin_only_where_they_fit_into_the_turn(tmp_path: Path, clock: Clock) -> None:
    tuner, measurer = Turns(tmp_path / "turns"), Turns(tmp_path / "turns")
    assert not begins(measurer, clock, 1.0)  # no turn was given
    tuner.begin(clock.now_s + 3.5)
    assert [begins(measurer, clock, 1.0) for _ in range(4)] == [True, True, True, False]
    assert tuner.samples == 3
    tuner.begin(clock.now_s + 0.7)
    assert begins(measurer, clock, 1.0)  # the first of a turn, or a long one would never run
    tuner.begin(clock.now_s + 9.0)
    assert begins(measurer, clock, 1.0)
    tuner.end()
    assert not begins(measurer, clock, 1.0)


def test_without_a_server_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    turns.waiting()()


class FakeEngine:
    """Grants leases by hand. `calls` is what it was asked, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.grants = 0
        self.valid = True
        self.error: Exception | None = None

    def __call__(self, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(command)
        if self.error is not None:
            raise self.error
        if command == "tune/check":
            return {"valid": self.valid, "reason": ""}
        if command == "tune/release":
            return {"released": True, "used_ms": 1.0}
        if not self.grants:
            return {"granted": False, "lease_id": None, "retry_after_s": 0.01, "reason": "busy"}
        self.grants -= 1
        return {
            "granted": True,
            "lease_id": 1,
            "expires_monotonic_s": time.monotonic() + 1000.0,
            "retry_after_s": 0.0,
        }


class Sampler:
    """The measuring process's end, in a thread: waits for its turn, over and over."""

    def __init__(self, path: Path):
        self.turns = Turns(path)
        self.stop = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop:
            self.turns.wait()
            time.sleep(0.001)


@pytest.fixture
def sampler(tmp_path: Path) -> Iterator[Sampler]:
    made = Sampler(tmp_path / "turns")
    yield made
    made.stop = True
    made.turns.begin(time.monotonic() + 1000.0)
    made.thread.join()


def test_a_lease_is_asked_for_used_and_given_up_when_revoked(
    tmp_path: Path, sampler: Sampler
) -> None:
    engine, tuner = FakeEngine(), Turns(tmp_path / "turns")
    keeper = LeaseKeeper(engine, tuner, "test")
    with keeper.measuring(lambda: None):
        wait_for(lambda: engine.calls.count("tune/lease") > 3, "leases to be asked for")
        assert tuner.samples == 0  # none was granted
        engine.grants = 1
        wait_for(lambda: tuner.samples > 5, "samples in the lease")
        engine.valid = False
        wait_for(lambda: "tune/release" in engine.calls, "the end of the lease")
        wait_for(lambda: tuner.is_wanted, "the sampler to wait again")
        taken = tuner.samples
        asked = len(engine.calls)
        wait_for(lambda: len(engine.calls) > asked + 3, "another lease to be asked for")
        assert tuner.samples == taken
    asked = len(engine.calls)
    time.sleep(0.05)
    assert len(engine.calls) == asked  # nobody measures: no lease is wanted


def test_a_small_budget_gets_small_leases(tmp_path: Path, sampler: Sampler) -> None:
    asked_ms: list[float] = []

    def call(command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        asked_ms.append(payload["ms"])
        return {"granted": False, "lease_id": None, "retry_after_s": 60.0, "reason": "too much"}

    keeper = LeaseKeeper(call, Turns(tmp_path / "turns"), "test", lease_ms=16.0)
    with keeper.measuring(lambda: None):
        wait_for(lambda: len(asked_ms) >= 3, "leases to be asked for")
    assert asked_ms[:3] == [16.0, 8.0, 5.0]


def test_an_engine_that_refuses_the_command_ends_no_thread(
    tmp_path: Path, sampler: Sampler
) -> None:
    engine, tuner = FakeEngine(), Turns(tmp_path / "turns")
    engine.error = RequestError("no such command", status=404)
    keeper = LeaseKeeper(engine, tuner, "test")
    with keeper.measuring(lambda: None):
        wait_for(lambda: engine.calls, "a lease to be asked for")
        engine.error, engine.grants = None, 1
        wait_for(lambda: tuner.samples > 0, "a sample after all")


def test_a_measuring_process_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: list[int] = []
    monkeypatch.setattr("search.leases._STALL_S", 0.05)
    monkeypatch.setattr("os.kill", lambda pid, number: dead.append(pid))
    keeper = LeaseKeeper(FakeEngine(), Turns(tmp_path / "turns"), "test")
    with keeper.measuring(lambda: 4711):
        wait_for(lambda: dead, "the kill")
    assert dead[0] == 4711
