"""Tier 2: the programs of the plan in force, and the only way they change: between two steps.

A plan becomes current by replacing one reference. Plans that were current stay resident, so that
rolling back takes one step and compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyjax.compiler.program import ProgramKey, StepProgram
from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.core.plan import Plan


@dataclasses.dataclass(frozen=True)
class PlanPrograms:
    """A plan with all the programs that serving on its ladder may call."""

    plan: Plan
    ladder: BucketLadder
    programs: Mapping[ProgramKey, StepProgram]

    def __getitem__(self, key: ProgramKey) -> StepProgram:
        try:
            return self.programs[key]
        except KeyError:
            raise PolyjaxError(f"plan {self.plan.digest} has no program {key}") from None


def unaffected(current: PlanPrograms, plan: Plan) -> dict[ProgramKey, StepProgram]:
    """The programs in force that `plan` would only compile again, under its digest.

    A program is made of the ops it calls: it stays what it is if the plan chooses for each of them
    as the plan in force does. A file kernel's name carries its text, so choices tell texts apart.
    """
    if _settings(current.plan) != _settings(plan):
        return {}
    before, after = dict(current.plan.choices), dict(plan.choices)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    return {
        key: dataclasses.replace(program, plan_digest=plan.digest)
        for key, program in current.programs.items()
        if changed.isdisjoint(workload for workload, _ in program.used)
    }


def _settings(plan: Plan) -> Plan:
    """What every program of a plan depends on."""
    return dataclasses.replace(plan, choices=(), sources=(), ladder=None)


@dataclasses.dataclass(frozen=True)
class PendingSwap:
    """A change that applies before step `at_step`; `rollback` returns to an earlier plan."""

    programs: PlanPrograms
    at_step: int
    rollback: bool


class ProgramTable:
    """The plan in force and its predecessors, newest last, at most `resident` plans in all.

    The predecessor always stays: a plan that turns out bad has to have somewhere to go back to.

    `epoch` numbers the changes: it names the plan in force in every response.
    """

    def __init__(self, first: PlanPrograms, resident: int):
        self.current = first
        self.epoch = 0
        self.swaps = 0
        self.rollbacks = 0
        self._resident = max(resident, 2)
        self._previous: list[PlanPrograms] = []
        self._pending: PendingSwap | None = None

    @property
    def pending(self) -> PendingSwap | None:
        return self._pending

    @property
    def resident(self) -> tuple[PlanPrograms, ...]:
        """Plans that are ready to run, oldest first, the one in force last."""
        return (*self._previous, self.current)

    def install(self, candidate: PlanPrograms, at_step: int) -> None:
        """Makes `candidate` current before step `at_step`. It has passed its gates elsewhere."""
        self._pending = PendingSwap(candidate, at_step, rollback=False)

    def roll_back(self, at_step: int) -> None:
        """Returns to the previous plan before step `at_step`, or forgets a swap still pending.

        Raises RequestError (409) where there is no earlier plan.
        """
        if self._pending is not None and not self._pending.rollback:
            self._pending = None
            return
        if not self._previous:
            raise RequestError("there is no earlier plan to roll back to", status=409)
        self._pending = PendingSwap(self._previous[-1], at_step, rollback=True)

    def apply_pending(self, step_number: int) -> bool:
        """Applies the pending change if its step has come; returns whether the plan changed."""
        pending = self._pending
        if pending is None or step_number < pending.at_step:
            return False
        self._pending = None
        if pending.rollback:
            self._previous.pop()
            self.rollbacks += 1
        else:
            self._previous.append(self.current)
            del self._previous[: max(len(self._previous) - (self._resident - 1), 0)]
            self.swaps += 1
        self.current = pending.programs
        self.epoch += 1
        return True
