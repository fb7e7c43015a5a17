"""Sampling on the device against a plain implementation in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler import sampling
from polyjax.compiler.sampling import RowParams, SamplingState
from polyjax.core.noise import gumbel

VOCAB, SLOTS = 97, 5
MASK_WORDS = -(-VOCAB // 32)


def rows(**changes: Any) -> RowParams:
    """Neutral parameters of three rows in slots 3, 0, 1."""
    values: dict[str, Any] = {
        "slots": [3, 0, 1],
        "samples": [True] * 3,
        "positions": [4, 5, 6],
        "temperature": [0.0] * 3,
        "top_p": [1.0] * 3,
        "min_p": [0.0] * 3,
        "repetition_penalty": [1.0] * 3,
        "frequency_penalty": [0.0] * 3,
        "presence_penalty": [0.0] * 3,
        "top_k": [0] * 3,
        "seeds": [7, 8, 9],
    } | changes
    kinds = {"slots": "int32", "positions": "int32", "top_k": "int32", "seeds": "uint32"}
    kinds["samples"] = "bool"
    return RowParams(**{k: jnp.asarray(v, kinds.get(k, "float32")) for k, v in values.items()})


def state(rng: np.random.Generator | None = None) -> SamplingState:
    counts = np.zeros((SLOTS + 1, VOCAB), np.int32)
    seen = np.zeros((SLOTS + 1, VOCAB), bool)
    ids = np.zeros((SLOTS + 1, 4), np.int32)
    values = np.zeros((SLOTS + 1, 4), np.float32)
    if rng is not None:
        counts = rng.poisson(0.3, counts.shape).astype(np.int32)
        seen = rng.random(seen.shape) < 0.2
        ids[:] = rng.integers(0, VOCAB, ids.shape)
        values[:] = rng.normal(0, 3, values.shape)
    return SamplingState(*map(jnp.asarray, (counts, seen, ids, values)))


def logits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (3, VOCAB)).astype(np.float32)


def kept_tokens(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filter semantics spelled out with a sort, in float64."""
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    kept = probabilities >= min_p * probabilities.max()
    order = [i for i in np.argsort(-probabilities, kind="stable") if kept[i]]
    order = order[: top_k or VOCAB]
    left = probabilities[order] / probabilities[order].sum()
    needed = int(np.searchsorted(np.cumsum(left), top_p * (1 - 1e-9))) + 1
    return set(order if top_p == 1.0 else order[:needed])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (1, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 0.01, 0.0),
        (0, 1.0, 0.1),
        (20, 0.8, 0.02),
        (VOCAB * 2, 0.999, 0.0),
    ],
)
def test_filters_keep_the_right_tokens(top_k: int, top_p: float, min_p: float) -> None:
    logits = logits_of(top_k)
    params = rows(top_k=[top_k] * 3, top_p=[top_p] * 3, min_p=[min_p] * 3)
    filtered = np.asarray(sampling.filter_logits(jnp.asarray(logits), params))
    for row in range(3):
        kept = {int(i) for i in np.flatnonzero(np.isfinite(filtered[row]))}
        assert kept == kept_tokens(logits[row], top_k, top_p, min_p)
        assert (filtered[row][sorted(kept)] == logits[row][sorted(kept)]).all()


def test_filters_are_per_row() -> None:
    filtered = sampling.filter_logits(jnp.asarray(logits_of(1)), rows(top_k=[1, 0, 3]))
    assert np.isfinite(np.asarray(filtered)).sum(axis=1).tolist() == [1, VOCAB, 3]


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 10] = 1.0
    filtered = np.asarray(sampling.filter_logits(jnp.asarray(logits), rows(top_k=[2] * 3)))
    assert np.isfinite(filtered).all()


def penalised(logits: np.ndarray, counts: np.ndarray, seen: np.ndarray) -> np.ndarray:
    result = logits.astype(np.float64).copy()
    for token in range(VOCAB):
        if seen[token] or counts[token]:
            result[token] = result[token] / 1.3 if result[token] > 0 else result[token] * 1.3
        result[token] -= 0.7 * counts[token] + 0.4 * (counts[token] > 0)
    return result


