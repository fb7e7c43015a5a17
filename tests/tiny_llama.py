"""A tiny Llama for tests: its config, its programs' requests, its plain forward pass."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from polyjax.compiler.program import NO_BUCKET, Kind, ProgramKey, ProgramRequest
from polyjax.compiler.state import StateSpec
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.mesh import MeshPlan
from polyjax.core.model import ModelConfig, StepBatch
from polyjax.core.op import REFERENCE
from polyjax.core.ops import LM_HEAD
from polyjax.core.plan import Plan

VOCAB, PAGE_SIZE, MAX_TOKENS = 256, 8, 128
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LADDER = BucketLadder(
    decode=(Bucket(1, 1, 16), Bucket(1, 4, 4), Bucket(1, 4, 16)),
    prefill=(Bucket(16, 1, 16), Bucket(16, 2, 4)),
    sampler_sequences=(1, 2, 4),
)


def config() -> ModelConfig:
    built: ModelConfig = models.family("LlamaForCausalLM").Config.from_hf(HF_CONFIG)
    return built


def write_model(folder: Path) -> Path:
    """A model directory that `load_format="dummy"` can serve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    return folder


def write_plan(path: Path, **changes: Any) -> Path:
    """A plan with a ladder small enough that all its programs compile in seconds."""
    data = Plan(ladder=LADDER).to_json() | changes
    del data["mesh"]
    path.write_text(json.dumps(data))
    return path


def spec(num_pages: int = 12, num_slots: int = 4) -> StateSpec:
    return StateSpec(config(), "float32", PAGE_SIZE, (num_pages,), num_slots, scratch_pages=8)


def request(kind: Kind, bucket: Bucket = NO_BUCKET, **changes: Any) -> ProgramRequest:
    options = tuple(changes.get("compiler_options", {}).items())
    plan = Plan(mesh=changes.get("mesh", MeshPlan()), compiler_options=options)
    return ProgramRequest(changes.get("spec", spec()), plan, ProgramKey(kind, bucket))


def small_weights(seed: int = 0) -> tuple[jax.Array, ...]:
    """Random parameters large enough that logits differ clearly."""
    rng = np.random.default_rng(seed)
    specs = models.abstract(config(), "float32").specs.values()
    return tuple(jnp.asarray(rng.normal(0, 0.3, s.shape).astype(np.float32)) for s in specs)


@functools.cache
def _plain_forward() -> Any:
    abstract = models.abstract(config(), "float32")
    pages = MAX_TOKENS // PAGE_SIZE

    def forward(params: tuple[jax.Array, ...], tokens: jax.Array, length: jax.Array) -> jax.Array:
        lengths = length[None]
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        batch = StepBatch(tokens[None], lengths, lengths, (table,), (jnp.zeros(1, jnp.int32),))
        group = config().kv_groups()[0]
        kv = tuple(
            jnp.zeros((pages + 1, *group.page_shape(PAGE_SIZE))) for _ in range(len(group.layers))
        )
        model = abstract.merge(params)
        hidden, _ = model(REFERENCE, batch, kv)
        norm, weight, static = model.head()
        return REFERENCE(LM_HEAD, hidden[0], norm, weight, **static)

    return jax.jit(forward)


def plain_logits(params: tuple[jax.Array, ...], token_ids: list[int]) -> np.ndarray:
    """[len(token_ids),V] logits by the references: one sequence, one pass, no cache, no batch."""
    padded = np.zeros(MAX_TOKENS, np.int32)
    padded[: len(token_ids)] = token_ids
    logits = _plain_forward()(params, padded, jnp.int32(len(token_ids)))
    return np.array(logits)[: len(token_ids)]
