"""Finite search spaces: the legal schedules of one workload, or any list of settings.

A point is a tuple of (field, value) pairs in a fixed field order. Fields are ordinal where their
values are numbers, categorical otherwise; both kinds become numeric features for the models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Kernel, Workload

Point = tuple[tuple[str, Any], ...]


class Space:
    """A finite set of points with neighbours, crossover and features."""

    def __init__(self, points: Iterable[Point]):
        """Raises ValueError for no points, or points with different fields."""
        self.points: tuple[Point, ...] = tuple(dict.fromkeys(points))
        if not self.points:
            raise ValueError("a space needs at least one point")
        self.fields = tuple(name for name, _ in self.points[0])
        if any(tuple(name for name, _ in point) != self.fields for point in self.points):
            raise ValueError("points of one space have the same fields")
        self._members = frozenset(self.points)
        self.values: dict[str, tuple[Any, ...]] = {
            name: tuple(sorted({dict(p)[name] for p in self.points}, key=_order))
            for name in self.fields
        }

    def __len__(self) -> int:
        return len(self.points)

    def __contains__(self, point: Point) -> bool:
        return point in self._members

    def sample(self, rng: np.random.Generator) -> Point:
        return self.points[int(rng.integers(len(self.points)))]

    def neighbours(self, point: Point) -> list[Point]:
        """Returns the points one field away, nearest values first."""
        found: list[tuple[int, Point]] = []
        for index, (name, value) in enumerate(point):
            values = self.values[name]
            here = values.index(value)
            for there, other in enumerate(values):
                moved = (*point[:index], (name, other), *point[index + 1 :])
                if there != here and moved in self._members:
                    found.append((abs(there - here), moved))
        return [moved for _, moved in sorted(found, key=lambda pair: pair[0])]

    def cross(self, first: Point, second: Point, rng: np.random.Generator) -> Point:
        """Returns a point with each field from one of two parents, or a parent if it is illegal."""
        take = rng.random(len(first)) < 0.5
        child = tuple(a if t else b for a, b, t in zip(first, second, take, strict=True))
        return child if child in self._members else first

    def features(self, points: Sequence[Point]) -> np.ndarray:
        """Returns [points, features]: ordinal fields as ranks in 0 to 1, others one-hot."""
        rows = [[x for name, value in point for x in self._encode(name, value)] for point in points]
        return np.asarray(rows, dtype=float)

    def _encode(self, name: str, value: Any) -> list[float]:
        values = self.values[name]
        if len(values) == 1:
            return []
        if _ordinal(values):
            return [values.index(value) / (len(values) - 1)]
        return [float(value == other) for other in values]


def _ordinal(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) for v in values)


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not math.isnan(value):
        return (0, float(value), "")
    return (1, 0.0, str(value))


def legal_schedules(
    kernel: Kernel, workload: Workload, chip: ChipSpec
) -> tuple[Space, Mapping[str, int]]:
    """Returns the space of a kernel's legal schedules, and how many were refused for which reason.

    Raises ScheduleError if none is legal.
    """
    legal: list[Point] = []
    refused: dict[str, int] = {}
    for schedule in kernel.space(workload, chip):
        try:
            kernel.check(workload, schedule, chip)
        except ScheduleError as error:
            refused[str(error)] = refused.get(str(error), 0) + 1
        else:
            legal.append(tuple(sorted(schedule.to_json().items())))
    if not legal:
        raise ScheduleError(f"{kernel.name} has no legal schedule for {workload.key}: {refused}")
    return Space(legal), refused
