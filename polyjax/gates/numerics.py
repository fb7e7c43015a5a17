"""Assigns a numerics class by evidence: does a row's result depend on batch size or neighbours?

`batch_invariant`: a row has the same bits alone, among other rows and in another place of the
batch. `bounded`: only the equivalence bound holds. The class is what was seen on these inputs; a
row-parallel kernel keeps it by construction, an XLA matmul on a CPU does not have it.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from polyjax.gates.candidate import called, on_device, same_bits
from polyjax.gates.inputs import Case
from polyjax.gates.trial import OpTrial

GATE = "numerics"
_ROW_ARGUMENTS = ("x", "q", "residual", "tokens", "cos_sin", "gate_up", "temperature", "seeds",
                  "positions", "ids", "weights", "page_table", "context_lens", "query_lens",
                  "first_pages")  # fmt: skip
_PER_ROW = ("embed", "rms_norm", "rope", "gated_activation", "matmul", "norm_gate_up", "lm_head",
            "lm_head_sample", "paged_attention", "latent_attention", "route", "experts",
            "head_matmul")  # fmt: skip


def check(trial: OpTrial) -> dict[str, Any]:
    """Evidence with the class; never fails."""
    op, workload = trial.candidate.op, trial.candidate.workload
    if op.name not in _PER_ROW:
        return {"class": "bounded", "why": f"{op.name} has no row of its own"}
    case = trial.cases(workload)[0]
    rows = len(case.live)
    whole = called(trial.own, on_device(case.args))
    turned = np.roll(np.arange(rows), 1)
    moved = called(trial.own, on_device(_with_rows(case, turned).args))
    if not _equal_rows(whole, moved, turned):
        return {"class": "bounded", "why": "a row's bits depend on its place"}
    axis = "B" if workload.get("B") else "M"
    alone = trial.function(workload.resized(**{axis: 1}))
    if alone is None:
        return {"class": "bounded", "why": "does not support a batch of one"}
    for row in range(min(rows, 3)):
        single = called(alone, on_device(_with_rows(case, np.array([row])).args))
        if not _equal_rows(whole, single, np.array([row])):
            return {"class": "bounded", "why": "a row's bits depend on the batch size"}
    return {"class": "batch_invariant", "rows": rows}


def _with_rows(case: Case, rows: np.ndarray) -> Case:
    """The case with only these rows, in this order."""
    count = len(case.live)
    # A weight may share the name of a row argument (gate_up).
    chosen = {
        name: array[rows]
        for name, array in case.named.items()
        if name in _ROW_ARGUMENTS
        and array is not None
        and len(array) == count
        and not (name == "gate_up" and case.op.name != "gated_activation")
    }
    return case.replaced(**chosen)


def _equal_rows(whole: Any, part: Any, rows: np.ndarray) -> bool:
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
    return all(same_bits(a[rows], b).all() for a, b in pairs)
