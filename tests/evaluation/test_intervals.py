"""Intervals cover what they claim to cover."""

import numpy as np
import pytest

from polyjax.evaluation.intervals import bootstrap, differs, paired_difference, proportion


def test_wilson_matches_the_published_example():
    """Newcombe 1998, Statistics in Medicine 17:857, table I: 81 of 263 gives 0.2553 to 0.3662."""
    interval = proportion(81, 263)
    assert interval.low == pytest.approx(0.2553, abs=1e-4)
    assert interval.high == pytest.approx(0.3662, abs=1e-4)


def test_no_success_still_has_an_upper_bound():
    interval = proportion(0, 20)
    assert interval.low == 0.0 and 0.1 < interval.high < 0.2


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        interval = bootstrap(rng.exponential(size=60).tolist(), seed=seed)
        covered += interval.low <= 1.0 <= interval.high
    assert 85 <= covered <= 100


def test_a_paired_difference_sees_what_unpaired_noise_would_hide():
    rng = np.random.default_rng(2)
    base = rng.normal(0, 10, 200)
    assert differs(
        paired_difference((base + 0.5 + rng.normal(0, 0.1, 200)).tolist(), base.tolist())
    )
    assert not differs(paired_difference(base.tolist(), base[::1].tolist()))
    with pytest.raises(ValueError, match="length"):
        paired_difference([1.0], [1.0, 2.0])
