"""The gates, cheap first. Adding one is a file with `GATE` and `check`, and a line here."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polyjax.gates import (
    declaration,
    environment,
    freshness,
    kv_isolation,
    numerics,
    op_equivalence,
    races,
    repeatability,
    step_equivalence,
    step_history,
    step_isolation,
    step_presence,
)
from polyjax.gates.candidate import GateFailure
from polyjax.gates.step_trial import StepTrial
from polyjax.gates.trial import OpTrial
from polyjax.gates.verdict import Verdict

OpCheck = Callable[[OpTrial], dict[str, Any]]
StepCheck = Callable[[StepTrial], dict[str, Any]]

OP_GATES: dict[str, OpCheck] = {
    declaration.GATE: declaration.check,
    op_equivalence.GATE: op_equivalence.check,
    repeatability.GATE: repeatability.check,
    freshness.GATE: freshness.check,
    kv_isolation.GATE: kv_isolation.check,
    races.GATE: races.check,
    environment.GATE: environment.check,
}
"""What a candidate must pass before it is timed. `environment` sees what all others provoked."""

STEP_GATES: dict[str, StepCheck] = {
    step_presence.GATE: step_presence.check,
    step_equivalence.GATE: step_equivalence.check,
    step_isolation.GATE: step_isolation.check,
    step_history.GATE: step_history.check,
    environment.GATE: environment.check,
}
"""What a step program must pass on the twin before it is warmed on the live pool."""

CLASSES: dict[str, OpCheck] = {numerics.GATE: numerics.check}
"""What finds out a property of a candidate that passed, and rejects nothing."""

_clock = time.perf_counter  # read before any candidate could replace it


def verdict(gate: str, check: Callable[[], dict[str, Any]]) -> Verdict:
    """Runs one check. A GateFailure is the candidate's; any other exception is ours."""
    started = _clock()
    try:
        return Verdict(gate, True, evidence=check(), cost_s=_clock() - started)
    except GateFailure as failure:
        return Verdict(gate, False, str(failure), cost_s=_clock() - started)


def judge_op(trial: OpTrial, stop_at_failure: bool = True) -> list[Verdict]:
    """Verdicts of the op-level gates in order; the first failure ends it unless told otherwise."""
    checks = [(name, functools.partial(check, trial)) for name, check in OP_GATES.items()]
    return run(checks, stop_at_failure)


def judge_step(trial: StepTrial, stop_at_failure: bool = True) -> list[Verdict]:
    """Verdicts of the step-level gates in order."""
    checks = [(name, functools.partial(check, trial)) for name, check in STEP_GATES.items()]
    return run(checks, stop_at_failure)


def run(
    checks: Iterable[tuple[str, Callable[[], dict[str, Any]]]], stop_at_failure: bool = True
) -> list[Verdict]:
    """Verdicts of named checks in order. Tampering found at the end is undone in any case."""
    verdicts: list[Verdict] = []
    for name, check in checks:
        failed = any(not v.passed for v in verdicts)
        if failed and stop_at_failure and name != environment.GATE:
            continue
        verdicts.append(verdict(name, check))
    return verdicts


def passed(verdicts: Sequence[Verdict]) -> bool:
    return all(v.passed for v in verdicts)
