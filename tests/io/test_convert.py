"""scripts/convert: a directory that reads exactly like what it came from, whole or not at all."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from polyjax.core.errors import ConfigError, ModelError
from polyjax.io.convert import convert
from polyjax.io.files import ModelFiles, open_model
from tests.goldens import ROOT
from tests.io.tiny_gguf import llama_tensors, write_gguf

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert"


def assert_same_tensors(left: ModelFiles, right: ModelFiles) -> None:
    assert sorted(left.tensors.names()) == sorted(right.tensors.names())
    for name in left.tensors.names():
        np.testing.assert_array_equal(left.tensors.read(name), right.tensors.read(name))


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def large_path(tmp_path: Path) -> Iterator[Path]:
    """Like tmp_path, but removed at once: pytest keeps those of the last three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_default_model_converts_to_the_same_model(large_path: Path) -> None:
    """SmolLM2's real weights, through the script: the Hugging Face path reads what GGUF holds."""
    out = large_path / "smollm2"
    finished = run(f"--out={out}")
    assert finished.returncode == 0, finished.stderr
    source, written = open_model(None), open_model(out)
    assert_same_tensors(source, written)
    assert written.config == source.config
    assert written.eos_token_ids == source.eos_token_ids == (2,)
    assert written.chat_template == source.chat_template
    text = "Hello, naïve 🦜 1234\n\n<|im_start|>user"
    before, after = source.load_tokenizer(), written.load_tokenizer()
    assert before.encode(text) == after.encode(text)
    assert before.special_tokens == after.special_tokens
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("case", ["llama/sharded", "deepseek_v3/fp8", "kimi_k2/k25_text"])
def test_directory_converts_to_the_same_model(tmp_path: Path, case: str) -> None:
    source = open_model(ROOT / case)
    convert(source, tmp_path / "out")
    written = open_model(tmp_path / "out")
    assert_same_tensors(source, written)
    assert (
        written.config["torch_dtype"] == "float32" and "quantization_config" not in written.config
    )
    assert written.config["architectures"] == source.config["architectures"]


def test_bfloat16_is_half_as_large(tmp_path: Path) -> None:
    source = open_model(ROOT / "llama" / "gqa")
    convert(source, tmp_path / "out", "bfloat16")
    written = open_model(tmp_path / "out")
    assert written.config["torch_dtype"] == "bfloat16"
    for name in source.tensors.names():
        expected = source.tensors.read(name).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            written.tensors.read(name).view(np.uint16), expected.view(np.uint16)
        )


def test_existing_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        convert(open_model(ROOT / "llama" / "gqa"), tmp_path / "out")
    finished = run(f"--model={ROOT / 'llama' / 'gqa'}", f"--out={tmp_path / 'out'}")
    assert finished.returncode == 1 and "exists" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """A GGUF without a tokenizer fails after config.json is written."""
    files = open_model(write_gguf(tmp_path / "tiny.gguf", "llama", llama_tensors()))
    with pytest.raises(ModelError, match="tokenizer"):
        convert(files, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_unknown_model_is_one_line(tmp_path: Path) -> None:
    finished = run("--model=nowhere", f"--out={tmp_path / 'out'}")
    assert finished.returncode == 1 and "no such file" in finished.stderr
    assert "Traceback" not in finished.stderr
