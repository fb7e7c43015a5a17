"""The performance gate errs rarely, also when it is asked after every pair."""

import math

import numpy as np
import pytest

from polyjax.gates.performance import (
    Comparison,
    Decision,
    compare,
    confidence_sequence,
    log_ratios,
    noise_floor,
    promotable,
)


def pairs(rng, speedup, count=120, noise=0.02):
    drift = 100 * np.exp(np.cumsum(rng.normal(0, 0.01, count)))  # the machine's speed wanders
    candidate = drift / speedup * np.exp(rng.normal(0, noise, count))
    incumbent = drift * np.exp(rng.normal(0, noise, count))
    return candidate, incumbent


def decided(candidate, incumbent, floor):
    """The first decision of someone who looks after every pair."""
    for n in range(1, len(candidate) + 1):
        result = compare(candidate[:n], incumbent[:n], floor, max_pairs=len(candidate))
        if result.decision is not Decision.UNDECIDED:
            return result
    raise AssertionError("no decision")


def test_equal_programs_are_hardly_ever_called_faster():
    rng = np.random.default_rng(0)
    wrong = sum(
        decided(*pairs(rng, 1.0), floor=0.0).decision in (Decision.FASTER, Decision.SLOWER)
        for _ in range(300)
    )
    assert wrong <= 300 * 0.05 + 3 * math.sqrt(300 * 0.05 * 0.95)


def test_a_clear_gain_is_found_and_a_clear_loss_too():
    rng = np.random.default_rng(1)
    for _ in range(30):
        assert decided(*pairs(rng, 1.10), floor=0.01).decision is Decision.FASTER
        assert decided(*pairs(rng, 0.90), floor=0.01).decision is not Decision.FASTER


def test_a_gain_under_the_floor_is_no_gain():
    rng = np.random.default_rng(2)
    wrong = sum(
        decided(*pairs(rng, 1.01), floor=0.03).decision is Decision.FASTER for _ in range(50)
    )
    assert wrong == 0


def test_no_verdict_from_a_handful_of_pairs():
    assert compare([1.0] * 5, [2.0] * 5, 0.0).decision is Decision.UNDECIDED


def test_the_noise_floor_shrinks_with_quieter_machines():
    rng = np.random.default_rng(3)
    loud, quiet = (noise_floor(*pairs(rng, 1.0, noise=n)) for n in (0.05, 0.005))
    assert 0 < quiet < loud < 0.1


def test_the_interval_covers_at_all_times():
    rng = np.random.default_rng(4)
    missed = 0
    for _ in range(200):
        values = rng.normal(0.3, 1.0, 150)
        bounds = [confidence_sequence(values[:n]) for n in range(10, 150, 5)]
        missed += any(not low <= 0.3 <= high for low, high in bounds)
    assert missed <= 200 * 0.05 + 3 * math.sqrt(200 * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([math.nan], [1.0]), ([1.0], [-1.0])]
)
def test_tampered_samples_are_refused(ours, theirs):
    with pytest.raises(ValueError):
        log_ratios(ours, theirs)


def result(decision):
    return Comparison(decision, 1.0, 0.9, 1.1, 20, 0.01)


def test_promotion_needs_a_gain_somewhere_and_a_loss_nowhere():
    faster, slower, same = (
        result(d) for d in (Decision.FASTER, Decision.SLOWER, Decision.NOT_FASTER)
    )
    assert promotable({"a": faster, "b": same})[0]
    assert promotable({"a": faster, "b": slower}) == (False, "slower on b")
    assert not promotable({"a": same})[0]
    assert not promotable({"a": faster, "b": result(Decision.UNDECIDED)})[0]
