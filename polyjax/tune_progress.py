"""How long a tuning run may take, and what it shows while it does."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from polyjax.core.errors import ConfigError
from polyjax.progress import ShownLine

if TYPE_CHECKING:  # imports jax, which takes a second: not before flags are parsed
    from search.tuner import Progress

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def seconds(text: str) -> float:
    """Returns the seconds of "90s", "30m", "2h" or "1h30m". Raises ConfigError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ConfigError(f"--budget={text}: write it as 90s, 30m or 2h")
    total = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if total <= 0:
        raise ConfigError(f"--budget={text}: must be more than nothing")
    return total


class Shown:
    """How a run goes, on standard error."""

    def __init__(self, budget_s: float, max_trials: int):
        self._line = ShownLine()
        self._started_s = time.monotonic()
        self._budget_s, self._max_trials = budget_s, max_trials
        self._trials, self._text = 0, ""

    def trial(self, target: str, progress: Progress) -> None:
        self._trials += 1
        elapsed_s = time.monotonic() - self._started_s
        self._text = describe(
            target, progress, self._trials, elapsed_s, self._budget_s, self._max_trials
        )
        self._line.show(self._text)

    def end(self) -> None:
        if self._text:
            self._line.show(self._text, is_last=True)


def describe(
    target: str,
    progress: Progress,
    trials: int,
    elapsed_s: float,
    budget_s: float,
    max_trials: int,
) -> str:
    """Returns e.g. "plan: 12 trials, 34.0/min, best 81.3 us (1.21x), last slow, 560 s left"."""
    left_s = max(0.0, budget_s - elapsed_s)
    if max_trials:
        left_s = min(left_s, elapsed_s / trials * max(0, max_trials - trials))
    best_us, name = progress.best.cost_us, target.partition("|")[0]
    return (
        f"{name}: {trials} trials, {trials / max(elapsed_s, 1e-9) * 60:.1f}/min, "
        f"best {best_us:.4g} us ({progress.start_us / best_us:.2f}x), "
        f"last {progress.last.status}, {left_s:.0f} s left"
    )
