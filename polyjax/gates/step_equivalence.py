"""The engine's whole-program equivalence gate as one of the step gates, on a twin's state."""

from __future__ import annotations

from typing import Any

from polyjax.gates.candidate import GateFailure
from polyjax.gates.equivalence import EquivalenceGate
from polyjax.gates.step_trial import StepTrial

GATE = "step_equivalence"


def check(trial: StepTrial) -> dict[str, Any]:
    """Evidence of the gate. Raises GateFailure with its reason."""
    state = trial.state.on_device()
    gate = EquivalenceGate(trial.state.spec, state, trial.programs, trial.seed)
    verdict = gate.check(trial.candidate)
    if not verdict.passed:
        raise GateFailure(verdict.reason)
    return verdict.evidence
