"""The race gate: Mosaic GPU kernels run in the interpreter with its happens-before race detector.

The detector knows the block's threads, the copy engine and barriers. Races between blocks of a grid
are out of its sight; on a device they are the repeatability gate's business.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from polyjax.gates.candidate import GateFailure, called, interpreting, on_device
from polyjax.gates.inputs import Case
from polyjax.gates.trial import OpTrial, known_cases

GATE = "races"


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence; a candidate that is not interpreted passes unseen. Raises GateFailure."""
    candidate = trial.candidate
    if not candidate.interpreted:
        return {"interpreted": False}
    built = candidate.build(candidate.workload)
    assert built is not None
    # Idle rows all write to the sink slot, and whoever comes last is right: rows without idle ones.
    case = next(c for c in known_cases(candidate.workload, trial.seed, None) if _all_live(c))

    def watched(*args: Any) -> Any:
        with interpreting(detect_races=True):
            return built(*args)

    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every pair of accesses
            called(jax.jit(watched), on_device(case.args))
        found = gpu_callbacks.get_races().races_found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if found:
        raise GateFailure("the interpreter's race detector found a race")
    return {"interpreted": True}


def _all_live(case: Case) -> bool:
    return case.rows is None or bool((case.rows.query_lens > 0).all())
