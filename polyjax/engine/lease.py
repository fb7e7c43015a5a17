"""Leases of the device for a tuner beside the server: short, budgeted, revoked when load rises.

A lease promises nothing is in the tuner's way but the traffic there is; it allocates nothing. The
budget is a share (`duty`) of the time in a sliding window, so a pause is saved up for at most that
window. A lease is charged in full when it is granted; what was not used comes back.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from polyjax.core.errors import ConfigError

WINDOW_S = 60.0
MAX_LEASE_MS = 1000.0
_ROUNDING_S = 1e-6  # sums of seconds that are floats
_REMEMBERED = 64  # ended leases that can still be asked about


@dataclasses.dataclass
class Lease:
    """One grant. `running` sequences there were when it was given; `end_s` None while it lasts."""

    id: int
    agent: str
    start_s: float
    expires_s: float
    running: int
    end_s: float | None = None
    reason: str = ""

    def used_s(self, now_s: float) -> float:
        end_s = self.expires_s if self.end_s is None else min(self.end_s, self.expires_s)
        return max(min(end_s, max(now_s, self.start_s)) - self.start_s, 0.0)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether a lease was granted, else why not and in how many seconds to ask again."""

    lease: Lease | None
    reason: str = ""
    retry_after_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "granted": self.lease is not None,
            "lease_id": self.lease.id if self.lease else None,
            "expires_monotonic_s": self.lease.expires_s if self.lease else None,
            "reason": self.reason,
            "retry_after_s": round(self.retry_after_s, 3),
        }


class TuningLeases:
    """Grants one lease at a time. `on_end` hears of every lease that ends.

    Raises ConfigError for a `duty` outside [0, 1].
    """

    def __init__(
        self,
        duty: float,
        on_end: Callable[[Lease, float], None] = lambda lease, used_s: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.set_duty(duty)
        self._on_end = on_end
        self._clock = clock
        self._leases: collections.deque[Lease] = collections.deque(maxlen=_REMEMBERED)
        self._next_id = 1
        self.granted = 0
        self.revoked = 0

    def set_duty(self, duty: float) -> None:
        check_duty(duty)
        self.duty = duty

    @property
    def active(self) -> Lease | None:
        """The lease in force. One that has run out is ended by looking at it."""
        lease = self._leases[-1] if self._leases else None
        if lease is None or lease.end_s is not None:
            return None
        if self._clock() >= lease.expires_s:
            self._end(lease, "expired")
            return None
        return lease

    def used_s(self) -> float:
        """Seconds that leases took or still may take within the window that ends now."""
        now_s = self._clock()
        since_s = now_s - WINDOW_S
        total = 0.0
        for lease in self._leases:
            end_s = lease.expires_s if lease.end_s is None else lease.end_s
            total += max(end_s - max(lease.start_s, since_s), 0.0)
        return total

    def request(self, ms: float, agent: str, running: int, waiting: int) -> Answer:
        """A lease of `ms`, if nobody has one, no request waits and the budget has as much left."""
        now_s, wanted_s = self._clock(), ms / 1000
        if (active := self.active) is not None:
            return Answer(None, "another lease is in force", active.expires_s - now_s)
        if waiting:
            return Answer(None, "requests are waiting", wanted_s)
        budget_s = self.duty * WINDOW_S
        if wanted_s > budget_s + _ROUNDING_S:
            reason = f"tune_duty {self.duty:g} allows {budget_s * 1000:.0f} ms at once"
            return Answer(None, reason, WINDOW_S)
        if self.used_s() + wanted_s > budget_s + _ROUNDING_S:
            return Answer(None, "the budget of the window is used up", self._frees_in_s(wanted_s))
        lease = Lease(self._next_id, agent, now_s, now_s + wanted_s, running)
        self._next_id += 1
        self.granted += 1
        self._leases.append(lease)
        return Answer(lease)

    def observe(self, running: int, waiting: int) -> None:
        """Called once a step: revokes the lease if there is more load than when it was granted."""
        lease = self.active
        if lease is None or not (waiting or running > lease.running):
            return
        self.revoked += 1
        self._end(lease, "revoked: load has risen")

    def find(self, lease_id: int) -> Lease | None:
        self.active  # noqa: B018  # ends what has run out
        return next((lease for lease in self._leases if lease.id == lease_id), None)

    def release(self, lease: Lease) -> float:
        """Ends a lease, if it has not ended; returns the seconds it took."""
        if lease.end_s is None:
            self._end(lease, "released")
        return lease.used_s(self._clock())

    def to_json(self) -> dict[str, Any]:
        active = self.active
        return {
            "duty": self.duty,
            "window_s": WINDOW_S,
            "used_ms": round(self.used_s() * 1000, 3),
            "granted": self.granted,
            "revoked": self.revoked,
            "active": dataclasses.asdict(active) if active else None,
        }

    def _end(self, lease: Lease, reason: str) -> None:
        lease.end_s = min(self._clock(), lease.expires_s)
        lease.reason = reason
        self._on_end(lease, lease.used_s(lease.end_s))

    def _frees_in_s(self, wanted_s: float) -> float:
        """Until enough of the oldest leases has left the window."""
        now_s, missing_s = self._clock(), self.used_s() + wanted_s - self.duty * WINDOW_S
        for lease in self._leases:
            end_s = lease.expires_s if lease.end_s is None else lease.end_s
            inside_s = end_s - max(lease.start_s, now_s - WINDOW_S)
            if inside_s <= 0:
                continue
            if inside_s >= missing_s:
                begins_s = max(lease.start_s, now_s - WINDOW_S)
                return begins_s + missing_s + WINDOW_S - now_s
            missing_s -= inside_s
        return WINDOW_S


def check_duty(duty: float) -> None:
    """Raises ConfigError for what is no share of time."""
    if not 0.0 <= duty <= 1.0:
        raise ConfigError(f"tune_duty must be in [0, 1], not {duty}")
