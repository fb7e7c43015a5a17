"""The KV isolation gate: no request's cache shows up in another's answer.

The pool is full of distinct numbers, the slots that nobody owns hold NaN, and page tables are
hostile: shared prefixes, lengths at a page's edge, the last slot, a full pool, reused pages.
Exactly the mapped slots change, results are bit-identical to those on a clean pool, arguments keep
their bits, and a donated pool comes back in its own memory.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from polyjax.gates.candidate import (
    GateFailure,
    called_on_device,
    first_line,
    on_device,
    on_host,
    quick_compile,
    same_bits,
)
from polyjax.gates.inputs import Case, argument_names, make_case, rng_of, spare_pages
from polyjax.gates.op_bounds import truth
from polyjax.gates.paged_rows import LAYOUTS
from polyjax.gates.trial import OpTrial, judge_results

GATE = "kv_isolation"


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence; of ops without a pool only arguments are checked. Raises GateFailure."""
    workload = trial.candidate.workload
    if "kv" not in argument_names(trial.candidate.op):
        _untouched_call(trial, trial.cases(workload)[0])
        return {"layouts": []}
    rng = rng_of(workload, trial.seed + 31)
    layouts = LAYOUTS[:2] if trial.candidate.interpreted else LAYOUTS
    spare = spare_pages(trial.seed)  # as in the other cases: what is compiled serves again
    for layout in layouts:
        case = make_case(trial.candidate.op, workload, rng, "random", layout, spare)
        emptied = _with_unowned(case, 0.0)
        clean = _untouched_call(trial, emptied)
        judge_results(emptied, clean, truth(emptied))
        for what, value in (("NaN", np.nan), ("large numbers", -3e4)):
            poisoned = _with_unowned(case, value)
            found = _untouched_call(trial, poisoned)
            _same_answers(case, clean, found, what)
        judge_results(poisoned, found, truth(poisoned))  # the large numbers are still there
    _donated(trial, case)
    return {"layouts": list(layouts), "pool_pages": case.rows.num_pages}  # type: ignore[union-attr]


def _with_unowned(case: Case, value: float) -> Case:
    """The case with `value` in every slot that no row owns before the call."""
    rows = case.rows
    assert rows is not None
    reads_new = "query_lens" in argument_names(case.op)
    owned = (rows.owned if reads_new else rows.earlier())[:, None, None, :, None]
    pool = lambda a: np.where(owned, a, np.asarray(value, a.dtype))  # noqa: E731
    kv = case.named["kv"]
    return case.replaced(kv=tuple(map(pool, kv)) if isinstance(kv, tuple) else pool(kv))


def _untouched_call(trial: OpTrial, case: Case) -> Any:
    """Host results; raises GateFailure if an argument's bits changed or it was consumed."""
    args = on_device(case.args)
    results = on_host(called_on_device(trial.own, args))
    for name, before, after in zip(argument_names(case.op), case.args, args, strict=True):
        for host, device in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if device.is_deleted():
                raise GateFailure(f"{case.name}: {name} was consumed though it was not donated")
            if not same_bits(host, np.asarray(device)).all():
                raise GateFailure(f"{case.name}: argument {name} was modified")
    return results


def _same_answers(case: Case, clean: Any, found: Any, what: str) -> None:
    """Results other than pools are equal bit for bit, and so are the slots that rows own."""
    assert case.rows is not None
    live = case.live
    for index, (a, b) in enumerate(
        zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True)
    ):
        if a.ndim == 5 and a.shape[0] == case.rows.num_pages:
            owned = case.rows.owned
            a, b = (np.moveaxis(pool, 3, 1)[owned] for pool in (a, b))
        elif len(a) == len(live):
            a, b = a[live], b[live]
        differs = ~same_bits(a, b)
        if differs.any():
            raise GateFailure(
                f"{case.name}: output {index} depends on slots that nobody owns: with {what} in "
                f"them {int(differs.sum())} of {differs.size} elements change"
            )


def _donated(trial: OpTrial, case: Case) -> None:
    """A donated pool that comes back must come back in the same memory, with the same result."""
    names = argument_names(case.op)
    if "query_lens" in names or trial.candidate.interpreted:  # attention returns no pool
        return
    where = names.index("kv")
    built = trial.candidate.traceable(trial.candidate.workload)
    assert built is not None
    plain = jax.tree.leaves(_untouched_call(trial, case))
    args = on_device(case.args)
    pointers = {pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(args[where])}
    try:
        donating = jax.jit(built, donate_argnums=where, compiler_options=quick_compile())
        results = jax.block_until_ready(donating(*args))
    except Exception as error:
        raise GateFailure(f"with a donated pool: {first_line(error)}") from error
    leaves = jax.tree.leaves(results)
    for a, b in zip(plain, leaves, strict=True):
        if not same_bits(a, np.asarray(b)).all():
            raise GateFailure("with a donated pool the result differs")
    returned = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    if not pointers <= returned:
        raise GateFailure("a donated pool does not come back in its own memory")
