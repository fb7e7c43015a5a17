"""Counter-based noise: distribution, independence, repeatability, and what sampling makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.core.noise import gumbel, mix, row_keys, uniform

VOCABULARY = 128256
DEVIATIONS = 5.0  # standard deviations a correct statistic stays within


def uniforms(seeds: list[int], positions: list[int], vocab: int = VOCABULARY) -> np.ndarray:
    keys = row_keys(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32))
    tokens = jnp.arange(vocab, dtype=jnp.int32)
    return np.asarray(uniform(keys[0][:, None], keys[1][:, None], tokens[None, :]))


@pytest.mark.smoke
def test_uniforms_stay_inside_the_open_interval() -> None:
    drawn = uniforms([0, 1, 2**32 - 1], [0, 2**31 - 1, 7])
    assert drawn.min() > 0 and drawn.max() < 1


def test_uniforms_fill_their_bins_evenly() -> None:
    drawn = uniforms([0] * 8 + list(range(8)), list(range(8)) + [0] * 8)
    bins = 1000
    for row in drawn:
        counts = np.histogram(row, bins, (0, 1))[0]
        chi_square = ((counts - VOCABULARY / bins) ** 2).sum() / (VOCABULARY / bins)
        assert abs(chi_square - (bins - 1)) < DEVIATIONS * np.sqrt(2 * (bins - 1))


def test_neighbouring_rows_positions_and_tokens_are_uncorrelated() -> None:
    drawn = uniforms([5, 5, 5, 6, 7, 2**31], [0, 1, 2, 0, 0, 0])
    limit = DEVIATIONS / np.sqrt(VOCABULARY)
    between = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(between).max() < limit
    for lag in (1, 2, 32, 64, 128):
        assert abs(np.corrcoef(drawn[0, :-lag], drawn[0, lag:])[0, 1]) < limit


def test_gumbel_has_its_moments() -> None:
    drawn = np.asarray(gumbel(jnp.arange(16, dtype=jnp.uint32), jnp.arange(16), VOCABULARY))
    assert np.isfinite(drawn).all()
    assert abs(drawn.mean() - np.euler_gamma) < DEVIATIONS * np.sqrt(np.pi**2 / 6 / drawn.size)
    assert abs(drawn.var() - np.pi**2 / 6) < 0.02


def test_a_row_depends_on_its_own_seed_and_position_only() -> None:
    alone = np.asarray(gumbel(jnp.asarray([9], jnp.uint32), jnp.asarray([4]), 64))
    batch = gumbel(jnp.asarray([1, 9, 3], jnp.uint32), jnp.asarray([8, 4, 4]), 64)
    np.testing.assert_array_equal(alone[0], np.asarray(batch)[1])
    assert not np.array_equal(np.asarray(batch)[1], np.asarray(batch)[2])


def test_the_mixer_is_a_bijection_on_a_dense_range_and_never_changes() -> None:
    mixed = np.asarray(mix(jnp.arange(2**16, dtype=jnp.uint32)))
    assert len(np.unique(mixed)) == 2**16
    # A request repeated with its seed after an upgrade must draw the same tokens.
    assert [int(v) for v in mixed[:3]] == [0, 1753845952, 3507691905]


def test_the_noisiest_token_follows_the_softmax() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    draws = 40_000
    noise = gumbel(jnp.full((draws,), 3, jnp.uint32), jnp.arange(draws), len(probabilities))
    chosen = jnp.argmax(jnp.log(jnp.asarray(probabilities)) + noise, axis=-1)
    counts = np.bincount(np.asarray(chosen), minlength=len(probabilities))
    deviation = np.sqrt(draws * probabilities * (1 - probabilities))
    assert (np.abs(counts - draws * probabilities) < DEVIATIONS * deviation).all()


def test_compiled_and_eager_noise_agree_on_the_uniforms() -> None:
    keys = row_keys(jnp.asarray([7], jnp.uint32), jnp.asarray([11], jnp.int32))
    tokens = jnp.arange(512, dtype=jnp.int32)
    np.testing.assert_array_equal(jax.jit(uniform)(*keys, tokens), uniform(*keys, tokens))
