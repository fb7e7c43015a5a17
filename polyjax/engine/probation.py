"""A plan once it is in force: watched, then kept as the last good one, or rolled back."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from polyjax.core.errors import PolyjaxError
from polyjax.core.plan import Plan
from polyjax.engine.background import BackgroundTask
from polyjax.engine.events import Record
from polyjax.engine.installation import Installation, InstallState
from polyjax.engine.last_good import LastGoodPlan
from polyjax.engine.launcher import RunningStep
from polyjax.engine.programs import ProgramTable
from polyjax.engine.promotion import Way
from polyjax.engine.watch import StepLatencies, Watch, WatchState, signature

log = logging.getLogger("polyjax.engine")


class NotFinite(PolyjaxError):
    """A step of a watched plan computed something that is no number; none of it was used."""


class Probation:
    """Knows how long steps of the plan in force take, and watches a plan that is new.

    A plan survives after `steps` steps; it is then written to `last_good`. One that fails is rolled
    back before the next step. `record` hears of both.
    """

    def __init__(
        self,
        table: ProgramTable,
        record: Record,
        last_good: LastGoodPlan | None,
        steps: int,
    ):
        self._table = table
        self._record = record
        self._last_good = last_good
        self._writing: BackgroundTask[None] | None = None
        self.steps = steps
        self.latencies = StepLatencies()
        self._before = StepLatencies()  # of the plan before, for when it comes back
        self._good = {table.current.plan.digest}
        self._job: Installation | None = None

    @property
    def watch(self) -> Watch | None:
        """The watch under way."""
        watch = self._job.watch if self._job else None
        return watch if watch is not None and watch.is_running else None

    @property
    def has_failed(self) -> bool:
        """Whether the plan in force failed its watch: nothing may wait any longer."""
        watch = self._job.watch if self._job else None
        return watch is not None and watch.state is WatchState.FAILED

    def plan_changed(self, job: Installation | None) -> None:
        """A swap has happened; `job` brought the new plan, None if it was there before."""
        self._supersede("another plan came into force")
        plan = self._table.current.plan
        if job is None:  # a rollback
            self.latencies, self._before = self._before, StepLatencies()
            if plan.digest in self._good:
                self._keep(plan)
            return
        job.watch = Watch(self.steps, self.latencies, compares=job.origin.way is Way.CANARY)
        self._before, self.latencies = self.latencies, job.watch.latencies
        self._job = job

    def launched(self, running: RunningStep) -> None:
        """Asks for the hidden states of a watched step; they travel while it runs."""
        if self.watch is None:
            return
        for launch in running.launches:
            launch.hidden.copy_to_host_async()

    def check(self, running: RunningStep) -> None:
        """Raises NotFinite for a watched step whose tokens must not be used."""
        if self.watch is None or running.epoch != self._table.epoch:
            return
        for running_launch in running.launches:
            launch = running_launch.launch
            hidden = np.asarray(running_launch.hidden)[: len(launch.sequences)]
            if not np.isfinite(hidden.astype(np.float32)).all():
                raise NotFinite(f"a hidden state of a step of {launch.bucket} is not finite")

    def committed(self, running: RunningStep, duration_us: float | None) -> None:
        """Takes in a step that went well; `duration_us` None where it says nothing of the plan."""
        if running.epoch != self._table.epoch:
            return
        watch, kind = self.watch, signature(running.step)
        if watch is None:
            if duration_us is not None:
                self.latencies.add(kind, duration_us)
            return
        watch.observe(kind, duration_us)
        if watch.state is WatchState.FAILED:
            self._roll_back(watch.reason)
        elif watch.state is WatchState.SURVIVED:
            self._survive()

    def accuse(self, epoch: int, error: Exception) -> bool:
        """A step of `epoch` failed: returns whether the plan under watch is to blame and goes."""
        watch = self.watch
        if watch is None or epoch != self._table.epoch:
            return False
        reason = str(error) if isinstance(error, PolyjaxError) else f"device error: {error}"
        watch.end(WatchState.FAILED, reason)
        self._roll_back(reason)
        return True

    def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    # -- inside ------------------------------------------------------------------------------

    def _supersede(self, reason: str) -> None:
        job = self._job
        if job is not None and job.watch is not None and job.watch.is_running:
            job.watch.end(WatchState.SUPERSEDED, reason)
            self._note(job, "watch_ended", state=job.watch.state.value, reason=reason)
        self._job = None

    def _survive(self) -> None:
        job = self._job
        assert job is not None
        self._good.add(job.plan.digest)
        self._note(job, "watch_ended", state=WatchState.SURVIVED.value, steps=self.steps)
        self._keep(job.plan)

    def _roll_back(self, reason: str) -> None:
        job = self._job
        assert job is not None
        job.state, job.reason = InstallState.ROLLED_BACK, reason
        self._note(job, "watch_ended", state=WatchState.FAILED.value, reason=reason)
        if self._table.pending is not None:
            self._table.roll_back(0)  # forgets what was to come: it was judged by this plan
        self._table.roll_back(0)

    def _note(self, job: Installation, kind: str, **facts: Any) -> None:
        self._record(kind, plan=job.plan.digest, **job.origin.to_json(), **facts)

    def _keep(self, plan: Plan) -> None:
        """Writes the last good plan in a thread: a slow disk holds up no step."""
        last_good = self._last_good
        if last_good is None:
            return

        def write(progress: Any) -> None:
            try:
                last_good.write(plan)
            except OSError as error:
                log.warning("%s: %s: a restart will not know this plan", last_good.path, error)

        if self._writing is not None:
            self._writing.cancel()
        self._writing = BackgroundTask("last good plan", write)
