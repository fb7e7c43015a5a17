"""One candidate under one seed: its compiled functions and the cases the gates share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from polyjax.core.op import Workload
from polyjax.gates.candidate import Candidate, GateFailure, called, on_device
from polyjax.gates.inputs import Case, cases, in_dtype, sizes_around
from polyjax.gates.op_bounds import DEPENDS_ON_FOUND, expected, truth
from polyjax.gates.settings import Settings


@functools.lru_cache(maxsize=256)
def known_cases(workload: Workload, seed: int, limit: int | None) -> tuple[Case, ...]:
    """The cases of a workload and seed, made once for all candidates that are asked about it."""
    return tuple(cases(workload, seed, limit))


@functools.lru_cache(maxsize=2048)
def _known_results(workload: Workload, seed: int, limit: int | None, index: int) -> KnownResults:
    case = known_cases(workload, seed, limit)[index]
    return KnownResults(case, truth(case))


class OpTrial:
    """`workloads` are the candidate's own and sizes around it, as far as it supports them."""

    def __init__(
        self, candidate: Candidate, seed: int, resized: int = 1, shape_seed: int | None = None
    ):
        """`shape_seed` chooses the other sizes; the seed does by default."""
        self.candidate = candidate
        self.seed = seed
        self.settings = Settings.now()
        self.limit = 3 if candidate.interpreted else None
        self._resized = resized
        self._shape_seed = seed if shape_seed is None else shape_seed
        self._functions: dict[Workload, Callable[..., Any] | None] = {}

    def function(self, workload: Workload) -> Callable[..., Any] | None:
        """The candidate's jitted function, or None where it does not support the workload."""
        if workload not in self._functions:
            self._functions[workload] = self.candidate.function(workload)
        return self._functions[workload]

    @property
    def own(self) -> Callable[..., Any]:
        """The function of the candidate's own workload. Raises GateFailure if there is none."""
        function = self.function(self.candidate.workload)
        if function is None:
            raise GateFailure("does not support the workload it is proposed for")
        return function

    def workloads(self) -> Iterator[Workload]:
        """Own size, other sizes, own size in float32; those it does not support are left out."""
        own = self.candidate.workload
        around = sizes_around(own, self._shape_seed, self._resized)
        others = dict.fromkeys([*around, in_dtype(own, "float32")])
        yield own
        for workload in others:
            if workload != own and self.function(workload) is not None:
                yield workload

    def cases(self, workload: Workload) -> tuple[Case, ...]:
        return known_cases(workload, self.seed, self.limit)

    def judge_known(self, workload: Workload, index: int) -> float:
        """Calls the candidate on a case and judges it; worst error over bound."""
        function = self.function(workload)
        assert function is not None
        found = called(function, on_device(self.cases(workload)[index].args))
        return _known_results(workload, self.seed, self.limit, index).judge(found)


def judge(case: Case, function: Callable[..., Any]) -> float:
    """Calls `function` on a case; worst error over bound. Raises GateFailure beyond it."""
    return judge_results(case, called(function, on_device(case.args)), truth(case))


def judge_results(case: Case, found: Any, wanted: Any) -> float:
    """Judges host results. Raises GateFailure naming case, output and element."""
    return KnownResults(case, wanted).judge(found)


class KnownResults:
    """What the results of a case must be, derived once for all candidates that are judged by it.

    Deriving takes float64 products of the op's size on the host, judging next to nothing.
    """

    def __init__(self, case: Case, wanted: Any):
        """`wanted` is `truth(case)`."""
        self._case, self._wanted = case, wanted
        self._checks = None if case.op.name in DEPENDS_ON_FOUND else expected(case, wanted, ())

    def judge(self, found: Any) -> float:
        """Returns the worst error over its bound of host results. Raises GateFailure beyond it."""
        case, leaves = self._case, tuple(jax.tree.leaves(found))
        if len(leaves) != len(self._wanted):
            raise GateFailure(f"{case.name}: {len(leaves)} results instead of {len(self._wanted)}")
        for got, want in zip(leaves, self._wanted, strict=True):
            if got.shape != np.shape(want):
                raise GateFailure(f"{case.name}: shape {got.shape} instead of {np.shape(want)}")
        try:
            checks = self._checks or expected(case, self._wanted, leaves)
            return max(check.judge(got) for check, got in zip(checks, leaves, strict=True))
        except GateFailure as failure:
            raise GateFailure(f"{case.workload.key} {case.name}: {failure}") from None
