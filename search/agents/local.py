"""Hill climbing from the best point known, restarting where no neighbour is left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search.agents.history import History
from search.space import Point, Space


class Local:
    """Tries the neighbours of the best point, nearest first; starts where the prior is cheapest."""

    name = "local"

    def __init__(self, space: Space, seed: int, prior: Callable[[Point], float] | None):
        self._history = History(space)
        self._rng = np.random.default_rng(seed)
        self._prior = prior
        self._exhausted: set[Point] = set()

    def ask(self) -> Point | None:
        ranked = sorted(self._history.costs_us, key=self._history.costs_us.__getitem__)
        for centre in ranked:
            if centre in self._exhausted:
                continue
            fresh = self._history.fresh(self._history.space.neighbours(centre))
            if fresh:
                near = fresh[0] if self._prior is None else min(fresh, key=self._prior)
                return self._history.take(near)
            self._exhausted.add(centre)
        start = self._start()
        return None if start is None else self._history.take(start)

    def _start(self) -> Point | None:
        unknown = self._history.unknown()
        if not unknown:
            return None
        if self._prior is not None:
            return min(unknown, key=self._prior)
        return unknown[int(self._rng.integers(len(unknown)))]

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._history.tell(point, cost_us)
