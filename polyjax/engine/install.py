"""How a new plan reaches a running engine: the state machine of a promotion, up to the swap.

    COMPILING -> [FIRST_RUN] -> GATING -> [SHADOW -> CANARY] -> PENDING -> CURRENT

Stages in brackets are for plans that have to prove themselves (`promotion.Way.CANARY`). From every
stage the way may lead to REFUSED, from CURRENT to ROLLED_BACK. `advance` is called once a step and
does a bounded piece of work: it looks for an answer of another process, or runs one program once.
Nothing the engine serves waits for more.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

from polyjax.compiler.program import ProgramKey, StepProgram
from polyjax.compiler.worker import CompilerProcess
from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import PolyjaxError, RequestError, StateABIError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.engine.background import BackgroundTask
from polyjax.engine.build import ProgramSource
from polyjax.engine.events import Record
from polyjax.engine.installation import Installation, InstallState
from polyjax.engine.launcher import RunningStep
from polyjax.engine.live_trial import LiveTrial
from polyjax.engine.programs import PlanPrograms, ProgramTable, unaffected
from polyjax.engine.promotion import Origin, Policy, Way
from polyjax.engine.state import DeviceState
from polyjax.engine.step import ScheduledStep
from polyjax.engine.warm import warm
from polyjax.gates.equivalence import EquivalenceGate, Pieces
from polyjax.gates.first_run import RUNNABLE
from polyjax.gates.verdict import Verdict

CHANGED_SOURCE = (
    "the compiler process does not run the same source, flags or libraries as this engine: "
    "polyjax was changed on disk since the engine started; restart it"
)
_DISTURBING = (InstallState.GATING, InstallState.SHADOW, InstallState.CANARY)
_LOAD_WAIT_S = 0.002  # how long an idle engine waits for a program to be loaded before it looks


class Installer:
    """Takes one plan at a time from its description to the program table.

    `first_runs` is the process that programs of canary plans run in first; `record` hears of each
    change.
    """

    def __init__(
        self,
        source: ProgramSource,
        state: DeviceState,
        table: ProgramTable,
        compiler: CompilerProcess,
        warm_calls: int,
        first_runs: CompilerProcess,
        record: Record = lambda kind, **facts: None,
        policy: Policy | None = None,
    ):
        self._source = source
        self._state = state
        self._table = table
        self._compiler = compiler
        self._first_runs = first_runs
        self._warm_calls = warm_calls
        self._record = record
        self.policy = policy or Policy()
        self._gate: EquivalenceGate | None = None
        self._to_gate: collections.deque[ProgramKey] = collections.deque()
        self._loading: BackgroundTask[StepProgram | None] | None = None
        self._judging: tuple[StepProgram, Pieces[Verdict]] | None = None
        self._trial: LiveTrial | None = None
        self._rests_until_s = 0.0
        self.current: Installation | None = None

    @property
    def active(self) -> bool:
        return self.current is not None and self.current.active

    @property
    def wants_step(self) -> bool:
        """Whether a step would get on with it even without a request to serve."""
        job = self.current
        return job is not None and job.active and job.state is not InstallState.SHADOW

    @property
    def is_disturbing(self) -> bool:
        """Whether steps may take longer for it."""
        return self.current is not None and self.current.state in _DISTURBING

    def start(
        self, plan: Plan, mesh_plan: MeshPlan, ladder: BucketLadder, origin: Origin | None = None
    ) -> Installation:
        """Begins to install a plan.

        Raises StateABIError where it wants another mesh, RequestError (409) while another plan is
        on its way.
        """
        if plan.mesh != mesh_plan:
            raise StateABIError(
                [f"mesh: the engine runs on {mesh_plan}, the plan wants {plan.mesh}"]
            )
        if self.active:
            raise RequestError("another plan is being installed", status=409)
        job = Installation(plan, ladder, self._source.keys(ladder), origin or Origin())
        current = self._table.current
        job.programs = {k: p for k, p in unaffected(current, plan).items() if k in job.keys}
        for key in job.keys:
            request = self._source.request(plan, key)
            if key in job.programs:
                job.compiled += 1
                self._source.also_named(self._source.request(current.plan, key), request)
            elif self._source.is_cached(request):
                job.compiled += 1
            else:
                self._compiler.submit(request)
        self.current = job
        self._note(job, "promotion_started", programs=len(job.keys), to_compile=self._missing(job))
        return job

    # -- around each step --------------------------------------------------------------------

    def before_launch(self, step: ScheduledStep) -> None:
        """For shadow steps: looks at a step that is about to be launched."""
        if self._trial is not None and self._is_due():
            self._trial.before_launch(step)

    def after_launch(self, running: RunningStep | None) -> None:
        """The step that `before_launch` saw, with the tokens of the step before known.

        Raises what a candidate raised while it ran: the state it was given may be lost.
        """
        trial, job = self._trial, self.current
        if trial is not None and job is not None:
            self._guarded(job, lambda: trial.after_launch(running))

    def advance(self, step_number: int, wait_s: float) -> None:
        """Does the next piece of work, waiting for other processes up to `wait_s`.

        `wait_s` 0 says that there is traffic, which is then left most of the time. Raises what a
        candidate raised while it ran: the state it was given may be lost.
        """
        job = self.current
        if job is None or not job.active or (not wait_s and not self._is_due()):
            return
        started_s = time.monotonic()
        self._guarded(job, lambda: self._advance(job, step_number, wait_s))
        if not wait_s:
            now_s = time.monotonic()
            self._rests_until_s = now_s + (now_s - started_s) * (1 / self.policy.work_share - 1)
        job.seconds = time.monotonic() - job.started_s

    def swapped(self, rollback: bool) -> Installation | None:
        """The table has changed plans: returns the installation that brought the new one."""
        job = self.current
        if rollback or job is None or job.state is not InstallState.PENDING:
            return None
        job.state = InstallState.CURRENT
        return job

    def cancel(self, reason: str = "cancelled") -> None:
        """Forgets a plan that is not current yet."""
        if self.current is not None and self.current.active:
            self._refuse(self.current, reason)

    def give_way(self, reason: str) -> None:
        """Forgets a tuner's plan on its way, unless it is about to come into force."""
        job = self.current
        if job is None or job.origin.proposal_id is None or job.state is InstallState.PENDING:
            return
        self.cancel(reason)

    def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        self._compiler.close()
        self._first_runs.close()

    # -- stages ------------------------------------------------------------------------------

    def _advance(self, job: Installation, step_number: int, wait_s: float) -> None:
        match job.state:
            case InstallState.COMPILING:
                self._collect(job, wait_s)
            case InstallState.FIRST_RUN:
                self._collect_first_runs(job, wait_s)
            case InstallState.GATING:
                self._gate_next(job, step_number, wait_s)
            case InstallState.SHADOW | InstallState.CANARY:
                self._try_live(job, step_number)
            case InstallState.PENDING if self._table.pending is None:
                self._refuse(job, "the swap was called off")

    def _collect(self, job: Installation, wait_s: float) -> None:
        for answer in self._compiler.poll(wait_s):
            if answer.error is not None:
                self._refuse(job, f"{answer.request.key}: {answer.error}")
                return
            if answer.entry != self._source.cache.path(answer.request, self._source.mesh).name:
                self._refuse(job, CHANGED_SOURCE)
                return
            job.compiled += 1
        if job.compiled < len(job.keys):
            return
        if job.origin.way is Way.CANARY and not job.first_runs:
            for key in self._new_keys(job):
                if key.kind in RUNNABLE:
                    self._first_runs.submit(self._source.request(job.plan, key))
            self._enter(job, InstallState.FIRST_RUN)
        else:
            self._start_gating(job)

    def _collect_first_runs(self, job: Installation, wait_s: float) -> None:
        for answer in self._first_runs.poll(wait_s):
            if answer.error is not None:
                self._refuse(job, f"first run of {answer.request.key}: {answer.error}")
                return
            job.first_runs += 1
        if not self._first_runs.busy:
            self._start_gating(job)

    def _start_gating(self, job: Installation) -> None:
        self._enter(job, InstallState.GATING)
        self._to_gate = collections.deque(self._new_keys(job))
        # Fresh inputs for every installation: no candidate can be made for them.
        self._gate = EquivalenceGate(
            self._source.spec, self._state, self._table.current.programs, time.time_ns()
        )

    def _gate_next(self, job: Installation, step_number: int, wait_s: float) -> None:
        """The next piece of the work on one program: load it, compare it, warm it."""
        if self._judging is not None:
            program, pieces = self._judging
            try:
                next(pieces)
            except StopIteration as done:
                self._judging = None
                self._take_verdict(job, program, done.value)
        elif not self._to_gate:  # the last one was judged, or all are of the plan in force
            self._pass_gates(job, step_number)
        elif self._loading is None:
            request = self._source.request(job.plan, self._to_gate[0])
            self._loading = BackgroundTask("load", lambda progress: self._source.cached(request))
        elif self._loading.is_finished:
            loading, self._loading = self._loading, None
            loaded, key = loading.take_result(), self._to_gate.popleft()
            if loaded is None:
                self._compile_again(job, key)
            else:
                self._judging = (loaded, self._judge(loaded))
        else:
            time.sleep(min(wait_s, _LOAD_WAIT_S))

    def _judge(self, program: StepProgram) -> Pieces[Verdict]:
        assert self._gate is not None
        verdict = yield from self._gate.pieces(program)
        if verdict.passed:
            for _ in range(self._warm_calls):
                yield
                warm(program, self._state, 1)
        return verdict

    def _take_verdict(self, job: Installation, program: StepProgram, verdict: Verdict) -> None:
        job.verdicts.append(verdict)
        if verdict.passed:
            job.programs[program.key] = program
        else:
            self._note(job, "verdict", **verdict.to_json())
            self._refuse(job, verdict.reason)

    def _pass_gates(self, job: Installation, step_number: int) -> None:
        errors = [v.evidence.get("hidden_error", 0.0) for v in job.verdicts]
        facts = {"programs": len(job.verdicts), "worst_hidden_error": max(errors, default=0.0)}
        cost_s = sum(verdict.cost_s for verdict in job.verdicts)
        self._note(job, "verdict", **Verdict("equivalence", True, "", facts, cost_s).to_json())
        if job.origin.way is Way.IMMEDIATE:
            self._swap(job, step_number)
            return
        assert self._gate is not None
        candidate = PlanPrograms(job.plan, job.ladder, job.programs)
        self._trial = LiveTrial(
            *(self._state, self._table.current, candidate, self._gate, self.policy),
            one_at_a_time=self._source.one_at_a_time,
        )
        self._enter(job, InstallState.SHADOW)

    def _try_live(self, job: Installation, step_number: int) -> None:
        trial = self._trial
        assert trial is not None
        if job.state is InstallState.SHADOW:
            verdict, job.shadow = trial.collect(), trial.evidence()
        else:
            assert trial.canary is not None
            verdict, job.canary = trial.advance_canary(), trial.canary.evidence()
        if verdict is None:
            return
        self._note(job, "verdict", **verdict.to_json())
        if not verdict.passed:
            job.verdicts.append(verdict)
            self._refuse(job, f"{verdict.gate}: {verdict.reason}")
        elif job.state is InstallState.SHADOW:
            self._enter(job, InstallState.CANARY)
        else:
            self._swap(job, step_number)

    def _swap(self, job: Installation, step_number: int) -> None:
        self._trial = None
        self._table.install(PlanPrograms(job.plan, job.ladder, job.programs), step_number + 1)
        self._enter(job, InstallState.PENDING)

    # -- what goes wrong ---------------------------------------------------------------------

    def _compile_again(self, job: Installation, key: ProgramKey) -> None:
        """The cache had an entry that turned out to be damaged, once per program at most."""
        if key in job.recompiled:
            self._refuse(job, f"{key}: what the compiler process made cannot be loaded")
            return
        job.recompiled.add(key)
        job.compiled -= 1
        job.state = InstallState.COMPILING
        self._compiler.submit(self._source.request(job.plan, key))

    def _guarded(self, job: Installation, work: Callable[[], None]) -> None:
        """Whatever a candidate raises ends its way; what is no refusal is raised again."""
        try:
            work()
        except PolyjaxError as error:
            self._refuse(job, str(error))
        except Exception as error:
            self._refuse(job, f"{type(error).__name__}: {error}")
            raise

    def _refuse(self, job: Installation, reason: str) -> None:
        stage = job.state
        job.state, job.reason = InstallState.REFUSED, reason
        job.programs.clear()
        self._judging = self._trial = None
        self._loading = None  # its thread ends by itself; nobody waits for it here
        self._compiler.cancel()
        self._first_runs.cancel()
        self._note(job, "promotion_refused", stage=stage.value, reason=reason)

    # -- small things ------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return time.monotonic() >= self._rests_until_s

    def _enter(self, job: Installation, state: InstallState) -> None:
        job.state = state
        self._note(job, "promotion_stage", stage=state.value)

    def _note(self, job: Installation, kind: str, **facts: Any) -> None:
        cost_s = round(time.monotonic() - job.started_s, 3)
        self._record(kind, plan=job.plan.digest, **job.origin.to_json(), after_s=cost_s, **facts)

    def _new_keys(self, job: Installation) -> list[ProgramKey]:
        return [key for key in job.keys if key not in job.programs]

    def _missing(self, job: Installation) -> int:
        return len(job.keys) - job.compiled
