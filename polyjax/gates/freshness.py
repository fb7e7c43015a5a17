"""The freshness gate: results follow every argument, one at a time.

A candidate that remembers its last result, keys a cache on part of its inputs, folds an argument
into a constant or skips work when "nothing changed" is right on the first call only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from polyjax.gates.candidate import GateFailure, called, on_device, same_bits
from polyjax.gates.inputs import Case, argument_names, make_case, rng_of
from polyjax.gates.op_bounds import truth
from polyjax.gates.trial import OpTrial, judge, judge_results

GATE = "freshness"
# Arguments that describe who owns the pool: they only change together.
_OWNERSHIP = ("page_table", "context_lens", "query_lens", "first_pages", "slots")


def check(trial: OpTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    base = trial.cases(trial.candidate.workload)[0]
    base = _random_values(base, trial.seed, 0)
    other = _random_values(base, trial.seed, 1)
    before = called(trial.own, on_device(base.args))
    judge_results(base, before, truth(base))
    changed = []
    for name in argument_names(base.op):
        if base.named[name] is None or name in _OWNERSHIP:
            continue
        mixed = base.replaced(**{name: other.named[name]})
        judge(dataclasses.replace(mixed, name=f"only {name} changed"), trial.own)
        changed.append(name)
    after = called(trial.own, on_device(base.args))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if not same_bits(a, b).all():
            raise GateFailure("the first inputs again give another result than at first")
    return {"arguments": changed}


def _random_values(base: Case, seed: int, variant: int) -> Case:
    """The same rows and pages with other values in every argument."""
    rng = rng_of(base.workload, seed + 1000 * (variant + 1))
    return make_case(base.op, base.workload, rng, "random", "same rows", rows=base.rows)
