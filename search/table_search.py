"""Replays measured tables: how much of a table an agent has to measure before it is close.

An agent asks, the table answers; no device is needed and every seed gives the same result again.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyjax.core.errors import ConfigError
from search.agents import AGENTS, Agent, Predictor
from search.space import Point, Space
from search.tables import Table

TOLERANCE = 0.02  # of the best time: what counts as found
EASY = 0.07  # share of a table that random search measures, at most, where there is little to gain

Prior = Callable[[str, Sequence[Point]], Predictor | None]
"""(kernel name, points) -> an agent's prediction, or None for none."""


@dataclasses.dataclass(frozen=True)
class Landscape:
    """One kernel's rows of a table: microseconds of every point, None where it failed."""

    name: str
    kernel: str
    space: Space
    us: Mapping[Point, float | None]

    @property
    def target_us(self) -> float:
        return (1.0 + TOLERANCE) * min(us for us in self.us.values() if us is not None)


def landscapes(table: Table, min_points: int = 32) -> list[Landscape]:
    """Returns the searchable parts of a table: kernels with that many points, some measured."""
    found = []
    for kernel in dict.fromkeys(row.kernel for row in table.rows):
        rows = [row for row in table.rows if row.kernel == kernel]
        us = {row.schedule: row.us if row.status == "passed" else None for row in rows}
        if len(us) >= min_points and any(value is not None for value in us.values()):
            name = f"{table.workload.key} {kernel}"
            found.append(Landscape(name, kernel, Space(us), us))
    return found


def fraction_measured(agent: Agent, landscape: Landscape) -> float:
    """Returns the share of the points asked for until one was within tolerance of the best."""
    target = landscape.target_us
    for number in range(1, len(landscape.us) + 1):
        point = agent.ask()
        if point is None:
            break
        us = landscape.us[point]
        agent.tell(point, us)
        if us is not None and us <= target:
            return number / len(landscape.us)
    raise AssertionError(f"{agent.name} ended before every point of {landscape.name} was asked")


@dataclasses.dataclass(frozen=True)
class Replay:
    """Shares measured on one landscape, a seed each, by agent."""

    landscape: Landscape
    fractions: Mapping[str, tuple[float, ...]]

    def median(self, agent: str) -> float:
        return statistics.median(self.fractions[agent])

    @property
    def easy(self) -> bool:
        return self.median("random") <= EASY


def replay(landscape: Landscape, agents: Sequence[str], seeds: int, prior: Prior) -> Replay:
    """Replays every agent with seeds 0, 1, ... "random" is always among them; "tpe" is Optuna's."""
    predictor = prior(landscape.kernel, landscape.space.points)
    fractions = {
        name: tuple(
            fraction_measured(make_agent(name, landscape.space, seed, predictor), landscape)
            for seed in range(seeds)
        )
        for name in dict.fromkeys(("random", *agents))
    }
    return Replay(landscape, fractions)


def make_agent(name: str, space: Space, seed: int, prior: Predictor | None) -> Agent:
    """Returns an agent by name. Raises ConfigError for an unknown one, or "tpe" without optuna."""
    if name == "tpe":
        return Tpe(space, seed)
    if name not in AGENTS:
        raise ConfigError(f"unknown agent {name!r}; known: {', '.join(AGENTS)}, tpe")
    return AGENTS[name](space, seed, prior)


class Tpe:
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), for comparison only.

    It knows fields, not which of their combinations are legal: where it proposes one outside the
    table or twice, the point that differs from that in fewest fields is measured instead.
    """

    name = "tpe"

    def __init__(self, space: Space, seed: int):
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, multivariate=True)
        self._optuna = optuna
        self._study = optuna.create_study(sampler=sampler)
        self._space, self._rng = space, np.random.default_rng(seed)
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in space.values.items()
            if len(values) > 1
        }
        self._us: dict[Point, float | None] = {}
        self._asked: dict[Point, Any] = {}

    def ask(self) -> Point | None:
        fresh = [p for p in self._space.points if p not in self._us and p not in self._asked]
        if not fresh:
            return None
        trial = self._study.ask(self._distributions)
        wanted = {n: trial.params.get(n, v[0]) for n, v in self._space.values.items()}
        differing = [sum(wanted[n] != value for n, value in point) for point in fresh]
        nearest = [p for p, d in zip(fresh, differing, strict=True) if d == min(differing)]
        point = nearest[int(self._rng.integers(len(nearest)))]
        if min(differing):
            self._finish(trial, None)
        else:
            self._asked[point] = trial
        return point

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._us[point] = cost_us
        trial = self._asked.pop(point, None)
        if trial is not None:
            self._finish(trial, cost_us)
        elif cost_us is not None:
            params = {name: dict(point)[name] for name in self._distributions}
            self._study.add_trial(
                self._optuna.create_trial(
                    params=params, distributions=self._distributions, value=cost_us
                )
            )

    def _finish(self, trial: Any, cost_us: float | None) -> None:
        failed = self._optuna.trial.TrialState.FAIL
        if cost_us is None:
            self._study.tell(trial, state=failed)
        else:
            self._study.tell(trial, cost_us)


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            'the agent "tpe" is Optuna\'s: pip install "polyjax[search]", or name other --agents'
        ) from error
