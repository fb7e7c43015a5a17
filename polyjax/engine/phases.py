"""Where the time of the engine's loop goes, by phase: moving averages of a step, and sums."""

from __future__ import annotations

import time

_WEIGHT = 0.05  # of the newest step: a phase's figure forgets within about 20 steps


class PhaseClock:
    """`mark` adds the time since the last mark to a phase; `end_step` folds a step's sums in.

    `average_us` is of recent steps, `total_s` of all.
    """

    def __init__(self) -> None:
        self.average_us: dict[str, float] = {}
        self.total_s: dict[str, float] = {}
        self._sums_s: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def start_step(self) -> None:
        self._sums_s.clear()
        self._last_s = time.perf_counter()

    def mark(self, phase: str) -> None:
        now_s = time.perf_counter()
        self._sums_s[phase] = self._sums_s.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def end_step(self) -> None:
        for phase, seconds in self._sums_s.items():
            self.total_s[phase] = self.total_s.get(phase, 0.0) + seconds
            before = self.average_us.get(phase, seconds * 1e6)
            self.average_us[phase] = before + _WEIGHT * (seconds * 1e6 - before)
