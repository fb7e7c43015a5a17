"""How a new plan reaches a running engine: compiled elsewhere, loaded, gated, then swapped in.

`advance` is called once a step and does a bounded piece of work: it looks for an answer of the
compiler process, or loads and gates one program. Nothing the engine serves waits for more.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
from typing import Any

from polyjax.compiler.program import ProgramKey, StepProgram
from polyjax.compiler.worker import CompilerProcess
from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import PolyjaxError, RequestError, StateABIError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.engine.build import ProgramSource
from polyjax.engine.programs import PlanPrograms, ProgramTable, unaffected
from polyjax.engine.state import DeviceState
from polyjax.engine.warm import warm
from polyjax.gates.equivalence import EquivalenceGate
from polyjax.gates.verdict import Verdict

CHANGED_SOURCE = (
    "the compiler process does not run the same source, flags or libraries as this engine: "
    "polyjax was changed on disk since the engine started; restart it"
)


class InstallState(enum.StrEnum):
    COMPILING = "compiling"
    GATING = "gating"
    PENDING = "pending"  # swaps before the next step
    CURRENT = "current"
    REFUSED = "refused"


@dataclasses.dataclass
class Installation:
    """One plan on its way in. `reason` says why it was refused."""

    plan: Plan
    ladder: BucketLadder
    keys: tuple[ProgramKey, ...]
    state: InstallState = InstallState.COMPILING
    reason: str = ""
    compiled: int = 0
    programs: dict[ProgramKey, StepProgram] = dataclasses.field(default_factory=dict)
    recompiled: set[ProgramKey] = dataclasses.field(default_factory=set)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.state in (InstallState.COMPILING, InstallState.GATING, InstallState.PENDING)

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.plan.digest,
            "state": self.state.value,
            "reason": self.reason,
            "programs": len(self.keys),
            "compiled": self.compiled,
            "gated": len(self.verdicts),
            "seconds": round(self.seconds, 3),
            "failed_verdict": next((v.to_json() for v in self.verdicts if not v.passed), None),
        }


class Installer:
    """Takes one plan at a time from its description to the program table."""

    def __init__(
        self,
        source: ProgramSource,
        state: DeviceState,
        table: ProgramTable,
        compiler: CompilerProcess,
        warm_calls: int,
    ):
        self._source = source
        self._state = state
        self._table = table
        self._compiler = compiler
        self._warm_calls = warm_calls
        self._gate: EquivalenceGate | None = None
        self._to_gate: collections.deque[ProgramKey] = collections.deque()
        self.current: Installation | None = None

    @property
    def active(self) -> bool:
        return self.current is not None and self.current.active

    def start(self, plan: Plan, mesh_plan: MeshPlan, ladder: BucketLadder) -> Installation:
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
        job = Installation(plan, ladder, self._source.keys(ladder))
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
        return job

    def advance(self, step_number: int, wait_s: float) -> None:
        """Does the next piece of work, waiting for the compiler process up to `wait_s`.

        Raises what a candidate raised while it ran: the state it was given may be lost.
        """
        job = self.current
        if job is None or not job.active:
            return
        try:
            if job.state is InstallState.COMPILING:
                self._collect(job, wait_s)
            elif job.state is InstallState.GATING:
                self._gate_next(job, step_number)
            elif self._table.pending is None:
                job.state = InstallState.CURRENT
        except PolyjaxError as error:
            self._refuse(job, str(error))
        except Exception as error:
            self._refuse(job, f"{type(error).__name__}: {error}")
            raise
        job.seconds = time.monotonic() - job.started_s

    def cancel(self) -> None:
        """Forgets a plan that is not current yet."""
        if self.current is not None and self.current.active:
            self._refuse(self.current, "cancelled")

    def close(self) -> None:
        self._compiler.close()

    def _collect(self, job: Installation, wait_s: float) -> None:
        for answer in self._compiler.poll(wait_s):
            if answer.error is not None:
                self._refuse(job, f"{answer.request.key}: {answer.error}")
                return
            if answer.entry != self._source.cache.path(answer.request, self._source.mesh).name:
                self._refuse(job, CHANGED_SOURCE)
                return
            job.compiled += 1
        if job.compiled == len(job.keys):
            job.state = InstallState.GATING
            self._to_gate = collections.deque(key for key in job.keys if key not in job.programs)
            # Fresh inputs for every installation: no candidate can be made for them.
            self._gate = EquivalenceGate(
                self._source.spec, self._state, self._table.current.programs, time.time_ns()
            )

    def _gate_next(self, job: Installation, step_number: int) -> None:
        """Loads one program, compares it with the one in force, which also warms it."""
        assert self._gate is not None
        if not self._to_gate:  # every program is one of the plan in force
            self._swap(job, step_number)
            return
        key = self._to_gate.popleft()
        program = self._source.cached(self._source.request(job.plan, key))
        if program is None:
            self._compile_again(job, key)
            return
        verdict = self._gate.check(program)
        job.verdicts.append(verdict)
        if not verdict.passed:
            self._refuse(job, verdict.reason)
            return
        warm(program, self._state, self._warm_calls)
        job.programs[key] = program
        if not self._to_gate:
            self._swap(job, step_number)

    def _swap(self, job: Installation, step_number: int) -> None:
        self._table.install(PlanPrograms(job.plan, job.ladder, job.programs), step_number + 1)
        job.state = InstallState.PENDING

    def _compile_again(self, job: Installation, key: ProgramKey) -> None:
        """The cache had an entry that turned out to be damaged, once per program at most."""
        if key in job.recompiled:
            self._refuse(job, f"{key}: what the compiler process made cannot be loaded")
            return
        job.recompiled.add(key)
        job.compiled -= 1
        job.state = InstallState.COMPILING
        self._compiler.submit(self._source.request(job.plan, key))

    def _refuse(self, job: Installation, reason: str) -> None:
        job.state, job.reason = InstallState.REFUSED, reason
        job.programs.clear()
        self._compiler.cancel()
