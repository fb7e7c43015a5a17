"""docs/adding_a_family.md keeps its promise: its one file and one line make a family."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import models
from polyjax.core.errors import ModelError
from tests.goldens import golden
from tests.models.paged import PAGE_SIZE, PAGES_PER_ROW, load
from tests.server import serving

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_family.md"
CONFIG: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's file as models.toy, and its line in FAMILIES."""
    text = PAGE.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    line = re.search(r'^"(\w+)": "(models\.toy)",$', text, re.MULTILINE)
    assert code and line
    file = tmp_path / "toy.py"
    file.write_text(code[1])
    spec = importlib.util.spec_from_file_location("models.toy", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models.toy", module)
    monkeypatch.setitem(models.FAMILIES, line[1], line[2])
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(toy: Any, tmp_path: Path) -> Path:
    """A directory with random weights under the names that the family's specs ask for."""
    rng = np.random.default_rng(0)
    specs = models.abstract(toy.Config.from_hf(CONFIG)).specs
    sources = {s.name: s.shape for spec in specs.values() for s in spec.sources}
    tensors = {
        name: rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5
        for name, shape in sources.items()
    }
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    np.savez(tmp_path / "weights.npz", **tensors)
    return folder


def forward(weights: Any, tokens: list[int]) -> np.ndarray:
    """The toy in numpy, float64 and without a cache: logits [T,V]."""
    w = {name: weights[name].astype(np.float64) for name in weights.files}
    norm = lambda x, g: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * g  # noqa: E731
    position = np.arange(len(tokens))
    angle = position[:, None] * 1e4 ** (-np.arange(0, 4, 2) / 4)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x.reshape(len(tokens), -1, 4), 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(2):
        p = f"model.layers.{layer}."
        project = lambda y, name, p=p: y @ w[f"{p}{name}_proj.weight"].T  # noqa: E731
        y = norm(x, w[f"{p}input_layernorm.weight"])
        q, k = (rotate(project(y, f"self_attn.{n}")) for n in "qk")
        v = project(y, "self_attn.v").reshape(len(tokens), -1, 4)
        scores = np.einsum("tnh,snh->nts", q, k.repeat(2, axis=1)) / 2
        scores = np.where(position[:, None] >= position, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("nts,snh->tnh", scores, v.repeat(2, axis=1)).reshape(len(tokens), -1)
        gate, up = project(y, "mlp.gate"), project(y, "mlp.up")
        hidden = gate / (1 + np.exp(-gate)) * up
        x = x + project(attended, "self_attn.o") + project(hidden, "mlp.down")
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_toy_family_computes_what_it_says(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, rows=2)
    rows = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2, 7, 1, 8]]
    with np.load(tmp_path / "weights.npz") as weights:
        for logits, tokens in zip(model.feed(rows, chunk=5), rows, strict=True):
            np.testing.assert_allclose(logits, forward(weights, tokens), atol=1e-4)


def test_toy_family_shows_its_workloads_and_memory(toy: Any) -> None:
    config = toy.Config.from_hf(CONFIG)
    bucket = (1, 3, PAGES_PER_ROW, PAGE_SIZE)
    seen = Counter(w.op for w in config.workloads(*bucket, "bfloat16"))
    assert seen["norm_qkv_rope_write"] == seen["paged_attention"] == seen["norm_gate_up"] == 2
    assert seen["lm_head"] == 1
    attention = next(w for w in config.workloads(*bucket, "bfloat16") if w.op == "paged_attention")
    assert [attention[axis] for axis in "BTNKHCZ"] == [3, 1, 4, 2, 4, PAGES_PER_ROW, PAGE_SIZE]
    assert models.memory(config, "bfloat16").kv_bytes(10) == 2 * 2 * 2 * 2 * 4 * 10


def test_toy_family_refuses_what_it_does_not_have(toy: Any) -> None:
    with pytest.raises(ModelError, match="parallel_layers is False"):
        toy.Config.from_hf({**CONFIG, "parallel_layers": False})


# Runs first in every Python process that finds it; only the engine process needs the family.
SITECUSTOMIZE = """
import sys
if "polyjax.engine.process" in sys.orig_argv:
    import importlib.util
    import models
    spec = importlib.util.spec_from_file_location("models.toy", {file!r})
    sys.modules["models.toy"] = importlib.util.module_from_spec(spec)
    models.FAMILIES["ToyForCausalLM"] = "models.toy"
    spec.loader.exec_module(sys.modules["models.toy"])
"""


def test_toy_family_is_served(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):  # any tokenizer: prompts are ids
        shutil.copy(golden("llama", "gqa").path / name, checkpoint / name)
    (tmp_path / "site").mkdir()
    startup = SITECUSTOMIZE.format(file=str(tmp_path / "toy.py"))
    (tmp_path / "site" / "sitecustomize.py").write_text(startup)
    monkeypatch.setattr(serving, "ROOT", f"{serving.ROOT}{os.pathsep}{tmp_path / 'site'}")
    flags = ("--max_num_seqs=2", "--max_num_batched_tokens=16", "--max_programs=3")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with serving.running(
        checkpoint, (*flags, f"--compile_cache_dir={tmp_path / 'cache'}"), ready_limit_s=300.0
    ) as server:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        events = server.stream("/v1/completions", {**body, "ignore_eos": True})
    told = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert len(told) == 12
    with np.load(tmp_path / "weights.npz") as weights:
        logits = forward(weights, prompt + told)[len(prompt) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(told)[:, None], axis=1)[:, 0]
    assert (logits.max(axis=1) - chosen < 1e-4).all()
