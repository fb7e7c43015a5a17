"""The equivalence gate: a candidate program computes what the program in force computes.

Both run on the live state, on scratch pages and the sink slot only, with the same random inputs;
results and written pages are compared with chex within a bound that is derived, not picked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import chex
import jax
import numpy as np

from polyjax.compiler.program import DECODES, SAMPLERS, Kind, ProgramKey, StepProgram
from polyjax.compiler.sampling import MAX_TOP_LOGPROBS
from polyjax.compiler.state import StateSpec
from polyjax.core.arrays import reduction_bound, unit_roundoff
from polyjax.core.batch_layout import BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.gates.scratch import ScratchSpace
from polyjax.gates.verdict import Verdict

GATE = "equivalence"
_ROUNDINGS_PER_LAYER = 10  # ops of a layer whose result is rounded to the model's dtype
_SIGMAS = 6.0

Programs = Mapping[ProgramKey, StepProgram]
type Pieces[T] = Generator[None, None, T]


class LiveState(Protocol):
    """The device state of an engine; programs that take parts of it donated hand new ones back."""

    params: tuple[jax.Array, ...]
    head: tuple[jax.Array, ...]
    kv: tuple[jax.Array, ...]
    last_tokens: jax.Array
    sampling: Any


def forward_bound(spec: StateSpec) -> float:
    """Relative error two correct forward programs may differ by, against the largest element.

    Every layer rounds its intermediate results to the dtype and sums over at most 16 * D terms.
    These errors are independent between ops, so they add like sqrt(number of ops); six standard
    deviations of that (Higham and Mary 2019, A new approach to probabilistic rounding error
    analysis, theorem 2.4), twice because both programs err.
    """
    ops = spec.config.num_layers * _ROUNDINGS_PER_LAYER + 1
    one = reduction_bound(spec.dtype, 16 * spec.config.embed_dim)
    return 2.0 * min(_SIGMAS * math.sqrt(ops), ops) * one


def head_bound(spec: StateSpec) -> float:
    """The same for the head alone, whose input both programs share: two roundings and a sum."""
    return 2.0 * (reduction_bound("float32", spec.config.embed_dim) + 2 * unit_roundoff(spec.dtype))


class EquivalenceGate:
    """Compares candidates with the programs in force, on the state of one engine.

    `programs` are those in force; a candidate of another bucket is compared with the smallest one
    of theirs that its inputs fit into.
    """

    def __init__(self, spec: StateSpec, state: LiveState, programs: Programs, seed: int = 0):
        self.spec = spec
        self._state = state
        self._programs = programs
        self._space = ScratchSpace(spec)
        self._rng = np.random.default_rng(seed)
        self._filled = False

    def check(self, candidate: StepProgram) -> Verdict:
        """Runs candidate and reference once each. Never raises for a candidate that is wrong."""
        pieces = self.pieces(candidate)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                verdict: Verdict = done.value
                return verdict

    def pieces(self, candidate: StepProgram) -> Pieces[Verdict]:
        """The same check in pieces of about one program run each, for between two steps.

        Scratch pages and the sink belong to the check until it has returned its verdict.
        """
        started = time.perf_counter()
        evidence: dict[str, Any] = {"program": str(candidate.key)}
        try:
            reference = self._reference(candidate.key)
            evidence["reference"] = str(reference.key)
            yield from self._comparison(candidate.key.kind)(candidate, reference, evidence)
            reason = ""
        except AssertionError as error:
            reason = f"{candidate.key}: {_first_lines(error)}"
        return Verdict(GATE, not reason, reason, evidence, time.perf_counter() - started)

    def _reference(self, key: ProgramKey) -> StepProgram:
        same = self._programs.get(key)
        if same is not None:
            return same
        mine = key.bucket
        fitting = [
            (k.bucket.tokens * k.bucket.sequences, k.bucket.pages, k)
            for k in self._programs
            if k.kind is key.kind
            and k.bucket.tokens >= mine.tokens
            and k.bucket.sequences >= mine.sequences
            and k.bucket.pages >= mine.pages
        ]
        if not fitting:
            raise AssertionError("no program in force is large enough to compare with")
        return self._programs[min(fitting)[2]]

    def _comparison(
        self, kind: Kind
    ) -> Callable[[StepProgram, StepProgram, dict[str, Any]], Pieces[None]]:
        if kind is Kind.PREFILL or kind in DECODES:
            return self._compare_forward
        if kind in SAMPLERS:
            return self._compare_sampler
        if kind is Kind.SCORE:
            return self._compare_score
        return self._compare_exactly

    # -- forward programs --------------------------------------------------------------------

    def _compare_forward(
        self, candidate: StepProgram, reference: StepProgram, evidence: dict[str, Any]
    ) -> Pieces[None]:
        yield from self._fill_scratch()
        bucket = _smaller(candidate.key.bucket, reference.key.bucket)
        rows = self._space.rows(bucket, self._rng, candidate.key.kind is Kind.DECODE_GUMBEL)
        count = len(rows.tokens)
        # The candidate first: what it does not write must not have been written by the reference.
        found = self._run(candidate, self._space.pack(rows, candidate.key.bucket))
        found_pages = self._scratch_pages()
        self._assert_parameters_kept()
        yield
        wanted = self._run(reference, self._space.pack(rows, reference.key.bucket))
        wanted_pages = self._scratch_pages()
        yield
        bound = forward_bound(self.spec)
        evidence |= {"rows": count, "bound": bound}
        ours, theirs = found[-1][:count], wanted[-1][:count]
        evidence["hidden_error"] = relative_error(ours, theirs)
        assert_close(ours, theirs, bound, "last hidden state")
        evidence["kv_error"] = 0.0
        for layer, pools in enumerate(zip(found_pages, wanted_pages, strict=True)):
            yield  # a layer's pages may be megabytes: steps go on between two of them
            a, b = map(_float32, pools)
            evidence["kv_error"] = max(evidence["kv_error"], relative_error(a, b))
            assert_close(a, b, bound, f"KV pages of layer {layer}")
        if candidate.key.kind in DECODES:
            tokens, expected = found[0][:count], wanted[0][:count]
            if candidate.key.kind is Kind.DECODE_GREEDY:
                self.assert_best(tokens, ours, evidence)
            else:
                moved = evidence["hidden_error"] + head_bound(self.spec)
                self._assert_few_differ(tokens, expected, moved, evidence)

    def _scratch_pages(self) -> Sequence[jax.Array]:
        """Copies of every layer's scratch pages, on the device: later steps do not change them."""
        pages: Sequence[jax.Array] = self._programs[ProgramKey(Kind.READ_SCRATCH)](self._state.kv)
        return pages

    def _run(self, program: StepProgram, flat: np.ndarray) -> list[np.ndarray]:
        """Host copies of tokens (of a decode) and last hidden states [B,D]."""
        state = self._state
        outputs: list[np.ndarray]
        if program.key.kind is Kind.PREFILL:
            state.kv, hidden, _ = program(state.params, state.kv, state.last_tokens, flat)
            outputs = [_float32(hidden)]
        else:
            state.kv, state.last_tokens, tokens, hidden, following = program(
                state.params, state.kv, state.last_tokens, flat
            )
            layout = BatchLayout(program.key.bucket, len(self._space.groups))
            further = np.array_equal(following, layout.one_token_further(flat))
            assert further, "the packed array of the next step is not one token further"
            outputs = [np.asarray(tokens), _float32(hidden)]
        return outputs

    def _assert_parameters_kept(self) -> None:
        """What a candidate consumed, the reference could not even run on."""
        gone = [index for index, array in enumerate(self._state.params) if array.is_deleted()]
        assert not gone, f"parameters {gone} are gone: it consumes what it may only read"

    def _fill_scratch(self) -> Pieces[None]:
        """Puts the KV of random tokens into the pages that are read; zeros would hide much."""
        if self._filled:
            return
        prefills = [k for k in self._programs if k.kind is Kind.PREFILL]
        key = min(prefills, key=lambda k: (k.bucket.sequences, k.bucket.tokens, k.bucket.pages))
        space = self._space
        total = min(space.read_tokens, key.bucket.pages * self.spec.page_size)
        for start in range(0, total, key.bucket.tokens):
            count = min(key.bucket.tokens, total - start)
            self._run(self._programs[key], space.fill(start, count, key.bucket, self._rng))
            yield
        self._filled = True

    # -- samplers, scores, the rest ----------------------------------------------------------

    def _compare_sampler(
        self, candidate: StepProgram, reference: StepProgram, evidence: dict[str, Any]
    ) -> Pieces[None]:
        count = min(candidate.key.bucket.sequences, reference.key.bucket.sequences)
        one_token = Bucket(1, count, 1)
        rows = self._space.rows(one_token, self._rng, candidate.key.kind is not Kind.SAMPLE_GREEDY)
        hidden = self._rng.standard_normal((count, self.spec.config.embed_dim))
        found = self._sample(candidate, rows, hidden)[: len(rows.tokens)]
        self._assert_parameters_kept()
        yield
        wanted = self._sample(reference, rows, hidden)[: len(rows.tokens)]
        evidence["rows"] = count
        if candidate.key.kind is Kind.SAMPLE_GREEDY:
            self.assert_best(found, hidden[: len(found)], evidence)
        else:
            self._assert_few_differ(found, wanted, head_bound(self.spec), evidence)

    def _sample(self, program: StepProgram, rows: Any, hidden: np.ndarray) -> np.ndarray:
        state, size = self._state, program.key.bucket.sequences
        layout = BatchLayout(Bucket(1, size, 1), len(self._space.groups))
        flat = self._space.pack(rows, layout.bucket)[: layout.sampler_size]
        padded = np.zeros((size, hidden.shape[1]), np.dtype(self.spec.dtype))
        padded[: len(hidden)] = hidden
        if program.key.kind is not Kind.SAMPLE_FULL:
            state.last_tokens, tokens = program(state.head, state.last_tokens, padded, flat)
            return np.asarray(tokens)
        mask = np.full((size, self.spec.mask_words), -1, np.int32)
        state.last_tokens, state.sampling, tokens = program(
            state.head, state.last_tokens, state.sampling, padded, flat, mask
        )
        return np.asarray(tokens)

    def _compare_score(
        self, candidate: StepProgram, reference: StepProgram, evidence: dict[str, Any]
    ) -> Pieces[None]:
        count = min(candidate.key.bucket.tokens, reference.key.bucket.tokens)
        hidden = self._rng.standard_normal((count, self.spec.config.embed_dim))
        targets = self._rng.integers(0, self.spec.config.vocab_size, count)
        mask = self._some_tokens(targets)
        found = self._score(candidate, hidden, targets, mask)[:count]
        yield
        wanted = self._score(reference, hidden, targets, mask)[:count]
        bound = head_bound(self.spec)
        evidence |= {"rows": count, "bound": bound, "score_error": relative_error(found, wanted)}
        assert_close(found, wanted, bound, "log-probabilities")

    def _some_tokens(self, targets: np.ndarray) -> np.ndarray:
        """[R,words] int32: a mask that allows half of the tokens, `targets` [R] among them."""
        mask = self._rng.integers(0, 2**32, (len(targets), self.spec.mask_words), np.uint32)
        mask[np.arange(len(targets)), targets // 32] |= np.uint32(1) << (targets % 32).astype(
            np.uint32
        )
        return mask.view(np.int32)

    def _score(
        self,
        program: StepProgram,
        hidden: np.ndarray,
        targets: np.ndarray,
        mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """[R,1+K]: log-probabilities of the targets and of the best tokens, `mask` [R,words]."""
        rows = program.key.bucket.tokens
        padded = np.zeros((rows, hidden.shape[1]), np.dtype(self.spec.dtype))
        padded[: len(hidden)] = hidden
        ids = np.zeros(rows, np.int32)
        ids[: len(targets)] = targets
        allowed = np.full(self.spec.score_mask_shape(rows), -1, np.int32)
        if mask is not None and len(allowed) == rows:
            allowed[: len(mask)] = mask
        scores = np.asarray(program(self._state.head, padded, ids, allowed)).view(np.float32)
        known = min(MAX_TOP_LOGPROBS, self.spec.config.vocab_size)
        return scores[:, [0, *range(2 + MAX_TOP_LOGPROBS, 2 + MAX_TOP_LOGPROBS + known)]]

    def _compare_exactly(
        self, candidate: StepProgram, reference: StepProgram, evidence: dict[str, Any]
    ) -> Pieces[None]:
        """Programs that only move data must agree to the bit."""
        state = self._state
        match candidate.key.kind:
            case Kind.READ_SCRATCH:
                found, wanted = candidate(state.kv), reference(state.kv)
            case Kind.COMPARE_PAGES:
                pages = self._page_pairs()
                found, wanted = candidate(state.kv, *pages), reference(state.kv, *pages)
            case Kind.COPY_PAGES:
                yield from self._fill_scratch()
                pages, read = self._page_pairs(), self._programs[ProgramKey(Kind.READ_SCRATCH)]
                state.kv = candidate(state.kv, *pages)
                found = jax.device_get(read(state.kv))
                state.kv = reference(state.kv, *pages)
                wanted = read(state.kv)
            case _:
                slot = np.int32(self.spec.num_slots)
                row = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), state.sampling)
                state.sampling = reference(state.sampling, slot, row)
                wanted = jax.device_get(state.sampling)
                state.sampling = found = candidate(state.sampling, slot, row)
        yield
        chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(wanted))

    def _page_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Pages to read in one order, as many to write; the rest is padding [G,R] each."""
        pages = np.zeros((2, len(self._space.groups), self.spec.scratch_pages), np.int32)
        count = min(self._space.num_read, self.spec.scratch_pages - self._space.num_read)
        for group, total in enumerate(self.spec.num_pages):
            first = total - self.spec.scratch_pages
            pages[0, group, :count] = first + self._rng.permutation(self._space.num_read)[:count]
            pages[1, group, :count] = first + self._space.num_read + np.arange(count)
        return pages[0], pages[1]

    def assert_best(self, tokens: np.ndarray, hidden: np.ndarray, evidence: dict[str, Any]) -> None:
        """Greedy tokens must be the best by the reference's own scores, or tie with it."""
        sizes = [k.bucket.tokens for k in self._programs if k.kind is Kind.SCORE]
        rows = min(size for size in sizes if size >= len(tokens))
        score = self._programs[ProgramKey(Kind.SCORE, Bucket(rows, 1, 0))]
        found = self._score(score, hidden, tokens)[: len(tokens)]
        bound = head_bound(self.spec)
        gap = float(np.max(found[:, 1] - found[:, 0]))
        evidence |= {"token_gap": gap, "token_bound": bound}
        chex.assert_scalar_in(gap, 0.0, bound * float(np.max(np.abs(found))))

    def _assert_few_differ(
        self, found: np.ndarray, wanted: np.ndarray, moved: float, evidence: dict[str, Any]
    ) -> None:
        """Sampled tokens may differ only where two of them were nearly equal.

        With Gumbel noise the best two candidates lie less than g apart with a probability of at
        most g (their distance is at least an exponential variable of mean 1). Logits moved by
        `moved`, relative to a size of about log(vocabulary), so the number of such rows is about
        Poisson; more than the number allowed here happens once in a million.
        """
        differing = int(np.sum(found != wanted))
        expected = len(found) * moved * 2.0 * math.log(self.spec.config.vocab_size)
        allowed, term = 0, math.exp(-expected)
        tail = 1.0 - term
        while tail > 1e-6:
            allowed += 1
            term *= expected / allowed
            tail -= term
        evidence |= {"differing_tokens": differing, "allowed_tokens": allowed}
        chex.assert_scalar_in(differing, 0, allowed)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference over the largest magnitude; NaN counts as infinite."""
    scale = float(np.max(np.abs(wanted), initial=0.0)) or 1.0
    error = float(np.max(np.abs(found - wanted), initial=0.0)) / scale
    return error if math.isfinite(error) else math.inf


def assert_close(found: np.ndarray, wanted: np.ndarray, bound: float, what: str) -> None:
    """Raises AssertionError unless both are finite and within `bound` of the largest element."""
    chex.assert_equal_shape([found, wanted])
    chex.assert_tree_all_finite(found)
    chex.assert_tree_all_finite(wanted)
    scale = float(np.max(np.abs(wanted), initial=0.0)) or 1.0
    try:
        chex.assert_trees_all_close(found / scale, wanted / scale, rtol=0.0, atol=bound)
    except AssertionError as error:
        raise AssertionError(f"{what}: {_first_lines(error)}") from error


def _smaller(a: Bucket, b: Bucket) -> Bucket:
    return Bucket(min(a.tokens, b.tokens), min(a.sequences, b.sequences), min(a.pages, b.pages))


def _float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def _first_lines(error: AssertionError) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:12] if line.strip())[:600]
