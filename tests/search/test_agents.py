"""Agents never repeat a point, end when the space does, and need fewer trials than random."""

import itertools
import math

import numpy as np
import pytest

from search.agents import AGENTS
from search.space import Space

FIELDS = {
    "tile": (64, 128, 256),
    "stages": (2, 3, 4, 6, 8),
    "split": (1, 2, 4, 8),
    "mode": ("a", "b", "c"),
}


def grid():
    names = sorted(FIELDS)
    return Space(
        tuple(zip(names, values, strict=True))
        for values in itertools.product(*(FIELDS[n] for n in names))
        if not (dict(zip(names, values, strict=True))["tile"] == 256 and values[2] == 8)
    )


def cost(point, seed):
    """A schedule-like landscape: interacting ordinal fields, a categorical offset, small noise."""
    rng = np.random.default_rng(seed)
    f = dict(point)
    best_tile, best_stages = rng.choice([64, 128, 256]), rng.choice([3, 4, 6])
    depth = f["tile"] * f["stages"] / (best_tile * best_stages)
    value = 10 + 3 * abs(math.log2(depth)) + 2 * abs(math.log2(f["split"]) - rng.integers(3))
    value += {"a": 0.0, "b": 1.0, "c": 2.5}[f["mode"]]
    return value * (1 + 0.005 * np.random.default_rng(abs(hash(point)) % 2**32).standard_normal())


def trials_to_within(agent_name, seed, tolerance=0.02):
    space = grid()
    costs = {p: cost(p, seed) for p in space.points}
    target = min(costs.values()) * (1 + tolerance)
    agent = AGENTS[agent_name](space, seed, None)
    for number in range(1, len(space) + 1):
        point = agent.ask()
        agent.tell(point, costs[point])
        if costs[point] <= target:
            return number
    raise AssertionError("the best point was never asked for")


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_every_point_is_asked_once_and_then_no_more(name):
    space = Space(grid().points[:40])
    agent = AGENTS[name](space, 3, None)
    asked = []
    while (point := agent.ask()) is not None:
        asked.append(point)
        agent.tell(point, None if len(asked) % 7 == 0 else float(len(asked)))
    assert sorted(asked) == sorted(space.points)


@pytest.mark.parametrize("name", ["model_led", "local", "evolution", "bandit"])
def test_informed_agents_need_fewer_trials_than_random(name):
    random = [trials_to_within("random", seed) for seed in range(12)]
    ours = [trials_to_within(name, seed) for seed in range(12)]
    assert np.median(ours) < np.median(random)


def test_a_good_prior_is_used_and_a_bad_one_is_survived():
    space = grid()
    costs = {p: cost(p, 0) for p in space.points}
    best = min(costs.values())

    def trials(prior):
        agent = AGENTS["model_led"](space, 0, prior)
        for number in range(1, len(space) + 1):
            point = agent.ask()
            agent.tell(point, costs[point])
            if costs[point] <= best * 1.02:
                return number
        return len(space)

    assert trials(costs.__getitem__) == 1
    assert trials(lambda point: 1.0 / costs[point]) < len(space) // 2


def test_an_agent_hears_of_points_that_others_asked_for():
    space = grid()
    agent = AGENTS["model_led"](space, 0, None)
    for point in space.points[:-1]:
        agent.tell(point, cost(point, 0))
    assert agent.ask() == space.points[-1]
    agent.tell(space.points[-1], 1.0)
    assert agent.ask() is None


def test_the_bandit_credits_who_found_what():
    space = grid()
    bandit = AGENTS["bandit"](space, 0, None)
    for _ in range(60):
        point = bandit.ask()
        bandit.tell(point, cost(point, 1))
    assert sum(bandit.credited.values()) >= 2


def test_features_tell_points_apart_and_neighbours_differ_in_one_field():
    space = grid()
    features = space.features(space.points)
    assert len(np.unique(features, axis=0)) == len(space)
    point = space.points[0]
    for other in space.neighbours(point):
        assert sum(a != b for a, b in zip(point, other, strict=True)) == 1


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_points_in_flight_are_not_asked_for_again(name):
    space = Space(grid().points[:30])
    agent = AGENTS[name](space, 3, None)
    asked = []
    while len(asked) < len(space):
        batch = [agent.ask() for _ in range(min(4, len(space) - len(asked)))]
        asked += batch
        for point in batch:
            agent.tell(point, float(len(asked)))
    assert sorted(asked) == sorted(space.points)
    assert agent.ask() is None
