"""Times a candidate and the incumbent in pairs, taking turns; what is timed cannot reach the clock.

The functions that measure are taken when this module is imported, before any candidate is loaded.
An arm only dispatches; waiting for its results happens here.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from search.decisions import is_settled
from search.turns import waiting

_clock = time.perf_counter
_block = jax.block_until_ready
_await_turn = waiting()
_UNTIMED_CALLS = 3


class Arm(Protocol):
    """What is timed."""

    @property
    def groups(self) -> Sequence[str]:
        """Its kinds of work."""

    def run(self, group: str) -> Any:
        """Dispatches the group's work; returns its results, which need not be finished."""

    def units(self, group: str) -> int:
        """How many steps or calls one `run` consists of."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure. A sample repeats its work until it takes `sample_ms`."""

    noise_pairs: int = 30
    max_pairs: int = 60
    sample_ms: float = 4.0
    slow_ratio: float = 3.0
    limit_s: float = 60.0


@dataclasses.dataclass(frozen=True)
class Paired:
    """`arms`: samples by group, as evidence of a decision has them; `slow`: stopped early."""

    arms: dict[str, dict[str, list[float]]]
    slow: bool
    seconds: float


def sample_us(arm: Arm, group: str, repeats: int) -> float:
    """Returns the microseconds one step or call takes, over `repeats` dispatched runs."""
    _await_turn()
    begin = _clock()
    for _ in range(repeats):
        results = arm.run(group)
    _block(results)
    return (_clock() - begin) * 1e6 / (repeats * arm.units(group))


def repeats_for(arm: Arm, group: str, sample_ms: float) -> int:
    """Returns how often a group's work is repeated in one sample; also warms it."""
    for _ in range(_UNTIMED_CALLS):
        _await_turn()
        _block(arm.run(group))
    once = min(sample_us(arm, group, 1) for _ in range(2)) * arm.units(group)
    return max(1, round(sample_ms * 1e3 / max(once, 1.0)))


def noise(first: Arm, second: Arm, effort: Effort) -> dict[str, dict[str, list[float]]]:
    """Returns the samples of an A/A run: two copies of one arm, taking turns."""
    samples: dict[str, dict[str, list[float]]] = {}
    for group in first.groups:
        repeats = repeats_for(first, group, effort.sample_ms)
        repeats_for(second, group, effort.sample_ms)
        found: dict[str, list[float]] = {"first_us": [], "second_us": []}
        for number in range(effort.noise_pairs):
            turns = [("first_us", first), ("second_us", second)]
            for name, arm in turns if number % 2 else turns[::-1]:
                found[name].append(sample_us(arm, group, repeats))
        samples[group] = found
    return samples


def compare_arms(
    candidate: Arm, incumbent: Arm, noise_samples: Mapping[str, Any], effort: Effort
) -> Paired:
    """Pairs until every group is decided, the candidate is far behind, or time is up.

    A candidate whose first runs take `slow_ratio` times as long is not timed any further.
    """
    started = _clock()
    turns = [("candidate_us", candidate), ("incumbent_us", incumbent)]
    repeats = {g: repeats_for(incumbent, g, effort.sample_ms) for g in incumbent.groups}
    arms: dict[str, dict[str, list[float]]] = {}
    for group in incumbent.groups:
        _block(candidate.run(group))  # its first call may build what later ones reuse
        arms[group] = {name: [sample_us(a, group, 1) for _ in range(2)] for name, a in turns}
    if _is_slow(arms, effort.slow_ratio):
        return Paired(arms, True, _clock() - started)
    for group in incumbent.groups:
        repeats_for(candidate, group, effort.sample_ms)
    arms = {group: {name: [] for name, _ in turns} for group in incumbent.groups}
    evidence = {"arms": arms, "noise": noise_samples, "max_pairs": effort.max_pairs}
    for number in range(effort.max_pairs):
        for group in incumbent.groups:
            for name, arm in turns if number % 2 else turns[::-1]:
                arms[group][name].append(sample_us(arm, group, repeats[group]))
        if is_settled(evidence) or _clock() - started > effort.limit_s:
            break
    return Paired(arms, False, _clock() - started)


def _is_slow(arms: Mapping[str, Mapping[str, Sequence[float]]], ratio: float) -> bool:
    """Whether some group takes `ratio` times as long even at its best."""
    return any(min(a["candidate_us"]) > ratio * max(a["incumbent_us"]) for a in arms.values())


def medians_us(arms: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Returns the median of each arm, by group."""
    return {g: {n: statistics.median(v) for n, v in arm.items()} for g, arm in arms.items()}
