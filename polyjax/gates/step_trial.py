"""One candidate step program under one seed: runs it beside the program in force on twin states."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from polyjax.compiler.program import DECODES, ProgramKey, StepProgram
from polyjax.compiler.state import head_indices
from polyjax.core.batch_layout import BatchLayout
from polyjax.gates.candidate import GateFailure, first_line, same_bits
from polyjax.gates.equivalence import forward_bound, head_bound
from polyjax.gates.settings import Settings
from polyjax.gates.step_twin import Batch, HostState, TwinState


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Host copies of what a forward program returned; `tokens` None for a prefill."""

    hidden: np.ndarray
    tokens: np.ndarray | None
    kv: tuple[np.ndarray, ...]
    last_tokens: np.ndarray


class StepTrial:
    """A forward program (prefill or decode) proposed for `key`, judged against those in force."""

    def __init__(
        self,
        candidate: StepProgram,
        key: ProgramKey,
        programs: dict[ProgramKey, StepProgram],
        state: HostState,
        seed: int,
    ):
        self.candidate = candidate
        self.programs = programs
        self.incumbent = programs[key]
        self.key = key
        self.state = state
        self.seed = seed
        self.settings = Settings.now()
        self.decodes = key.kind in DECODES
        self._layout = BatchLayout(key.bucket, 1)

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])

    def run(self, program: StepProgram, state: TwinState, batch: Batch) -> StepResult:
        """Runs a program; the state gets the arrays it handed back. Raises GateFailure."""
        donated = jax.tree.leaves((state.kv, state.last_tokens if self.decodes else ()))
        pointers = {array.unsafe_buffer_pointer() for array in donated}
        kept = {id(a): a for a in (*state.params, *(() if self.decodes else (state.last_tokens,)))}
        try:
            results = program(state.params, state.kv, state.last_tokens, batch.flat)
            _require_device_arrays(results)
            jax.block_until_ready(results)
        except GateFailure:
            raise
        except Exception as error:
            raise GateFailure(f"raised {first_line(error)}") from error
        if any(array.is_deleted() for array in kept.values()):
            raise GateFailure("consumed an array of the state that is not donated")
        if self.decodes:
            state.kv, state.last_tokens, tokens, hidden, following = results
            if not np.array_equal(following, self._layout.one_token_further(batch.flat)):
                raise GateFailure("the packed array of the next step is not one token further")
        else:
            (state.kv, hidden, _), tokens = results, None
        if program is self.candidate:
            returned = jax.tree.leaves((state.kv, state.last_tokens if self.decodes else ()))
            if pointers != {array.unsafe_buffer_pointer() for array in returned}:
                raise GateFailure("donated state does not come back in its own memory")
        host = lambda a: np.array(a)  # noqa: E731
        return StepResult(
            host(hidden).astype(np.float32),
            None if tokens is None else host(tokens),
            tuple(map(host, state.kv)),
            host(state.last_tokens),
        )

    def run_fresh(
        self, program: StepProgram, batch: Batch, state: HostState | None = None
    ) -> StepResult:
        """Runs on a fresh copy of a state and checks that the weights kept their bits."""
        host = state or self.state
        device = host.on_device()
        result = self.run(program, device, batch)
        for index, (before, after) in enumerate(zip(host.params, device.params, strict=True)):
            if not same_bits(before, np.asarray(after)).all():
                raise GateFailure(f"parameter {index} was modified")
        return result

    def compare(
        self, found: StepResult, wanted: StepResult, batch: Batch, before: HostState, what: str
    ) -> float:
        """Judges a result against the incumbent's; the largest error over its bound."""
        live = batch.live
        bound = forward_bound(before.spec)
        worst = _close(found.hidden[live], wanted.hidden[live], bound, f"{what}: hidden state")
        if found.tokens is not None and wanted.tokens is not None:
            self._best_tokens(found, batch, before, what)
            self._stored_tokens(found, batch, before, what)
        slots = batch.rows.new_slots.reshape(-1)
        for layer, (a, b, was) in enumerate(zip(found.kv, wanted.kv, before.kv, strict=True)):
            worst = max(worst, _pools(a, b, was, slots, bound, f"{what}: pool of layer {layer}"))
        return worst

    def _best_tokens(self, found: StepResult, batch: Batch, before: HostState, what: str) -> None:
        """Greedy tokens are the best by the candidate's hidden state, within the head's bound."""
        norm, head = (np.asarray(a, np.float64) for a in self.head_of(before))
        hidden = found.hidden.astype(np.float64)
        eps = 1e-5
        with np.errstate(invalid="ignore"):
            y = hidden / np.sqrt(np.mean(hidden**2, -1, keepdims=True) + eps) * norm
            logits = y @ head.T
        for row in np.flatnonzero(batch.live & ~np.isnan(logits).any(-1)):
            assert found.tokens is not None
            token = int(found.tokens[row])
            if not 0 <= token < logits.shape[1]:
                raise GateFailure(f"{what}: row {row} sampled token {token}")
            gap = logits[row].max() - logits[row, token]
            allowed = head_bound(before.spec) * float(np.abs(y[row]) @ np.abs(head).T.max(-1))
            if gap > allowed:
                raise GateFailure(
                    f"{what}: token {token} of row {row} scores {gap:.3g} below the best"
                )

    def _stored_tokens(self, found: StepResult, batch: Batch, before: HostState, what: str) -> None:
        """A sampled token becomes its slot's last token; other slots keep theirs."""
        assert found.tokens is not None
        expected = before.last_tokens.copy()
        expected[batch.slots[batch.live]] = found.tokens[batch.live]
        sink = len(expected) - 1
        differs = np.flatnonzero((expected != found.last_tokens)[:sink])
        if len(differs):
            slot = differs[0]
            raise GateFailure(
                f"{what}: last token of slot {slot} is {found.last_tokens[slot]} instead of "
                f"{expected[slot]}"
            )

    def head_of(self, state: HostState) -> tuple[np.ndarray, ...]:
        """(final norm [D], LM head [V,D])."""
        return tuple(state.params[i] for i in head_indices(state.spec))


