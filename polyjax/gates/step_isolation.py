"""Step programs on hostile pages: the KV isolation gate and the whole-step check on its batches.

Every page layout on a pool of distinct numbers, thrice: unowned slots empty, NaN and large. The
mapped slots change and no others, answers are bit-identical on all three, weights keep their bits,
each slot's last token is its own. A NaN that a row does own must come out, in that row only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyjax.gates.candidate import GateFailure, same_bits
from polyjax.gates.paged_rows import LAYOUTS
from polyjax.gates.step_trial import StepResult, StepTrial
from polyjax.gates.step_twin import Batch, random_batch

GATE = "step_isolation"


def check(trial: StepTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    rng, worst = trial.rng(1), 0.0
    for layout in LAYOUTS:
        batch = random_batch(trial.state.spec, trial.key.bucket, rng, layout)
        before = trial.state.with_unowned(batch.rows.earlier(), 0.0)
        wanted = trial.run_fresh(trial.incumbent, batch, before)
        clean = trial.run_fresh(trial.candidate, batch, before)
        worst = max(worst, trial.compare(clean, wanted, batch, before, layout))
        for what, value in (("NaN", np.nan), ("large numbers", -3e4)):
            poisoned = trial.state.with_unowned(batch.rows.earlier(), value)
            found = trial.run_fresh(trial.candidate, batch, poisoned)
            _same(clean, found, batch, f"{layout}, {what} in slots that nobody owns")
        _own_nan_shows(trial, batch, rng, layout)
    return {"layouts": list(LAYOUTS), "worst_error_over_bound": worst}


def _same(clean: StepResult, found: StepResult, batch: Batch, what: str) -> None:
    live = batch.live
    if not same_bits(clean.hidden[live], found.hidden[live]).all():
        raise GateFailure(f"{what}: the hidden state changes")
    pair = clean.tokens, found.tokens
    if pair[0] is not None and pair[1] is not None and (pair[0] != pair[1])[live].any():
        raise GateFailure(f"{what}: tokens change")
    owned = batch.rows.owned
    for a, b in zip(clean.kv, found.kv, strict=True):
        if not same_bits(np.moveaxis(a, 3, 1)[owned], np.moveaxis(b, 3, 1)[owned]).all():
            raise GateFailure(f"{what}: what is written changes")


def _own_nan_shows(trial: StepTrial, batch: Batch, rng: np.random.Generator, layout: str) -> None:
    """One owned key becomes NaN: exactly the rows that see it answer NaN, as the incumbent does."""
    owned = np.argwhere(batch.rows.earlier())
    if not len(owned):
        return
    page, offset = owned[rng.integers(len(owned))]
    before = trial.state.with_unowned(batch.rows.earlier(), 0.0)
    first = before.kv[0].copy()
    first[page, :, :, offset] = np.nan
    before = dataclasses.replace(before, kv=(first, *before.kv[1:]))
    wanted = trial.run_fresh(trial.incumbent, batch, before)
    found = trial.run_fresh(trial.candidate, batch, before)
    trial.compare(found, wanted, batch, before, f"{layout}, NaN in a row's own cache")
