"""Model families. Adding one is one file here and one line in FAMILIES.

config = models.family("LlamaForCausalLM").Config.from_hf(config_json)
abstract = models.abstract(config)   # shapes only, nothing is allocated
params = load(abstract.specs)        # a flat tuple of arrays, in the order of specs
model = abstract.merge(params)       # inside a trace: the arrays back in the module
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from models.blocks.decoder import model_of
from polyjax.core.arrays import num_bytes
from polyjax.core.errors import ModelError
from polyjax.core.mesh import ONE_DEVICE, MeshPlan, Placement
from polyjax.core.model import Model, ModelConfig, ParamSpec

FAMILIES: dict[str, str] = {
    "DeepseekV3ForCausalLM": "models.deepseek_v3",
    "Gemma3ForCausalLM": "models.gemma3",
    "Gemma3ForConditionalGeneration": "models.gemma3",
    "KimiK25ForConditionalGeneration": "models.kimi_k2",
    "KimiK2ForCausalLM": "models.kimi_k2",
    "LlamaForCausalLM": "models.llama",
    "MiniMaxM2ForCausalLM": "models.minimax_m2",
    "MistralForCausalLM": "models.llama",
    "MixtralForCausalLM": "models.mixtral",
    "Qwen2ForCausalLM": "models.qwen2",
    "Qwen3ForCausalLM": "models.qwen3",
    "Qwen3MoeForCausalLM": "models.qwen3_moe",
    "SmolLM3ForCausalLM": "models.llama",
}
"""Hugging Face architecture name -> module with `Config` and `Model`."""


def family(architecture: str) -> ModuleType:
    """Returns the module of an architecture. Raises ModelError naming the supported ones."""
    if architecture not in FAMILIES:
        raise ModelError(
            "config.json",
            [
                f"architecture {architecture!r} is not supported; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            ],
        )
    return importlib.import_module(FAMILIES[architecture])


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """A model without its arrays.

    `specs` maps parameter paths, e.g. "layers.0.attention.qkv", to their declaration; its order is
    the order of the flat tuple that holds the arrays.
    """

    graphdef: nnx.GraphDef[Any]
    specs: dict[str, ParamSpec]
    _paths: tuple[tuple[Any, ...], ...]

    def merge(self, params: Sequence[jax.Array]) -> Model:
        """Returns the module holding `params`, the flat tuple; for use inside a trace."""
        leaves = zip(self._paths, map(nnx.Param, params), strict=True)
        return nnx.merge(self.graphdef, nnx.from_flat_state(leaves))


def abstract(
    config: ModelConfig, dtype: str = "float32", place: Placement = ONE_DEVICE
) -> AbstractModel:
    """Returns the structure of the model `config` describes; allocates nothing.

    `dtype` is that of weights and activations; `place` fixes how activations lie on a mesh.
    """
    build = model_of(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config, dtype=dtype, place=place)))
    flat = nnx.to_flat_state(state)
    specs = {
        ".".join(map(str, path)): leaf.get_metadata("spec")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    }
    return AbstractModel(graphdef, specs, flat.paths)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, known from the config alone.

    `token_bytes` holds, for each KV group, its window (0 for none) and the bytes of one token over
    all of its layers.
    """

    weight_bytes: int
    token_bytes: tuple[tuple[int, int], ...]

    def kv_bytes(self, context_tokens: int) -> int:
        """Bytes that one sequence's cache needs: windows keep only their last tokens."""
        kept = lambda window: min(context_tokens, window or context_tokens)  # noqa: E731
        return sum(kept(window) * size for window, size in self.token_bytes)


def memory(
    config: ModelConfig,
    dtype: str = "float32",
    plan: MeshPlan | None = None,
    specs: Mapping[str, ParamSpec] | None = None,
) -> Memory:
    """Returns what weights and KV cache take on each device of `plan`, or on one; loads nothing.

    `specs` are those of `abstract`, where the caller has them: a large model takes a second.
    """
    plan = plan or MeshPlan()
    specs = abstract(config, dtype).specs if specs is None else specs

    def size(shape: Sequence[int], axes: Sequence[str | None], dtype: str) -> int:
        return num_bytes(shape, dtype) // plan.ways(axes)

    groups = [(group, group.page_shape(page_size=1)) for group in config.kv_groups()]
    return Memory(
        sum(size(spec.shape, spec.axes, spec.dtype or dtype) for spec in specs.values()),
        tuple(
            (group.window, len(group.layers) * size((1, *shape), group.axes, dtype))
            for group, shape in groups
        ),
    )
