"""Which kernel and schedule each workload of a step gets when no search has run: the default plan.

A step is traced once by shapes alone. At every op call the choice is, in this order: what a tuning
table measured, the analytical default of the first kernel that supports the workload on this chip
and is preferred for it, or the reference. A composite op with a kernel is taken whole; one
without is looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from polyjax.core.chips import ChipSpec, find_chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Choice, Kernel, Op, Ops, Schedule, Workload
from polyjax.core.plan import Plan

Table = Mapping[str, Choice]


class ChoosingOps(Ops):
    """Records a choice for every workload it meets; computes shapes by the references.

    `unchosen` are those that no kernel takes; composite ones were looked into.
    """

    def __init__(
        self,
        catalogue: Mapping[str, Kernel],
        chip: ChipSpec,
        table: Table,
        wherever_possible: bool = False,
    ):
        super().__init__({}, catalogue)
        self.choices: dict[str, Choice] = {}
        self.unchosen: set[Workload] = set()
        self._chip = chip
        self._table = table
        self._wherever_possible = wherever_possible

    def __call__(
        self, op: Op, *args: Any, reference: Callable[..., Any] | None = None, **static: Any
    ) -> Any:
        workload = op.workload(*args, **static)
        choice = choose(workload, self._catalogue, self._chip, self._table, self._wherever_possible)
        compute = reference or op.reference
        if choice is None:
            self.unchosen.add(workload)
            return compute(self, *args, **static)
        self.choices[workload.key] = choice
        return compute(Ops({}, {}), *args, **static)

    def trace(self, functions: Iterable[Callable[[Ops], Any]]) -> None:
        """Meets the workloads of step functions on abstract arrays, for shapes only."""
        for function in functions:
            jax.eval_shape(lambda call=function: call(self))


def choose(
    workload: Workload,
    catalogue: Mapping[str, Kernel],
    chip: ChipSpec,
    table: Table,
    wherever_possible: bool = False,
) -> Choice | None:
    """Returns the table's choice if it is still legal here, else the first default, else None.

    With `wherever_possible` a kernel need not be preferred: it is enough that it can run.
    """
    measured = table.get(workload.key)
    if measured is not None and _legal(measured, workload, catalogue, chip):
        return measured
    for name, kernel in catalogue.items():
        suits = kernel.op.name == workload.op and kernel.platform == chip.platform
        if not suits or not kernel.requires <= chip.features or kernel.supports(workload):
            continue
        if not (wherever_possible or kernel.preferred(workload)):
            continue
        return Choice(name, _frozen(kernel.default(workload, chip)))
    return None


def _legal(
    choice: Choice, workload: Workload, catalogue: Mapping[str, Kernel], chip: ChipSpec
) -> bool:
    kernel = catalogue.get(choice.kernel)
    if kernel is None or kernel.supports(workload) or not kernel.requires <= chip.features:
        return False
    try:
        kernel.check(workload, kernel.schedule_type.from_json(dict(choice.schedule)), chip)
    except (ScheduleError, TypeError):
        return False
    return True


def _frozen(schedule: Schedule) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(schedule.to_json().items()))


class DefaultingOps(Ops):
    """Ops whose workloads without a choice get the default kernel of `chip`, unless that is None.

    For plans whose `unlisted` is "default".
    """

    def __init__(
        self,
        choices: Mapping[str, Choice],
        catalogue: Mapping[str, Kernel],
        chip: ChipSpec | None,
    ):
        super().__init__(choices, catalogue)
        self._chip = chip
        self._defaults: dict[str, Choice | None] = {}

    def choice(self, workload: Workload) -> Choice | None:
        if self._chip is None or workload.key in self._choices:
            return super().choice(workload)
        if workload.key not in self._defaults:
            found = choose(workload, self._catalogue, self._chip, {})
            self._defaults[workload.key] = found
        return self._defaults[workload.key]


def defaults_for(plan: Plan, device_kind: str) -> ChipSpec | None:
    """The chip whose default kernels a plan's unlisted workloads get, if any."""
    return find_chip(device_kind) if plan.unlisted == "default" else None


def default_choices(
    traced: Sequence[Callable[[Ops], Any]],
    catalogue: Mapping[str, Kernel],
    chip: ChipSpec,
    table: Table,
    wherever_possible: bool = False,
) -> tuple[tuple[str, Choice], ...]:
    """Returns a plan's choices for every workload that the `traced` step functions contain.

    Each function takes an Ops and runs a step on abstract arrays; it is evaluated for shapes only.
    """
    ops = ChoosingOps(catalogue, chip, table, wherever_possible)
    ops.trace(traced)
    return tuple(sorted(ops.choices.items()))
