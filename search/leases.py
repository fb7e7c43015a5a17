"""Leases of a server's device, held exactly while the measuring process wants to time something."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyjax.core.errors import PolyjaxError
from search.measure import Measurement, MeasuringProcess
from search.paired import Effort
from search.turns import VARIABLE, Turns

Call = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Runs an admin command in the server's engine. Raises RequestError, EngineDead."""

LEASE_MS, MIN_LEASE_MS = 200.0, 5.0
EFFORT = Effort(noise_pairs=40, max_pairs=200, sample_ms=2.0, limit_s=float("inf"))
"""Samples short against a lease, and many beside traffic; waiting for leases counts for nothing."""

_WINDOW_S = 60.0  # of the engine's budget
_CHECK_S = 0.01
_NAP_S = 0.005
_LONGEST_NAP_S = 1.0
_STALL_S = 300.0  # without a sample or a wish for one: the candidate hangs
_NO_LIMIT_S = 7 * 86400.0

log = logging.getLogger("polyjax.tuner")


class LeaseKeeper:
    """A thread that gets leases and gives turns while `measuring`, and ends both when revoked."""

    def __init__(self, call: Call, turns: Turns, agent: str, lease_ms: float = LEASE_MS):
        self._call, self._turns, self._agent = call, turns, agent
        self._lease_ms = lease_ms
        self._active = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._pid: Callable[[], int | None] = lambda: None
        self._seen = (0, 0.0)
        threading.Thread(target=self._run, name="leases", daemon=True).start()

    @contextlib.contextmanager
    def measuring(self, pid: Callable[[], int | None]) -> Iterator[None]:
        """Gives turns to the process meanwhile; at the end no lease is held any more."""
        self._pid, self._seen = pid, (-1, time.monotonic())
        self._turns.forget()
        self._active.set()
        try:
            yield
        finally:
            self._active.clear()
            self._idle.wait()
            self._turns.forget()

    def _run(self) -> None:
        while True:
            self._active.wait()
            self._idle.clear()
            try:
                while self._active.is_set():
                    self._look()
            except PolyjaxError as error:  # the engine is gone, and this process ends soon, too
                log.warning("leases: %s", error)
                time.sleep(_LONGEST_NAP_S)
            finally:
                self._turns.end()
                self._idle.set()

    def _look(self) -> None:
        if not self._turns.is_wanted:
            self._kill_if_stalled()
            time.sleep(_NAP_S)
            return
        answer = self._call("tune/lease", {"ms": self._lease_ms, "agent": self._agent})
        if answer["granted"]:
            self._use(answer["lease_id"], answer["expires_monotonic_s"])
            return
        if answer["retry_after_s"] >= _WINDOW_S:  # the budget never holds as much at once
            self._lease_ms = max(self._lease_ms / 2, MIN_LEASE_MS)
        self._sleep(min(max(answer["retry_after_s"], _NAP_S), _LONGEST_NAP_S))

    def _use(self, lease_id: int, expires_s: float) -> None:
        """Until the lease ends, or nothing is left that fits into it."""
        self._turns.begin(expires_s)
        began = self._turns.samples
        while self._active.is_set() and time.monotonic() < expires_s:
            time.sleep(_CHECK_S)
            if self._turns.is_wanted and self._turns.samples > began:
                break
            if not self._call("tune/check", {"lease_id": lease_id})["valid"]:
                break
        self._turns.end()
        self._call("tune/release", {"lease_id": lease_id})

    def _sleep(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while self._active.is_set() and time.monotonic() < until_s:
            time.sleep(_NAP_S)

    def _kill_if_stalled(self) -> None:
        """A candidate that hangs would otherwise be waited for without end."""
        samples, since_s = self._seen
        now_s = time.monotonic()
        if self._turns.samples != samples:
            self._seen = (self._turns.samples, now_s)
        elif now_s - since_s > _STALL_S and (pid := self._pid()) is not None:
            log.warning("the measuring process made no progress for %g s: killed", _STALL_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._seen = (samples, now_s)


class LeasedMeasurer(MeasuringProcess):
    """The measuring process of a background tuner: it times in leases, and waits in between."""

    def __init__(self, call: Call, turns: Turns, agent: str, environment: Mapping[str, str]):
        super().__init__({**environment, VARIABLE: str(turns.path)}, trial_timeout_s=_NO_LIMIT_S)
        self._keeper = LeaseKeeper(call, turns, agent)

    def measure(self, *arguments: Any) -> Measurement:
        with self._keeper.measuring(lambda: self.pid):
            return super().measure(*arguments)
