"""The presence gate: the kernels a plan names are in the executable that will be measured.

`used` is what a program says of itself; the compiled text is what it is. Every op a plan gave to a
kernel carries the kernel's name as a scope through compilation.
"""

from __future__ import annotations

from typing import Any

from polyjax.gates.candidate import GateFailure
from polyjax.gates.step_trial import StepTrial

GATE = "step_presence"


def check(trial: StepTrial) -> dict[str, Any]:
    """Evidence: which kernels were found. Raises GateFailure naming the missing ones."""
    program = trial.candidate
    claimed = sorted({kernel for _, kernel in program.used if kernel != "reference"})
    if program.key != trial.key:
        raise GateFailure(f"is {program.key}, not {trial.key}")
    if program.abi != trial.incumbent.abi:
        raise GateFailure("takes another state than the program in force")
    text = getattr(program.executable, "as_text", None)
    if text is None:  # not an executable but a function around one: only behaviour tells
        return {"kernels": claimed, "text": False}
    compiled = text()
    absent = [kernel for kernel in claimed if kernel not in compiled]
    if absent:
        raise GateFailure(f"{', '.join(absent)} is not in the compiled program")
    return {"kernels": claimed, "text": True}