def _require_device_arrays(results: Any) -> None:
    for leaf in jax.tree.leaves(results):
        if not isinstance(leaf, jax.Array):
            raise GateFailure(f"returned a {type(leaf).__name__} instead of a device array")


def _close(found: np.ndarray, wanted: np.ndarray, bound: float, what: str) -> float:
    """Largest difference over bound times the row's largest element; NaN only where wanted."""
    if found.shape != wanted.shape:
        raise GateFailure(f"{what} has shape {found.shape} instead of {wanted.shape}")
    lost = np.isnan(found) != np.isnan(wanted)
    if lost.any():
        where = tuple(int(i) for i in np.argwhere(lost)[0])
        raise GateFailure(f"{what}{list(where)} is {found[where]} instead of {wanted[where]}")
    scale = np.nanmax(np.abs(wanted), initial=0.0) or 1.0
    worst = float(np.nanmax(np.abs(found - wanted), initial=0.0)) / scale / bound
    if worst > 1.0:
        raise GateFailure(f"{what} is off by {worst:.3g} times the bound {bound:.3g}")
    return worst


def _pools(
    found: np.ndarray,
    wanted: np.ndarray,
    was: np.ndarray,
    slots: np.ndarray,
    bound: float,
    what: str,
) -> float:
    """Mapped slots hold what the incumbent wrote, the others what was there before."""
    page = found.shape[3]
    mapped = np.zeros((found.shape[0], page), bool)
    live = slots[slots > 0]
    mapped[live // page, live % page] = True
    by_slot = lambda a: np.moveaxis(a, 3, 1)  # noqa: E731
    kept = ~mapped
    kept[0, 0] = False  # the sink of idle rows and of padding
    changed = ~same_bits(by_slot(found)[kept], by_slot(was)[kept])
    if changed.any():
        slot = np.argwhere(kept)[np.argwhere(changed)[0][0]]
        raise GateFailure(
            f"{what}: slot {slot[1]} of page {slot[0]} changed, though no row owns it"
        )
    return _close(by_slot(found)[mapped], by_slot(wanted)[mapped], bound, f"{what}, written slots")