def test_penalties_and_bias() -> None:
    start = state(np.random.default_rng(2))
    logits = logits_of(3)
    params = rows(
        repetition_penalty=[1.3] * 3, frequency_penalty=[0.7] * 3, presence_penalty=[0.4] * 3
    )
    mask = jnp.full((3, MASK_WORDS), -1, jnp.int32)
    tokens, after = sampling.sample_full(jnp.asarray(logits), start, params, mask)
    for row, slot in enumerate([3, 0, 1]):
        wanted = penalised(
            logits[row], np.asarray(start.output_counts)[slot], np.asarray(start.prompt_seen)[slot]
        )
        np.add.at(wanted, np.asarray(start.bias_ids)[slot], np.asarray(start.bias_values)[slot])
        assert int(tokens[row]) == int(np.argmax(wanted))
        grown = np.asarray(after.output_counts)[slot] - np.asarray(start.output_counts)[slot]
        assert grown.sum() == 1
        assert grown[int(tokens[row])] == 1


def test_rows_that_do_not_sample_change_no_slot() -> None:
    start = state()
    mask = jnp.full((3, MASK_WORDS), -1, jnp.int32)
    params = rows(samples=[False, True, False])
    _, after = sampling.sample_full(jnp.asarray(logits_of(0)), start, params, mask)
    counts = np.asarray(after.output_counts)
    assert counts[:SLOTS].sum() == counts[0].sum() == 1
    stored = sampling.store_tokens(jnp.zeros(SLOTS + 1, jnp.int32), jnp.array([11, 12, 13]), params)
    assert stored[:SLOTS].tolist() == [12, 0, 0, 0, 0]


def test_a_mask_excludes_the_best_token() -> None:
    logits = logits_of(4)
    best = np.argmax(logits, axis=1)
    words = np.full((3, MASK_WORDS), -1, np.int32).view(np.uint32)
    for row, token in enumerate(best):
        words[row, token // 32] &= ~np.uint32(1 << (token % 32))
    mask = jnp.asarray(words.view(np.int32))
    tokens, _ = sampling.sample_full(jnp.asarray(logits), state(), rows(), mask)
    logits[np.arange(3), best] = -np.inf
    assert np.asarray(tokens).tolist() == np.argmax(logits, axis=1).tolist()


def test_noise_depends_on_seed_and_position_only() -> None:
    logits = np.tile(logits_of(5)[:1], (3, 1))
    mask = jnp.full((3, MASK_WORDS), -1, jnp.int32)

    def sample(seeds: list[int], positions: list[int]) -> list[int]:
        params = rows(temperature=[5.0] * 3, seeds=seeds, positions=positions)
        tokens, _ = sampling.sample_full(jnp.asarray(logits), state(), params, mask)
        return np.asarray(tokens).tolist()

    a = sample([1, 2, 3], [10, 20, 30])
    assert sample([3, 1, 2], [30, 10, 20]) == [a[2], a[0], a[1]]
    several = {tuple(sample([n, n + 1, n + 2], [5, 5, 5])) for n in range(0, 30, 3)}
    assert len(several) > 5  # not constant


def test_frequencies_follow_the_distribution() -> None:
    logits = jnp.asarray(np.log([[0.5, 0.3, 0.2]], dtype=np.float32))
    count = 3000
    noise = gumbel(jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 3, jnp.int32), 3)
    drawn = np.bincount(np.asarray(jnp.argmax(logits + noise, axis=-1)), minlength=3) / count
    # Five standard deviations of a proportion.
    assert np.abs(drawn - [0.5, 0.3, 0.2]).max() < 5 * np.sqrt(0.25 / count)


def test_scores() -> None:
    logits = logits_of(6)
    targets = np.array([3, 50, 96], np.int32)
    packed = np.asarray(sampling.scores(jnp.asarray(logits), jnp.asarray(targets)))
    floats = packed.view(np.float32)
    exact = logits.astype(np.float64)
    logprobs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    order = np.argsort(-logprobs, axis=1)
    top = sampling.MAX_TOP_LOGPROBS
    for row, target in enumerate(targets):
        np.testing.assert_allclose(floats[row, 0], logprobs[row, target], rtol=1e-5)
        assert packed[row, 1] == int(np.flatnonzero(order[row] == target)[0])
        assert packed[row, 2 : 2 + top].tolist() == order[row, :top].tolist()
        np.testing.assert_allclose(
            floats[row, 2 + top :], logprobs[row, order[row, :top]], rtol=1e-5
        )


def test_a_vocabulary_smaller_than_the_number_of_alternatives() -> None:
    packed = sampling.scores(jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32))
    assert packed.shape == (1, sampling.SCORE_COLUMNS)


def test_set_slot_replaces_one_row() -> None:
    row = jax.tree.map(lambda leaf: jnp.ones(leaf.shape[1:], leaf.dtype), state())
    after = sampling.set_slot(state(), jnp.int32(2), row)
    assert np.asarray(after.output_counts).sum(axis=1).tolist() == [0, 0, VOCAB, 0, 0, 0]
