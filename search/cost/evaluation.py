"""How good a cost model is on measured tables: workloads predicted by what the others taught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.op import Kernel, Workload
from search.cost import COVERAGE, Prediction
from search.cost.learned import CostModel
from search.kernels import kernel_named
from search.space import Point
from search.tables import Table

MIN_ROWS = 32  # measured schedules below which ranking a workload says little
MIN_TABLES = 3  # workloads of an op: one left out and two to learn from


@dataclasses.dataclass(frozen=True)
class Quality:
    """Of predictions against measurements: rank correlation, how much slower the schedule predicted
    fastest is than the fastest (0.05: 5 %), share of measurements inside their interval.
    """

    spearman: float
    top1_regret: float
    coverage: float

    @property
    def coverage_error(self) -> float:
        return abs(self.coverage - COVERAGE)


@dataclasses.dataclass(frozen=True)
class Score:
    """Of one workload left out; `analytical` is the same without anything learned.

    `predicted_us` [rows] are the learned model's, `us` [rows] what was measured.
    """

    workload: Workload
    learned: Quality
    analytical: Quality
    predicted_us: np.ndarray
    us: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.us)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the rank correlation; equal values share their mean rank. 0 if either is constant."""
    first, second = _ranks(a), _ranks(b)
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def quality(guess: Prediction, us: np.ndarray) -> Quality:
    inside = (guess.low_us <= us) & (us <= guess.high_us)
    regret = float(us[int(np.argmin(guess.us))] / us.min() - 1.0)
    return Quality(spearman(guess.us, us), regret, float(inside.mean()))


def by_kernel(table: Table) -> Iterable[tuple[Kernel, list[Point], np.ndarray]]:
    """Yields each kernel of a table with its measured points and their microseconds."""
    rows = table.passed()
    for name in dict.fromkeys(row.kernel for row in rows):
        own = [row for row in rows if row.kernel == name]
        yield kernel_named(name), [row.schedule for row in own], np.array([row.us for row in own])


def predictions(model: CostModel, table: Table) -> tuple[Prediction, np.ndarray]:
    """Returns predictions and measurements of every row of a table, its kernels one by one."""
    parts = [(model.predict(k, table.workload, points), us) for k, points, us in by_kernel(table)]
    joined = (
        np.concatenate([getattr(guess, field.name) for guess, _ in parts])
        for field in dataclasses.fields(Prediction)
    )
    return Prediction(*joined), np.concatenate([us for _, us in parts])


def taught(tables: Iterable[Table], chip: ChipSpec, seed: int = 0) -> CostModel:
    """Returns a cost model that has learned from tables."""
    model = CostModel(chip, seed)
    for table in tables:
        for kernel, points, us in by_kernel(table):
            model.learn(kernel, table.workload, points, us, fit=False)
    model.fit()
    return model


def usable(tables: Iterable[Table], log: Callable[[str], None]) -> dict[str, list[Table]]:
    """Returns the tables to evaluate on, by op; says which are left out and why."""
    ops: dict[str, list[Table]] = {}
    for table in tables:
        rows = len(table.passed())
        if rows < MIN_ROWS:
            log(f"left out: {table.workload.key} has {rows} measured schedules, {MIN_ROWS} needed")
            continue
        ops.setdefault(table.workload.op, []).append(table)
    for op in [op for op, kept in ops.items() if len(kept) < MIN_TABLES]:
        log(f"left out: {op} has {len(ops.pop(op))} workloads, {MIN_TABLES} needed")
    return ops


def leave_one_out(tables: Sequence[Table], chip: ChipSpec, seed: int = 0) -> list[Score]:
    """Returns a score for each of the tables of one op, each predicted from the others."""
    scores = []
    for left_out in tables:
        others = [table for table in tables if table is not left_out]
        learned, us = predictions(taught(others, chip, seed), left_out)
        analytical, _ = predictions(CostModel(chip), left_out)
        found = quality(learned, us), quality(analytical, us)
        scores.append(Score(left_out.workload, *found, learned.us, us))
    return scores
