"""The quality gate lets rounding pass and names what a coarser program loses."""

import numpy as np
import pytest

from polyjax.gates.candidate import GateFailure
from polyjax.gates.quality import check, distance, limits

WINDOWS, LENGTH, VOCAB = 24, 32, 50


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, VOCAB, (WINDOWS, LENGTH)).astype(np.int32)


def model(noise=0.0, seed=1, forgetting=0.0):
    """Logits that know the next token to some degree, `noise` apart from each other."""

    def arm(tokens):
        rng = np.random.default_rng(5)
        logits = rng.normal(size=(*tokens.shape, VOCAB))
        following = np.roll(tokens, -1, axis=1)
        np.put_along_axis(logits, following[..., None], 4.0 - forgetting, axis=-1)
        return (logits + noise * np.random.default_rng(seed).normal(size=logits.shape)).astype(
            np.float32
        )

    return arm


def test_an_arm_with_the_spread_of_equal_arms_passes(text):
    evidence = check(text, model(), [model(0.01, 2), model(0.01, 3)], model(0.01, 4))
    assert evidence["limits"]["divergence"] > 0


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (model(forgetting=0.8), "log-probability"),
        (model(0.2, 9), "divergence"),
        (lambda tokens: model()(tokens) * np.float32(np.nan), "not finite"),
        (lambda tokens: model()(tokens)[..., ::-1], "log-probability"),
    ],
)
def test_a_worse_arm_is_named(text, candidate, reason):
    with pytest.raises(GateFailure, match=reason):
        check(text, model(), [model(0.01, 2), model(0.01, 3)], candidate)


def test_distances_of_an_arm_to_itself_are_zero(text):
    logits = model()(text)
    itself = distance(text, logits, logits)
    assert not itself.log_prob.any() and not itself.divergence.any()
    assert limits([itself]).disagreement == 0


def test_without_equal_arms_there_is_no_limit(text):
    with pytest.raises(ValueError, match="run the incumbent again"):
        limits([])
