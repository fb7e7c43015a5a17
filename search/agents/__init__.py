"""Agents propose candidates through one ask/tell protocol. Adding one is one file and one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from search.agents.bandit import Bandit
from search.agents.evolution import Evolution
from search.agents.local import Local
from search.agents.model_led import ModelLed
from search.agents.random import Random
from search.space import Point, Space

Predictor = Callable[[Point], float]


class Agent(Protocol):
    """Proposes points of a space and learns what they cost.

    `ask` returns a point that was neither told nor asked before, or None when it has none left;
    several may be in flight. `tell` reports a cost in microseconds, or None for a point that
    failed; every agent hears of every point.
    """

    name: str

    def ask(self) -> Point | None: ...

    def tell(self, point: Point, cost_us: float | None) -> None: ...


AGENTS: Mapping[str, Callable[[Space, int, Predictor | None], Agent]] = {
    "random": lambda space, seed, _: Random(space, seed),
    "local": lambda space, seed, prior: Local(space, seed, prior),
    "evolution": lambda space, seed, _: Evolution(space, seed),
    "model_led": lambda space, seed, prior: ModelLed(space, seed, prior),
    "bandit": lambda space, seed, prior: Bandit(
        [
            ModelLed(space, seed, prior),
            Local(space, seed + 1, prior),
            Evolution(space, seed + 2),
            Random(space, seed + 3),
        ],
        seed,
    ),
}
"""Name -> agent of (space, seed, analytical prediction in microseconds or None)."""
