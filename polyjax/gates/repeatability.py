"""The repeatability gate: the same inputs give the same bits, whatever ran before or lies nearby.

Calls are repeated on fresh copies at other addresses, with calls on other inputs in between. On a
device this is also where a race shows that the interpreter cannot see: repeats run while other work
keeps part of the chip busy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyjax.gates.candidate import (
    GateFailure,
    called,
    called_on_device,
    on_device,
    on_host,
    same_bits,
)
from polyjax.gates.trial import OpTrial

GATE = "repeatability"
REPEATS = 4


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    cases = trial.cases(trial.candidate.workload)
    first, other = cases[0], cases[-1]
    args, elsewhere = on_device(first.args), on_device(other.args)
    wanted = jax.tree.leaves(called(trial.own, args))
    for repeat in range(1, 2 if trial.candidate.interpreted else REPEATS):
        called_on_device(trial.own, elsewhere)
        again = on_device(first.args) if repeat % 2 else args
        load = _background_load(repeat)
        found = jax.tree.leaves(on_host(called_on_device(trial.own, again)))
        jax.block_until_ready(load)
        for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
            differs = ~same_bits(a, b)
            if differs.any():
                raise GateFailure(
                    f"{first.name}: output {index} differs between calls with equal inputs in "
                    f"{int(differs.sum())} of {differs.size} elements (repeat {repeat})"
                )
    return {"repeats": REPEATS}


def _background_load(size: int) -> jax.Array:
    """Asynchronous work of another size each time, to vary what shares the device."""
    side = 64 * size
    return _busy(jnp.asarray(np.full((side, side), 1.0 / side, np.float32)))


@jax.jit
def _busy(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 4, lambda _, y: y @ x, x)
