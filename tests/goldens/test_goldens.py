"""The goldens themselves: complete, within their promises, and what transformers still computes."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from polyjax.io.files import open_model
from tests.goldens import ROOT, golden, golden_cases, real_golden
from tests.goldens.cases import CASES, VOCAB_SIZE


def test_every_case_is_there_and_nothing_else() -> None:
    assert golden_cases() == sorted((case.family, case.name) for case in CASES)


@pytest.mark.parametrize("family, case", golden_cases())
def test_expectations_keep_their_promises(family: str, case: str) -> None:
    expected = golden(family, case)
    assert expected.num_rows == 3
    assert expected.logits.shape == (len(expected.logit_positions), VOCAB_SIZE)
    assert np.isfinite(expected.logits).all()
    assert expected.margins.min() >= 1e-3
    assert 0 < expected.oracle_error < 1e-4
    for row in range(3):
        assert len(expected.continuation(row)) == 64
        assert expected.prompt_logits[row].argmax() == expected.continuation(row)[0]
    for position, logits in zip(expected.logit_positions, expected.logits, strict=True):
        if position >= expected.prompt_lens[0] - 1 and position + 1 < expected.lens[0]:
            assert logits.argmax() == expected.tokens[0, position + 1]


@pytest.mark.parametrize("family, case", golden_cases())
def test_no_parameter_is_left_at_its_initial_value(family: str, case: str) -> None:
    """A norm of ones or a bias of zeros would let a model pass that leaves it out."""
    tensors = open_model(ROOT / family / case).tensors
    for name in tensors.names():
        assert np.unique(tensors.read(name).astype(np.float32)).size > 1, name


def test_real_models_answer_sensibly() -> None:
    smollm2 = open_model(None).load_tokenizer()
    assert "Paris" in smollm2.decode(real_golden("smollm2").continuation(0))
    for name in ("smollm2", "gemma3"):
        expected = real_golden(name)
        assert expected.margins.min() > 5e-3
        firsts = expected.tokens[np.arange(len(expected.lens)), expected.prompt_lens]
        np.testing.assert_array_equal(expected.top_ids[:, 0], firsts)


@pytest.mark.oracle
@pytest.mark.parametrize("family, case", golden_cases())
def test_oracle_still_computes_this(family: str, case: str, tmp_path: Path) -> None:
    """Makes the case again in the oracle's environment and compares everything.

    Weights and tokens must be equal. Logits may differ by rounding, on another CPU or torch build;
    both runs then err as much as `oracle_error` says, so twice that, with a factor for its own
    scatter.
    """
    python = os.environ.get("POLYJAX_ORACLE_PYTHON")
    if not python:
        pytest.skip("POLYJAX_ORACLE_PYTHON names no Python with torch and transformers")
    script = Path(__file__).parents[2] / "scripts" / "make_goldens"
    command = [python, str(script), f"--only={family}/{case}", f"--out={tmp_path}"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    kept = golden(family, case)
    remade = tmp_path / family / case
    with np.load(remade / "expected.npz") as data:
        np.testing.assert_array_equal(data["tokens"], kept.tokens)
        tolerance = 4 * kept.oracle_error
        np.testing.assert_allclose(data["logits"], kept.logits, rtol=0, atol=tolerance)
        np.testing.assert_allclose(
            data["prompt_logits"], kept.prompt_logits, rtol=0, atol=tolerance
        )
    for path in sorted(kept.path.iterdir()):
        if path.name != "expected.npz":
            assert (remade / path.name).read_bytes() == path.read_bytes(), path.name
