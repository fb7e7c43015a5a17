"""Bayesian optimisation: a Gaussian process on log cost over the analytical prediction.

The process models what the prior (a cost model's prediction) does not explain. Acquisition is
expected improvement; all points of the finite space are scored, so there is no inner search.
Length scales are chosen on a grid by marginal likelihood (Rasmussen and Williams 2006, 5.4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from search.agents.history import History
from search.space import Point, Space

FIRST_POINTS = 5
_LENGTH_SCALES = (0.3, 0.6, 1.2, 2.4)
_NOISES = (1e-4, 1e-2)


class ModelLed:
    name = "model_led"

    def __init__(self, space: Space, seed: int, prior: Callable[[Point], float] | None):
        self._history = History(space)
        self._rng = np.random.default_rng(seed)
        self._index = {point: i for i, point in enumerate(space.points)}
        self._features = space.features(space.points)
        self._prior = np.zeros(len(space))
        if prior is not None:
            self._prior = np.log([max(prior(point), 1e-9) for point in space.points])
        self._first = self._spread_start(FIRST_POINTS, use_prior=prior is not None)

    def _spread_start(self, count: int, use_prior: bool) -> list[Point]:
        """Returns first points far apart: the prior's favourite or a random one, then max-min."""
        points = self._history.space.points
        chosen = [
            int(np.argmin(self._prior)) if use_prior else int(self._rng.integers(len(points)))
        ]
        # Far apart, but among what the prior does not call hopeless.
        hopeful = self._prior <= np.quantile(self._prior, 0.5)
        while len(chosen) < min(count, int(hopeful.sum())):
            gaps = np.min(
                [np.square(self._features - self._features[i]).sum(1) for i in chosen], axis=0
            )
            gaps = np.where(hopeful, gaps + 1e-9 * self._rng.random(len(points)), -1.0)
            gaps[chosen] = -1.0
            chosen.append(int(np.argmax(gaps)))
        return [points[i] for i in reversed(chosen)]

    def ask(self) -> Point | None:
        while self._first:
            point = self._first.pop()
            if not self._history.known(point):
                return self._history.take(point)
        unknown = self._history.unknown()
        if not unknown:
            return None
        if len(self._history.costs_us) < 2:
            return self._history.take(unknown[int(self._rng.integers(len(unknown)))])
        rows = [self._index[point] for point in unknown]
        gain = self._expected_improvement(rows)
        return self._history.take(unknown[int(np.argmax(gain))])

    def tell(self, point: Point, cost_us: float | None) -> None:
        self._history.tell(point, cost_us)

    def _expected_improvement(self, rows: list[int]) -> np.ndarray:
        """Returns the expected decrease of log cost below the best, for each of the `rows`."""
        seen = [self._index[point] for point in self._history.costs_us]
        target = np.log(list(self._history.costs_us.values()))
        residual = target - self._prior[seen]
        offset = float(np.median(residual))
        mean, deviation = _posterior(self._features[seen], residual - offset, self._features[rows])
        mean = mean + offset + self._prior[rows]
        better = float(target.min()) - mean
        z = better / deviation
        density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2)))
        return better * below + deviation * density


def _posterior(x: np.ndarray, y: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation at `queries`, under the grid's most likely Matern-5/2 kernel."""
    scale = max(float(np.var(y)), 1e-8)
    best: tuple[float, float, np.ndarray, np.ndarray] | None = None
    for length in _LENGTH_SCALES:
        covariance = scale * _matern(x, x, length)
        for noise in _NOISES:
            factor = np.linalg.cholesky(covariance + scale * noise * np.eye(len(y)))
            weights = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
            fit = -0.5 * float(y @ weights) - float(np.log(np.diag(factor)).sum())
            if best is None or fit > best[0]:
                best = (fit, length, factor, weights)
    assert best is not None
    _, length, factor, weights = best
    cross = scale * _matern(queries, x, length)
    half = np.linalg.solve(factor, cross.T)
    variance = np.maximum(scale - np.square(half).sum(0), 1e-12)
    return cross @ weights, np.sqrt(variance)


def _matern(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    squares = np.square(a[:, None, :] - b[None, :, :]).sum(-1)
    r = np.sqrt(5.0 * squares) / length
    return (1.0 + r + r * r / 3.0) * np.exp(-r)
