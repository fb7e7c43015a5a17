"""The declaration gate: what can be said of a candidate without running it.

Results have the reference's shapes and dtypes; a catalogue kernel's schedule is legal and its write
map covers every output element exactly once; what claims to be a Pallas kernel is one, and its
result reaches the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr

from polyjax.core.errors import ScheduleError
from polyjax.core.op import REFERENCE
from polyjax.gates.candidate import GateFailure, first_line
from polyjax.gates.trial import OpTrial

GATE = "declaration"
PALLAS_PRIMITIVES = ("pallas_call", "core_map", "mpmd_map")  # the last is `plgpu.kernel`


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    candidate = trial.candidate
    case = trial.cases(candidate.workload)[0]
    kernel, schedule = candidate.kernel, candidate.schedule
    evidence: dict[str, Any] = {}
    if kernel is not None and schedule is not None:
        evidence["write_blocks"] = sum(1 for _ in kernel.writes(candidate.workload, schedule))
    static, function = case.static, candidate.traceable(candidate.workload)
    if function is None:
        raise GateFailure("does not support the workload it is proposed for")
    wanted = jax.eval_shape(lambda *args: REFERENCE(case.op, *args, **static), *case.args)
    try:
        closed = jax.make_jaxpr(function)(*case.args)
        found = jax.eval_shape(function, *case.args)
    except ScheduleError as error:
        raise GateFailure(f"illegal: {error}") from error
    except Exception as error:
        raise GateFailure(f"tracing raised {first_line(error)}") from error
    if (ours := _shapes(found)) != (theirs := _shapes(wanted)):
        raise GateFailure(f"returns {ours} instead of {theirs}")
    if candidate.pallas:
        names = {name for name in contributing(closed.jaxpr) if name in PALLAS_PRIMITIVES}
        if not names:
            raise GateFailure("no Pallas kernel contributes to its results")
        evidence["kernels"] = sorted(names)
    return evidence


def _shapes(results: Any) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(results)]


def contributing(jaxpr: Jaxpr) -> Iterator[str]:
    """Names of the primitives that the outputs depend on, inner jaxprs included.

    jax's own dead code elimination keeps a pallas_call whose result is not used inside a jit. What
    writes to a reference counts: kernels that update a pool in place have no other output.
    """
    needed = {id(v) for v in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        writes = any(type(effect).__name__ == "WriteEffect" for effect in eqn.effects)
        if not writes and not any(id(v) in needed for v in eqn.outvars):
            continue
        needed |= {id(v) for v in eqn.invars}
        yield eqn.primitive.name
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                inner: Any = getattr(value, "jaxpr", value)
                yield from contributing(inner)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
