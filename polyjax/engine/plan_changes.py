"""Whatever may change the plan of a running engine: one door, one order, one record of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyjax.core.errors import ConfigError, RequestError, StateABIError
from polyjax.core.plan import NUMERICS_CLASSES, Plan
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.events import EventLog
from polyjax.engine.install import Installer
from polyjax.engine.installation import Installation
from polyjax.engine.probation import Probation
from polyjax.engine.programs import ProgramTable
from polyjax.engine.promotion import Origin, Proposals
from polyjax.engine.sequence import Sequence
from polyjax.engine.types import RequestOutput

if TYPE_CHECKING:
    from polyjax.engine.scheduler import Scheduler


def _broken(sequence: Sequence) -> RequestError:
    reason = f"the plan that promised numerics {sequence.params.numerics!r} failed; try again"
    return RequestError(reason, status=503)


class PlanChanges:
    """Starts plans, applies swaps, rolls back. `weakest` is the class the engine was started with:
    what it promised then it keeps."""

    def __init__(
        self,
        table: ProgramTable,
        installer: Installer,
        probation: Probation,
        scheduler: Scheduler,
        events: EventLog,
    ):
        self._table = table
        self._installer = installer
        self._probation = probation
        self._scheduler = scheduler
        self._events = events
        self.weakest = table.current.plan.numerics
        self.proposals = Proposals(self.start)

    @property
    def wants_step(self) -> bool:
        """Whether a step would get on with a change even without a request to serve."""
        ready = self._table.pending is not None or self._installer.wants_step
        return ready or (self.proposals.waiting > 0 and self._way_is_free)

    def start(self, plan: Plan, origin: Origin) -> Installation:
        """Begins to install a plan. Raises RequestError (409) with what forbids it."""
        current = self._table.current
        ladder = plan.ladder or current.ladder
        if NUMERICS_CLASSES.index(plan.numerics) > NUMERICS_CLASSES.index(self.weakest):
            raise RequestError(
                f"numerics {plan.numerics!r} promises less than {self.weakest!r}, which this "
                "engine was started with: restart it with that plan",
                "plan",
                409,
            )
        try:
            BucketChooser(ladder, self._scheduler.max_pages)
            if origin.proposal_id is None and plan.mesh == current.plan.mesh:
                self._installer.give_way("an operator's plan goes first")
            return self._installer.start(plan, current.plan.mesh, ladder, origin)
        except (ConfigError, StateABIError) as error:
            raise RequestError(str(error), "plan", 409) from error

    @property
    def numerics(self) -> str:
        """The class that a new request can count on: a plan about to come may promise less."""
        pending = self._table.pending
        plans = [self._table.current.plan, *([pending.programs.plan] if pending else [])]
        return max((plan.numerics for plan in plans), key=NUMERICS_CLASSES.index)

    def apply(self, step_number: int) -> list[RequestOutput]:
        """Called before each step: the only place where a plan changes.

        A plan that promises less than the one in force waits until no request counts on more; if
        that one has failed, those requests end instead, and their ends are returned.
        """
        pending = self._table.pending
        if pending is None or step_number < pending.at_step:
            return []
        outputs = []
        if pending.programs.plan.numerics != self._table.current.plan.numerics:
            counting = self._scheduler.counting_on_more(pending.programs.plan.numerics)
            if counting and not self._probation.has_failed:
                return []
            outputs = [self._scheduler.refuse(sequence, _broken(sequence)) for sequence in counting]
        before = self._table.current.plan.digest
        self._table.apply_pending(step_number)
        current = self._table.current
        self._scheduler.set_ladder(current.ladder)
        job = self._installer.swapped(pending.rollback)
        facts = job.origin.to_json() if job is not None else {}
        kind = "rollback" if pending.rollback else "swap"
        self._events.add(kind, plan=current.plan.digest, before=before, **facts)
        self._probation.plan_changed(job)
        return outputs

    def roll_back(self, step_number: int, agent: str) -> None:
        """Forgets what is on its way and returns to the plan before.

        Raises RequestError (409) where there is neither.
        """
        was_active = self._installer.active
        try:
            self._table.roll_back(step_number)
        except RequestError:
            if not was_active:
                raise
        if was_active:
            self._installer.cancel(f"cancelled by {agent}")

    def start_proposal(self) -> None:
        """Called once a step: the next proposal, when nothing is on its way or under watch."""
        if self.proposals.waiting and self._way_is_free:
            self.proposals.start_next()

    @property
    def _way_is_free(self) -> bool:
        busy = self._installer.active or self._table.pending is not None
        return not busy and self._probation.watch is None
