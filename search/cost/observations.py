"""The measured points that one kernel's learned model is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyjax.core.op import Workload
from search.cost import network
from search.cost.features import Rows, Schema
from search.ledger import Trial
from search.space import Point


@dataclasses.dataclass
class Observations:
    """Grows with every measured point; a point measured again is kept once, as first measured."""

    schema: Schema
    x: list[np.ndarray] = dataclasses.field(default_factory=list)
    log_base: list[float] = dataclasses.field(default_factory=list)
    log_measured: list[float] = dataclasses.field(default_factory=list)
    workloads: list[str] = dataclasses.field(default_factory=list)
    _seen: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)

    def __len__(self) -> int:
        return len(self.x)

    def add(self, key: str, rows: Rows, us: np.ndarray) -> int:
        """Adds measured microseconds of `rows` of the workload `key`; returns how many were new."""
        before = len(self)
        for x, base, measured in zip(rows.x, np.log(rows.analytical_us), np.log(us), strict=True):
            identity = (key, *x.tolist())
            if identity not in self._seen:
                self._seen.add(identity)
                self.x.append(x)
                self.log_base.append(float(base))
                self.log_measured.append(float(measured))
                self.workloads.append(key)
        return len(self) - before

    @property
    def groups(self) -> np.ndarray:
        """Number of each row's workload, in the order they were first seen."""
        numbers = {key: i for i, key in enumerate(dict.fromkeys(self.workloads))}
        return np.asarray([numbers[key] for key in self.workloads])

    def training_rows(self, scaling: Scaling, rows: np.ndarray) -> network.TrainingRows:
        """Returns the rows of a boolean mask, standardised."""
        return network.TrainingRows.of(
            scaling.standardised(np.asarray(self.x)[rows]),
            np.asarray(self.log_base, np.float32)[rows],
            np.asarray(self.log_measured, np.float32)[rows],
            self.groups[rows],
        )

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {
            "x": np.asarray(self.x),
            "log_base": np.asarray(self.log_base),
            "log_measured": np.asarray(self.log_measured),
        }

    @classmethod
    def from_arrays(
        cls, schema: Schema, arrays: Mapping[str, np.ndarray], workloads: Sequence[str]
    ) -> Observations:
        made = cls(schema)
        base, measured = np.exp(arrays["log_base"]), np.exp(arrays["log_measured"])
        for key, x, b, m in zip(workloads, arrays["x"], base, measured, strict=True):
            made.add(key, Rows(x[None], b[None], b[None]), m[None])
        return made


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Mean, deviation and range of each feature where the model was trained."""

    mean: np.ndarray
    deviation: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray) -> Scaling:
        deviation = x.std(0)
        return cls(x.mean(0), np.where(deviation > 1e-9, deviation, 1.0), x.min(0), x.max(0))

    def standardised(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.mean) / self.deviation).astype(np.float32)

    def within(self, x: np.ndarray, reach: float, least: float) -> np.ndarray:
        """Mask of rows no further outside than `reach` of each range, or `least` if that is more.

        Sizes and counts are logarithms: a `least` of 1 is a factor of two.
        """
        slack = np.maximum(reach * (self.high - self.low), least)
        return ((x >= self.low - slack) & (x <= self.high + slack)).all(1)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a ledger trial tells a cost model."""

    kernel: str
    workload: Workload
    point: Point
    us: float


def measured(trial: Trial, workloads: Mapping[str, Workload]) -> Measured | None:
    """Returns what there is to learn from a trial, or None: not timed, or of something else."""
    workload = workloads.get(trial.target)
    kernel, schedule = trial.candidate.get("kernel"), trial.candidate.get("schedule")
    if trial.status != "passed" or not trial.samples_us or workload is None:
        return None
    if not isinstance(kernel, str) or not isinstance(schedule, Mapping):
        return None
    point = tuple(sorted(schedule.items()))
    return Measured(kernel, workload, point, float(np.median(trial.samples_us)))
