"""What the learned cost model sees of a point: analytical terms, schedule knobs, workload sizes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Kernel, Workload
from search.cost.analytical import Terms, terms
from search.space import Point

VERSION = 1  # raised whenever a feature changes its meaning; older models then stay silent

_SHARES = ("gap_us", "start_us", "memory_us", "l2_us", "compute_us", "busy_us", "exposed_us")
_LOGS = ("us", "floor_us", "rounds", "in_flight", "blocks_per_sm")


@dataclasses.dataclass(frozen=True)
class Schema:
    """The names of one kernel's features, in order."""

    kernel: str
    knobs: tuple[str, ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, kernel: Kernel, workload: Workload) -> Schema:
        knobs = tuple(sorted(f.name for f in dataclasses.fields(kernel.schedule_type)))
        return cls(kernel.name, knobs, tuple(sorted(axis for axis, _ in workload.dims)))

    @property
    def names(self) -> tuple[str, ...]:
        shares = tuple(f"{name} share" for name in _SHARES)
        return (*shares, *(f"log {name}" for name in _LOGS), "tail", *self.knobs, *self.axes)

    @property
    def digest(self) -> str:
        """Returns 16 hex digits over version and names: models of another digest do not fit."""
        text = json.dumps([VERSION, self.kernel, self.names])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Points of one workload: features `x` [n, features], analytical and roofline microseconds."""

    x: np.ndarray
    analytical_us: np.ndarray
    floor_us: np.ndarray


def rows(kernel: Kernel, workload: Workload, points: Sequence[Point], chip: ChipSpec) -> Rows:
    """Returns the features of legal points. Raises ScheduleError for fields the kernel lacks."""
    defaults = {f.name: f.default for f in dataclasses.fields(kernel.schedule_type)}
    sizes = [math.log2(1 + size) for _, size in sorted(workload.dims)]
    x, analytical_us, floor_us = [], [], []
    for point in points:
        schedule = kernel.schedule_type.from_json(dict(point))
        cost = terms(kernel, workload, schedule, chip)
        fields = sorted(schedule.to_json().items())
        knobs = [_number(value, defaults[name]) for name, value in fields]
        x.append([*_of_terms(cost), *knobs, *sizes])
        analytical_us.append(cost.us)
        floor_us.append(cost.floor_us)
    width = len(Schema.of(kernel, workload).names)
    return Rows(
        np.asarray(x, float).reshape(len(points), width),
        np.asarray(analytical_us, float),
        np.asarray(floor_us, float),
    )


def _of_terms(cost: Terms) -> list[float]:
    shares = [getattr(cost, name) / cost.us for name in _SHARES]
    logs = [math.log2(max(getattr(cost, name), 1e-3)) for name in _LOGS]
    return [*shares, *logs, cost.tail]


def _number(value: Any, default: Any) -> float:
    """Counts by their logarithm, switches as 0 and 1, words as whether they are the default."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int | float):
        if value < 0:
            raise ScheduleError(f"a schedule field is {value}: the cost model knows no negatives")
        return math.log2(1 + value)
    return float(value == default)
