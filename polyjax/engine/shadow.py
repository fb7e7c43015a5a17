"""Shadow steps: a candidate's program runs a copy of a live launch, and nobody sees what it makes.

Before a launch is dispatched, the pages that it will write are copied to scratch pages. Once the
step before has told the launch's tokens, the candidate runs the same rows with its writes on the
copies and with the sink slot in place of the rows' own. Its results and pages are then compared
with what the plan in force made of that very launch, on the device as far as pages go.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyjax.compiler.program import Kind, ProgramKey
from polyjax.compiler.state import StateSpec
from polyjax.core.batch_layout import FROM_SLOT, BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.launcher import RunningLaunch, RunningStep
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.sequence import SamplerKind
from polyjax.engine.state import DeviceState
from polyjax.engine.step import Launch, ScheduledStep
from polyjax.gates.equivalence import EquivalenceGate, forward_bound, relative_error
from polyjax.gates.scratch import set_neutral_sampling
from polyjax.gates.verdict import Verdict

GATE = "shadow"
Int32Array = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class PageCopies:
    """Which pages the first `rows` rows of a launch write, and the scratch pages in their place.

    `live` and `scratch` [G,R], padded with the sink. `moves` are (group, row, column of the page
    table, scratch page).
    """

    rows: int
    live: Int32Array
    scratch: Int32Array
    moves: tuple[tuple[int, int, int, int], ...]


def page_copies(launch: Launch, spec: StateSpec, max_rows: int) -> PageCopies | None:
    """As many leading rows as scratch pages can stand in for; None if not even one."""
    size, room = spec.page_size, spec.scratch_pages
    bases = [total - room for total in spec.num_pages]
    live = np.zeros((len(bases), room), np.int32)
    scratch = np.zeros_like(live)
    moves = []
    used = rows = 0
    spans = zip(launch.sequences, launch.starts, launch.num_tokens, strict=True)
    for row, (sequence, start, count) in enumerate(spans):
        first, last = start // size, (start + count - 1) // size
        if row == max_rows or used + last - first + 1 > room:
            break
        for logical in range(first, last + 1):
            for group, base in enumerate(bases):
                column = logical - sequence.pages.first[group]
                live[group, used] = sequence.pages.tables[group][column]
                scratch[group, used] = base + used
                moves.append((group, row, column, base + used))
            used += 1
        rows = row + 1
    return PageCopies(rows, live, scratch, tuple(moves)) if rows else None


def shadow_batch(
    running: RunningLaunch, copies: PageCopies, bucket: Bucket, spec: StateSpec
) -> Int32Array:
    """The flat array of a launch's rows in `bucket`, on scratch pages.

    Tokens that the device took from its slots are known: the step before is committed, and whoever
    was aborted before that was not launched.
    """
    launch, groups = running.launch, len(spec.num_pages)
    layout = BatchLayout(bucket, groups)
    flat = np.zeros(layout.size, np.int32)
    theirs, ours = BatchLayout(launch.bucket, groups).split(running.flat), layout.split(flat)
    n = copies.rows
    ours.slots[:] = spec.num_slots
    set_neutral_sampling(ours)
    for name in ("query_lens", "context_lens", "flags", "next_tokens"):
        getattr(ours, name)[:n] = getattr(theirs, name)[:n]
    ours.sampling_floats[:n], ours.sampling_ints[:n] = (
        theirs.sampling_floats[:n],
        theirs.sampling_ints[:n],
    )
    width = min(bucket.tokens, launch.bucket.tokens)
    ours.tokens[:n, :width] = theirs.tokens[:n, :width]
    columns = min(bucket.pages, launch.bucket.pages)
    ours.page_tables[:, :n, :columns] = theirs.page_tables[:, :n, :columns]
    ours.first_pages[:, :n] = theirs.first_pages[:, :n]
    for group, row, column, page in copies.moves:
        ours.page_tables[group, row, column] = page
    ours.flags[:n] &= ~FROM_SLOT
    for row in range(n):
        if launch.from_slot[row]:
            ours.tokens[row, 0] = launch.sequences[row].token_ids[launch.starts[row]]
    return flat


@dataclasses.dataclass(frozen=True)
class ShadowRun:
    """A launch's rows as a candidate and the plan in force would run them, both on scratch."""

    candidate_key: ProgramKey
    incumbent_key: ProgramKey
    candidate_flat: Int32Array
    incumbent_flat: Int32Array


