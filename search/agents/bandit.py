"""Shares the budget between agents by what each has delivered lately.

Upper confidence bound over discounted rewards (Kocsis and Szepesvari 2006): a reward is the
relative improvement of the best cost that an agent's point brought. Every agent hears of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from search.space import Point

DISCOUNT = 0.95
EXPLORATION = 0.05


class Bandit:
    name = "bandit"

    def __init__(self, agents: Sequence[Any], seed: int):
        del seed  # the choice is deterministic: ties go to the agent named first
        self._agents = list(agents)
        self._asked: dict[Point, Any] = {}
        self._tries = {agent.name: 0.0 for agent in agents}
        self._rewards = {agent.name: 0.0 for agent in agents}
        self._best_us = math.inf
        self.credited: dict[str, int] = {agent.name: 0 for agent in agents}

    def ask(self) -> Point | None:
        for agent in sorted(self._agents, key=self._bound, reverse=True):
            point: Point | None = agent.ask()
            while point in self._asked:  # in flight for another agent
                point = agent.ask()
            if point is not None:
                self._asked[point] = agent
                return point
        return None

    def asker(self, point: Point) -> str:
        """Returns the name of the agent whose point this is while it is in flight."""
        return str(self._asked[point].name) if point in self._asked else self.name

    def _bound(self, agent: Any) -> float:
        tries = self._tries[agent.name]
        if tries < 1e-6:
            return math.inf
        total = max(sum(self._tries.values()), 1.0)
        return self._rewards[agent.name] / tries + EXPLORATION * math.sqrt(
            math.log(total + 1) / tries
        )

    def tell(self, point: Point, cost_us: float | None) -> None:
        asker = self._asked.pop(point, None)
        if asker is not None:
            self._reward(asker.name, cost_us)
        if cost_us is not None:
            self._best_us = min(self._best_us, cost_us)
        for agent in self._agents:
            agent.tell(point, cost_us)

    def _reward(self, name: str, cost_us: float | None) -> None:
        for other in self._tries:
            self._tries[other] *= DISCOUNT
            self._rewards[other] *= DISCOUNT
        self._tries[name] += 1.0
        if cost_us is not None and cost_us < self._best_us:
            gain = 1.0 if math.isinf(self._best_us) else 1.0 - cost_us / self._best_us
            self._rewards[name] += gain
            self.credited[name] += 1
