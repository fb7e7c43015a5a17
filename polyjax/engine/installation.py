"""One plan on its way into a running engine: which stage it is in and what was found so far."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import Any

from polyjax.compiler.program import ProgramKey, StepProgram
from polyjax.core.buckets import BucketLadder
from polyjax.core.plan import Plan
from polyjax.engine.promotion import Origin
from polyjax.engine.watch import Watch
from polyjax.gates.verdict import Verdict


class InstallState(enum.StrEnum):
    COMPILING = "compiling"
    FIRST_RUN = "first_run"  # each program runs once in a process that can be killed
    GATING = "gating"
    SHADOW = "shadow"
    CANARY = "canary"
    PENDING = "pending"  # swaps before the next step
    CURRENT = "current"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"


_ENDED = (InstallState.CURRENT, InstallState.REFUSED, InstallState.ROLLED_BACK)


@dataclasses.dataclass
class Installation:
    """One plan on its way in. `reason` says why it was refused or rolled back."""

    plan: Plan
    ladder: BucketLadder
    keys: tuple[ProgramKey, ...]
    origin: Origin = dataclasses.field(default_factory=Origin)
    state: InstallState = InstallState.COMPILING
    reason: str = ""
    compiled: int = 0
    programs: dict[ProgramKey, StepProgram] = dataclasses.field(default_factory=dict)
    recompiled: set[ProgramKey] = dataclasses.field(default_factory=set)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    first_runs: int = 0
    shadow: dict[str, Any] = dataclasses.field(default_factory=dict)
    canary: dict[str, Any] = dataclasses.field(default_factory=dict)
    watch: Watch | None = None
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.state not in _ENDED

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.plan.digest,
            "state": self.state.value,
            "reason": self.reason,
            **self.origin.to_json(),
            "programs": len(self.keys),
            "compiled": self.compiled,
            "first_runs": self.first_runs,
            "gated": len(self.verdicts),
            "shadow": self.shadow,
            "canary": self.canary,
            "watch": self.watch.to_json() if self.watch else None,
            "seconds": round(self.seconds, 3),
            "failed_verdict": next((v.to_json() for v in self.verdicts if not v.passed), None),
        }
