"""The paired canary: candidate and incumbent alternate on equal batches, and the times decide.

The batches are those of shadow steps, over and over on the same scratch pages, so nothing that runs
here is exposed. A round on a batch is one run of the candidate and two of the incumbent, in turning
order: the incumbent against itself gives the noise floor, `gates/performance.py` the decision.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from polyjax.compiler.program import ProgramKey
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.shadow import ShadowRun, run_on_scratch
from polyjax.engine.state import DeviceState
from polyjax.gates.performance import (
    MIN_PAIRS,
    Comparison,
    Decision,
    compare,
    noise_floor,
    promotable,
)
from polyjax.gates.verdict import Verdict

GATE = "canary"
MAX_BATCHES = 4  # programs compared: those that most live launches take
MAX_PAIRS = 120
_ORDERS = ("cij", "ijc", "jci")  # candidate, incumbent, incumbent once more

Timer = Callable[[PlanPrograms, ProgramKey, Any], float]
"""Runs a program once on a batch and returns how long it took, in microseconds."""


@dataclasses.dataclass
class _Pairs:
    """Times of one batch in microseconds, complete rounds only."""

    run: ShadowRun
    times_us: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"c": [], "i": [], "j": []}
    )
    round_us: dict[str, float] = dataclasses.field(default_factory=dict)
    comparison: Comparison | None = None

    @property
    def decided(self) -> bool:
        return self.comparison is not None and self.comparison.decision is not Decision.UNDECIDED

    @property
    def next_arm(self) -> str:
        """Which of "c", "i", "j" has its turn."""
        order = _ORDERS[len(self.times_us["c"]) % len(_ORDERS)]
        return order[len(self.round_us)]

    def add(self, arm: str, duration_us: float) -> None:
        self.round_us[arm] = duration_us
        if len(self.round_us) < len(self.times_us):
            return
        for name, time_us in self.round_us.items():
            self.times_us[name].append(time_us)
        self.round_us = {}
        candidate, incumbent = self.times_us["c"], self.times_us["i"]
        if len(candidate) >= MIN_PAIRS:
            floor = noise_floor(incumbent, self.times_us["j"])
            self.comparison = compare(candidate, incumbent, floor, MAX_PAIRS)


class PairedCanary:
    """Compares two plans on the batches that shadow steps left, `counts` times seen each."""

    def __init__(
        self,
        incumbent: PlanPrograms,
        candidate: PlanPrograms,
        runs: Mapping[ProgramKey, ShadowRun],
        counts: Mapping[ProgramKey, int],
        timer: Timer,
    ):
        self._incumbent = incumbent
        self._candidate = candidate
        self._timer = timer
        chosen = sorted(runs, key=lambda key: (-counts[key], key))[:MAX_BATCHES]
        self._pairs = {key: _Pairs(runs[key]) for key in chosen}

    def advance(self) -> Verdict | None:
        """Runs one program once; returns the verdict when there is one. Raises what it raises."""
        pairs = next(pairs for pairs in self._pairs.values() if not pairs.decided)
        arm, run = pairs.next_arm, pairs.run
        if arm == "c":
            time_us = self._timer(self._candidate, run.candidate_key, run.candidate_flat)
        else:
            time_us = self._timer(self._incumbent, run.incumbent_key, run.incumbent_flat)
        pairs.add(arm, time_us)
        return self._verdict() if self._is_over() else None

    def _is_over(self) -> bool:
        comparisons = [pairs.comparison for pairs in self._pairs.values()]
        slower = any(c is not None and c.decision is Decision.SLOWER for c in comparisons)
        return slower or all(pairs.decided for pairs in self._pairs.values())

    def _verdict(self) -> Verdict:
        compared = {
            str(key): pairs.comparison
            for key, pairs in self._pairs.items()
            if pairs.comparison is not None
        }
        passed, reason = promotable(compared)
        return Verdict(GATE, passed, "" if passed else reason, self.evidence() | {"why": reason})

    def evidence(self) -> dict[str, Any]:
        """By program: decision, ratio of times with its interval, noise floor, pairs so far."""
        return {
            str(key): {
                "decision": c.decision.value,
                **{name: round(getattr(c, name), 4) for name in ("ratio", "low", "high", "floor")},
                "pairs": c.pairs,
            }
            for key, pairs in self._pairs.items()
            if (c := pairs.comparison) is not None
        }


def timed(state: DeviceState) -> Timer:
    """A timer that waits for the device to be idle, runs a program and waits for it to end."""

    def run(programs: PlanPrograms, key: ProgramKey, flat: Any) -> float:
        jax.block_until_ready((state.kv, state.last_tokens))
        started_s = time.perf_counter()
        outputs = run_on_scratch(programs, key, flat, state)
        jax.block_until_ready((state.kv, state.last_tokens, outputs))
        return (time.perf_counter() - started_s) * 1e6

    return run
