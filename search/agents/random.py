"""Uniform random search without repetition: the baseline every other agent has to beat."""

from __future__ import annotations

import numpy as np

from search.agents.history import History
from search.space import Point, Space


class Random:
    name = "random"

    def __init__(self, space: Space, seed: int):
        self._history = History(space)
        order = np.random.default_rng(seed).permutation(len(space))
        self._queue = [space.points[i] for i in order]

    def ask(self) -> Point | None:
        while self._queue:
            point = self._queue.pop()
            if not self._history.known(point):
                return self._history.take(point)
        return None

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._history.tell(point, cost_us)
