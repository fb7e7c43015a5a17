"""Regularised evolution (Real et al. 2019): tournament, crossover, mutation; the oldest dies."""

from __future__ import annotations

from collections import deque

import numpy as np

from search.agents.history import History
from search.space import Point, Space

POPULATION = 16
TOURNAMENT = 4
ATTEMPTS = 32


class Evolution:
    name = "evolution"

    def __init__(self, space: Space, seed: int):
        self._history = History(space)
        self._rng = np.random.default_rng(seed)
        self._population: deque[Point] = deque(maxlen=POPULATION)

    def ask(self) -> Point | None:
        if len(self._population) >= TOURNAMENT:
            for _ in range(ATTEMPTS):
                child = self._mutated(
                    self._history.space.cross(self._pick(), self._pick(), self._rng)
                )
                if not self._history.known(child):
                    return self._history.take(child)
        unknown = self._history.unknown()
        if not unknown:
            return None
        return self._history.take(unknown[int(self._rng.integers(len(unknown)))])

    def _pick(self) -> Point:
        """Returns the best of a few random members."""
        drawn = self._rng.choice(len(self._population), TOURNAMENT, replace=False)
        members = [self._population[int(i)] for i in drawn]
        return min(members, key=self._history.costs_us.__getitem__)

    def _mutated(self, point: Point) -> Point:
        near = self._history.space.neighbours(point)
        return near[int(self._rng.integers(len(near)))] if near else point

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._history.tell(point, cost_us)
        if cost_us is not None:
            self._population.append(point)
