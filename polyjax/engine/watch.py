"""A plan newly in force on probation: its steps against its predecessor's, and nothing not finite.

Only steps of the same launches are compared, so that a change of traffic is no regression.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.engine.step import ScheduledStep

REMEMBERED_STEPS = 128  # of each kind of step
MIN_SAMPLES = 20
LATENCY_TOLERANCE = 0.25

Signature = tuple[Any, ...]
"""What makes two steps alike: bucket and sampler of each of their launches."""


def signature(step: ScheduledStep) -> Signature:
    return tuple((launch.bucket, launch.sampler) for launch in step.launches)


class StepLatencies:
    """Microseconds between the results of successive steps under one plan, by kind of step."""

    def __init__(self) -> None:
        self._samples: dict[Signature, collections.deque[float]] = {}

    def add(self, kind: Signature, duration_us: float) -> None:
        samples = self._samples.get(kind)
        if samples is None:
            samples = self._samples[kind] = collections.deque(maxlen=REMEMBERED_STEPS)
        samples.append(duration_us)

    @property
    def samples(self) -> Mapping[Signature, Sequence[float]]:
        return self._samples


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """A kind of step that takes longer than it did: medians in microseconds."""

    kind: str
    before_us: float
    after_us: float

    def __str__(self) -> str:
        times = f"{self.after_us:.0f} us against {self.before_us:.0f} us before"
        return f"steps of {self.kind} take {times}"


def slowdown(
    before: StepLatencies, after: StepLatencies, tolerance: float = LATENCY_TOLERANCE
) -> Slowdown | None:
    """The first kind of step that is slower by more than `tolerance`, beyond its own spread.

    Beyond its spread: three quarters of the new steps are slower than three quarters of the old.
    """
    for kind, new in after.samples.items():
        old = before.samples.get(kind, ())
        if len(new) < MIN_SAMPLES or len(old) < MIN_SAMPLES:
            continue
        _, old_median, old_high = statistics.quantiles(old, n=4)
        new_low, new_median, _ = statistics.quantiles(new, n=4)
        if new_median > old_median * (1 + tolerance) and new_low > old_high:
            return Slowdown(describe(kind), old_median, new_median)
    return None


def describe(kind: Signature) -> str:
    buckets = (bucket for bucket, _ in kind)
    return " + ".join(f"[T={b.tokens},B={b.sequences},C={b.pages}]" for b in buckets)


class WatchState(enum.StrEnum):
    RUNNING = "running"
    SURVIVED = "survived"
    FAILED = "failed"
    SUPERSEDED = "superseded"  # another plan, or an operator, ended it


class Watch:
    """Probation of one plan over `steps` steps; `compares` whether slower steps fail it."""

    def __init__(self, steps: int, before: StepLatencies, compares: bool):
        self.state = WatchState.RUNNING
        self.reason = ""
        self.steps_left = steps
        self.latencies = StepLatencies()
        self._before = before
        self._compares = compares

    @property
    def is_running(self) -> bool:
        return self.state is WatchState.RUNNING

    def observe(self, kind: Signature, duration_us: float | None) -> None:
        """Takes in a step that was committed; `duration_us` None if it says nothing of the plan."""
        if not self.is_running:
            return
        self.steps_left -= 1
        if duration_us is not None:
            self.latencies.add(kind, duration_us)
        due = self.steps_left % MIN_SAMPLES == 0 or self.steps_left <= 0
        if self._compares and due:
            slower = slowdown(self._before, self.latencies)
            if slower is not None:
                self.end(WatchState.FAILED, str(slower))
                return
        if self.steps_left <= 0:
            self.end(WatchState.SURVIVED)

    def end(self, state: WatchState, reason: str = "") -> None:
        if self.is_running:
            self.state, self.reason = state, reason

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "reason": self.reason,
            "steps_left": max(self.steps_left, 0),
        }
