"""The search skips what cannot win and ends when nothing can."""

import numpy as np
import pytest

from search.cost import Prediction
from search.cost.policy import SearchPolicy, best_possible_gain


def guess(us, low, high):
    arrays = [np.array(a, float) for a in (us, low, high)]
    return Prediction(*arrays, learned=np.ones(len(us), bool))


THREE = guess([10, 8, 12], [9, 7.9, 11], [11, 8.1, 13])
POLICY = SearchPolicy(noise_floor=0.02, min_trials=4)


def test_the_best_possible_gain_is_what_the_lowest_interval_promises():
    assert best_possible_gain(THREE, 10.0) == pytest.approx(0.21)
    assert best_possible_gain(THREE, 7.0) == 0.0
    assert best_possible_gain(THREE[np.zeros(3, bool)], 10.0) == 0.0


def test_points_that_cannot_beat_the_best_are_pruned_and_the_rest_ordered():
    assert POLICY.keep(THREE, 9.1).tolist() == [False, True, False]
    assert POLICY.order(THREE).tolist() == [1, 0, 2]


def test_it_ends_when_the_gain_is_below_the_noise_floor_and_not_before_enough_trials():
    assert not POLICY.done(THREE, 10.0)
    assert POLICY.done(THREE, 8.0) and POLICY.done(THREE, 8.05)
    assert not POLICY.done(THREE, 8.2)
    assert not POLICY.done(THREE, 7.0, trials=3) and POLICY.done(THREE, 7.0, trials=4)
    assert POLICY.done(THREE[np.zeros(3, bool)], 10.0, trials=0)  # nothing left
