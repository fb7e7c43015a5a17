"""What ran before must not matter: repeatability, freshness and a long run of step programs.

The same inputs give the same bits whatever came between; results follow each input on its own,
weights included; and over a long run of steps, each fed by the last, nothing drifts away from the
program in force.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyjax.core.batch_layout import FROM_SLOT, BatchLayout
from polyjax.gates.candidate import GateFailure, same_bits
from polyjax.gates.step_trial import StepResult, StepTrial
from polyjax.gates.step_twin import Batch, HostState, random_batch, random_state

GATE = "step_history"
STEPS = 40  # longer than any warm-up or counter a broken program is likely to hide behind


def check(trial: StepTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure."""
    rng = trial.rng(2)
    bucket, spec = trial.key.bucket, trial.state.spec
    batch = random_batch(spec, bucket, rng, "random_lengths")
    first = trial.run_fresh(trial.candidate, batch)
    for name, other_batch, other_state in _changes(trial, batch, rng):
        wanted = trial.run_fresh(trial.incumbent, other_batch, other_state)
        found = trial.run_fresh(trial.candidate, other_batch, other_state)
        trial.compare(found, wanted, other_batch, other_state, f"other {name}")
        _same_bits(first, trial.run_fresh(trial.candidate, batch), f"repeated after other {name}")
    return {"steps": STEPS, "worst_error_over_bound": _long_run(trial, rng)}


def _changes(
    trial: StepTrial, batch: Batch, rng: np.random.Generator
) -> list[tuple[str, Batch, HostState]]:
    """One input changed at a time: weights, cache, tokens, the slots' last tokens."""
    state, spec = trial.state, trial.state.spec
    other = random_state(spec, rng)
    layout = BatchLayout(trial.key.bucket, 1)
    tokens, slots = batch.flat.copy(), batch.flat.copy()
    layout.split(tokens).tokens[:] = rng.integers(0, spec.config.vocab_size, layout.shapes.tokens)
    if trial.decodes:
        layout.split(tokens).flags[batch.live] &= ~FROM_SLOT
        layout.split(slots).flags[batch.live] |= FROM_SLOT
    changes = [
        ("weights", batch, dataclasses.replace(state, params=other.params)),
        ("cache", batch, dataclasses.replace(state, kv=other.kv)),
        ("tokens", dataclasses.replace(batch, flat=tokens), state),
    ]
    if trial.decodes:
        last = dataclasses.replace(state, last_tokens=other.last_tokens)
        changes.append(("last tokens", dataclasses.replace(batch, flat=slots), last))
    return changes


def _same_bits(a: StepResult, b: StepResult, what: str) -> None:
    pairs = [(a.hidden, b.hidden), *zip(a.kv, b.kv, strict=True)]
    if a.tokens is not None and b.tokens is not None:
        pairs.append((a.tokens, b.tokens))
    for x, y in pairs:
        if not same_bits(x, y).all():
            raise GateFailure(f"{what}: equal inputs give other bits")


def _long_run(trial: StepTrial, rng: np.random.Generator) -> float:
    """Random batches on one state that both programs advance in step."""
    bucket, spec, worst = trial.key.bucket, trial.state.spec, 0.0
    state = trial.state
    device = state.on_device()
    for step in range(STEPS):
        batch = random_batch(spec, bucket, rng, "inactive_rows" if step % 3 else "page_edges")
        wanted = trial.run_fresh(trial.incumbent, batch, state)
        found = trial.run(trial.candidate, device, batch)
        worst = max(worst, trial.compare(found, wanted, batch, state, f"step {step}"))
        state = dataclasses.replace(state, kv=found.kv, last_tokens=found.last_tokens)
    return worst
