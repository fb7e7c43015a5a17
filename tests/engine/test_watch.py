"""Probation: slower steps of the same kind fail it, other traffic does not."""

import random

from polyjax.core.buckets import Bucket
from polyjax.engine.sequence import SamplerKind
from polyjax.engine.watch import (
    MIN_SAMPLES,
    Signature,
    StepLatencies,
    Watch,
    WatchState,
    slowdown,
)

SMALL: Signature = ((Bucket(1, 4, 4), SamplerKind.GREEDY),)
LARGE: Signature = ((Bucket(1, 64, 4), SamplerKind.GREEDY),)


def latencies(
    kind: Signature, median_us: float, spread: float = 0.05, count: int = 40
) -> StepLatencies:
    rng = random.Random(7)
    made = StepLatencies()
    for _ in range(count):
        made.add(kind, median_us * rng.uniform(1 - spread, 1 + spread))
    return made


def test_slower_beyond_tolerance_and_spread() -> None:
    before = latencies(SMALL, 100)
    found = slowdown(before, latencies(SMALL, 140))
    assert found is not None
    assert str(found).startswith("steps of [T=1,B=4,C=4] take 1")
    assert slowdown(before, latencies(SMALL, 120)) is None  # within the tolerance
    assert slowdown(latencies(SMALL, 100, 0.6), latencies(SMALL, 140, 0.6)) is None  # noise
    assert slowdown(before, latencies(SMALL, 300, count=MIN_SAMPLES - 1)) is None
    assert slowdown(before, latencies(LARGE, 900)) is None  # other traffic is no regression


def test_a_watch_ends_by_surviving_or_failing() -> None:
    before = latencies(SMALL, 100)
    good = Watch(50, before, compares=True)
    for _ in range(50):
        assert good.is_running
        good.observe(SMALL, 101)
    assert good.state is WatchState.SURVIVED
    bad = Watch(50, before, compares=True)
    steps = 0
    while bad.is_running:
        bad.observe(SMALL, 200)
        steps += 1
    assert (bad.state, steps < 50) == (WatchState.FAILED, True)
    assert "200 us against" in bad.reason
    explicit = Watch(50, before, compares=False)  # an operator wants it even if it is slower
    for _ in range(50):
        explicit.observe(SMALL, 200)
    assert explicit.state is WatchState.SURVIVED
    explicit.end(WatchState.FAILED, "too late")
    assert explicit.state is WatchState.SURVIVED


def test_steps_that_say_nothing_count_and_are_not_compared() -> None:
    watch = Watch(5, latencies(SMALL, 100), compares=True)
    for _ in range(5):
        watch.observe(SMALL, None)
    assert watch.state is WatchState.SURVIVED
    assert not watch.latencies.samples
