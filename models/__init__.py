"""Model families. Adding one is one file here and one line in FAMILIES.

config = models.family("LlamaForCausalLM").Config.from_hf(config_json)
abstract = models.abstract(config)   # shapes only, nothing is allocated
params = load(abstract.specs)        # a flat tuple of arrays, in the order of specs
model = abstract.merge(params)       # inside a trace: the arrays back in the module
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
from flax import nnx

from models.blocks.decoder import model_of
from polyjax.core.errors import ModelError
from polyjax.core.mesh import ONE_DEVICE, Placement
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