@dataclasses.dataclass(frozen=True)
class _Pending:
    """Device arrays of one shadow step: the candidate's and the live launch's last hidden states,
    the candidate's greedy tokens if any, what was compared of the pages."""

    key: ProgramKey
    rows: int
    hidden: jax.Array
    live_hidden: jax.Array
    tokens: jax.Array | None
    live_tokens: jax.Array | None
    pages: jax.Array
    started_s: float

    @property
    def arrays(self) -> list[jax.Array]:
        found = (self.hidden, self.live_hidden, self.tokens, self.pages)
        return [array for array in found if array is not None]


class ShadowRunner:
    """Shadows launches one at a time, every kind of program in turn."""

    def __init__(
        self,
        state: DeviceState,
        incumbent: PlanPrograms,
        candidate: PlanPrograms,
        gate: EquivalenceGate,
        one_at_a_time: bool,
    ):
        self._state = state
        self._incumbent = incumbent
        self._candidate = candidate
        self._gate = gate
        self._one_at_a_time = one_at_a_time
        self._chooser = BucketChooser(candidate.ladder, 0)
        self._chosen: tuple[Launch, ProgramKey, PageCopies] | None = None
        self._pending: _Pending | None = None
        self.shadowed: collections.Counter[ProgramKey] = collections.Counter()
        self.runs: dict[ProgramKey, ShadowRun] = {}

    @property
    def is_busy(self) -> bool:
        return self._chosen is not None or self._pending is not None

    def before_launch(self, step: ScheduledStep) -> None:
        """Picks the launch whose program was shadowed least and copies the pages it will write."""
        options = []
        for launch in step.launches:
            key = self._candidate_key(launch)
            if key is not None:
                options.append((self.shadowed[key], str(key), launch, key))
        if not options:
            return
        _, _, launch, key = min(options, key=lambda option: option[:2])
        copies = page_copies(launch, self._state.spec, key.bucket.sequences)
        if copies is None:
            return
        copy = self._incumbent[ProgramKey(Kind.COPY_PAGES)]
        self._state.kv = copy(self._state.kv, copies.live, copies.scratch)
        self._chosen = (launch, key, copies)

    def forget_launch(self) -> None:
        """The step was not launched, or its pages are gone."""
        self._chosen = None

    def after_launch(self, step: RunningStep) -> bool:
        """Dispatches the candidate on what `before_launch` chose; its tokens are known by now.

        Returns whether there was something to run. Raises what the candidate raises; the state it
        was given may be lost then.
        """
        if self._chosen is None:
            return False
        (launch, key, copies), self._chosen = self._chosen, None
        running = next(r for r in step.launches if r.launch is launch)
        spec, state = self._state.spec, self._state
        flat = shadow_batch(running, copies, key.bucket, spec)
        started_s = time.perf_counter()
        hidden, tokens = run_on_scratch(self._candidate, key, flat, state)
        if key.kind is Kind.PREFILL and launch.sampler is SamplerKind.GREEDY:
            tokens = self._sample(key, flat, hidden)
        compare = self._incumbent[ProgramKey(Kind.COMPARE_PAGES)]
        pages = compare(state.kv, copies.scratch, copies.live)
        greedy = launch.sampler is SamplerKind.GREEDY
        pending = _Pending(
            *(key, copies.rows, hidden, running.hidden),
            *((tokens, running.tokens) if greedy else (None, None)),
            *(pages, started_s),
        )
        for array in pending.arrays:
            array.copy_to_host_async()
        if self._one_at_a_time:
            jax.block_until_ready((state.kv, hidden, pages))
        self._pending = pending
        live_flat = shadow_batch(running, copies, launch.bucket, spec)
        live_key = ProgramKey(key.kind, launch.bucket)
        self.runs[key] = ShadowRun(key, live_key, flat, live_flat)
        return True

    def collect(self) -> Verdict | None:
        """What the last shadow step showed, once, and not before it has run."""
        pending = self._pending
        if pending is None or not all(_is_ready(array) for array in pending.arrays):
            return None
        self._pending = None
        self.shadowed[pending.key] += 1
        evidence: dict[str, Any] = {"program": str(pending.key), "rows": pending.rows}
        reason = self._judge(pending, evidence)
        reason = f"{pending.key}: {reason}" if reason else ""
        return Verdict(GATE, not reason, reason, evidence, time.perf_counter() - pending.started_s)

    def _judge(self, pending: _Pending, evidence: dict[str, Any]) -> str:
        """Why the candidate's results are not those of the plan in force; empty if they are."""
        rows, bound = pending.rows, forward_bound(self._state.spec)
        hidden = np.asarray(pending.hidden)[:rows].astype(np.float32)
        live = np.asarray(pending.live_hidden)[:rows].astype(np.float32)
        if not np.isfinite(hidden).all():
            return "a hidden state is not finite"
        error = relative_error(hidden, live)
        pages = np.asarray(pending.pages)
        kv_error = float(np.max(pages[:, 0] / np.where(pages[:, 1] > 0, pages[:, 1], 1.0)))
        evidence |= {"hidden_error": error, "kv_error": kv_error, "bound": bound}
        if pages[:, 2].any():
            return f"KV pages of layer {int(np.argmax(pages[:, 2]))} are not finite"
        if error > bound:
            return f"last hidden state is off by {error:.3g}, the bound is {bound:.3g}"
        if kv_error > bound:
            return f"KV pages are off by {kv_error:.3g}, the bound is {bound:.3g}"
        return self._judge_tokens(pending, hidden, evidence)

    def _judge_tokens(self, pending: _Pending, hidden: Any, evidence: dict[str, Any]) -> str:
        """Greedy tokens are the live ones, or tie with the best by the candidate's own state."""
        if pending.tokens is None or pending.live_tokens is None:
            return ""
        tokens = np.asarray(pending.tokens)[: pending.rows]
        differing = int(np.sum(tokens != np.asarray(pending.live_tokens)[: pending.rows]))
        evidence["differing_tokens"] = differing
        if not differing:
            return ""
        try:
            self._gate.assert_best(tokens, hidden, evidence)
        except AssertionError as error:
            return f"a token is not the best: {error}"
        return ""

    def _sample(self, key: ProgramKey, flat: Int32Array, hidden: jax.Array) -> jax.Array:
        """Greedy tokens of a prefill's rows [B], stored in the sink slot."""
        state, bucket = self._state, key.bucket
        sampler = self._candidate[ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, bucket.sequences, 0))]
        rows = flat[: BatchLayout(bucket, len(state.spec.num_pages)).sampler_size]
        state.last_tokens, tokens = sampler(state.head, state.last_tokens, hidden, rows)
        return tokens

    def _candidate_key(self, launch: Launch) -> ProgramKey | None:
        """The candidate's program for a launch: of the bucket that its own ladder has for it."""
        bucket = self._bucket(launch)
        if bucket is None:
            return None
        kind = Kind.DECODE_GREEDY if launch.decode else Kind.PREFILL
        if launch.sampler is SamplerKind.GUMBEL and launch.decode:
            noisy = ProgramKey(Kind.DECODE_GUMBEL, bucket)
            kind = noisy.kind if noisy in self._candidate.programs else kind
        key = ProgramKey(kind, bucket)
        return key if key in self._candidate.programs else None

    def _bucket(self, launch: Launch) -> Bucket | None:
        """Where the candidate's ladder puts the rows of a launch; None if no bucket takes them."""
        if self._candidate.ladder == self._incumbent.ladder:
            return launch.bucket
        columns = _columns(launch, self._state.spec.page_size)
        if launch.decode:
            return self._chooser.decode(len(launch.sequences), columns)
        longest, count = max(launch.num_tokens), len(launch.sequences)
        return self._chooser.prefill(longest, count, columns)


def _is_ready(array: jax.Array) -> bool:
    ready: bool = array.is_ready()  # type: ignore[attr-defined]  # jax.Array does not declare it
    return ready


def _columns(launch: Launch, page_size: int) -> int:
    """Page table columns that the rows of a launch read."""
    spans = zip(launch.sequences, launch.starts, launch.num_tokens, strict=True)
    return max(-(-(start + n) // page_size) - min(s.pages.first) for s, start, n in spans)


def run_on_scratch(
    programs: PlanPrograms, key: ProgramKey, flat: Int32Array, state: DeviceState
) -> tuple[jax.Array, jax.Array | None]:
    """Dispatches a forward program. Returns (last hidden [B,D], tokens [B] of a decode)."""
    program = programs[key]
    if key.kind is Kind.PREFILL:
        state.kv, hidden, _ = program(state.params, state.kv, state.last_tokens, flat)
        return hidden, None
    state.kv, state.last_tokens, tokens, hidden, _ = program(
        state.params, state.kv, state.last_tokens, flat
    )
    return hidden, tokens
