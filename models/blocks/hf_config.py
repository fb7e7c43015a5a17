"""Reads a Hugging Face config.json field by field and collects every problem before raising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from models.blocks.experts import ExpertsConfig
from models.blocks.rope import KINDS, Rope
from polyjax.core.errors import ModelError

_Number = TypeVar("_Number", int, float)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


class HfConfig:
    """A view of config.json whose readers note what is wrong and return a usable value."""

    def __init__(self, config: Mapping[str, Any]):
        self.raw = config
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; a missing field and null are both `default`."""
        value = self.raw.get(name)
        return default if value is None else value

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """An int >= minimum; without a default the field is required."""
        return self._number(name, default, minimum, int)

    def number(self, name: str, default: float | None = None, minimum: float = 0.0) -> float:
        return self._number(name, default, minimum, float)

    def _number(
        self, name: str, default: _Number | None, minimum: _Number, kind: type[_Number]
    ) -> _Number:
        value = self.get(name, default)
        fits = (int,) if kind is int else (int, float)
        if value is None:
            self.problem(f"{name} is missing")
        elif isinstance(value, bool) or not isinstance(value, fits):
            self.problem(f"{name} is {value!r}, wanted type {kind.__name__}")
        elif not value >= minimum:  # NaN, too
            self.problem(f"{name} is {value}, wanted at least {minimum}")
        else:
            return kind(value)
        return kind(minimum)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.problem(f"{name} is {value!r}, wanted true or false")
            return default
        return value

    def one_of(self, name: str, supported: Sequence[Any], default: Any = None) -> Any:
        """A value among `supported`, the first of which stands in for a bad one."""
        value = self.get(name, default)
        if value not in supported:
            self.problem(f"{name} is {value!r}; supported: {', '.join(map(repr, supported))}")
            return supported[0]
        return value

    def per_layer(self, name: str, layers: int, default: Sequence[Any]) -> tuple[Any, ...]:
        """A list with one entry a layer."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple) or len(value) != layers:
            self.problem(f"{name} wants one entry for each of the {layers} layers")
            return tuple(default)
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """An int, a list of ints or null."""
        value = self.get(name, ())
        found = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            self.problem(f"{name} is {value!r}, wanted an int or a list of ints")
            return ()
        return found

    def dtype(self) -> str:
        """The checkpoint's dtype name (`dtype`, or `torch_dtype` in older files)."""
        value = str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")
        if value not in ("float32", "bfloat16", "float16"):
            self.problem(f"dtype is {value!r}; supported: float32, bfloat16, float16")
            return "float32"
        return value

    def rope_parameters(self) -> Mapping[str, Any]:
        """`rope_parameters`; older spellings become that form."""
        found = self.get("rope_parameters", self.get("rope_scaling", {}))
        if not isinstance(found, Mapping):
            self.problem(f"rope_parameters are {found!r}, wanted an object")
            found = {}
        parameters = dict(found)
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in self.raw:
                parameters.setdefault(name, self.raw[name])
        if "rope_type" not in parameters and "type" in parameters:
            parameters["rope_type"] = parameters["type"]
        return parameters

    def rope(
        self, dim: int, parameters: Mapping[str, Any] | None = None, default_theta: float = 1e4
    ) -> Rope:
        """The rotary embedding of heads of `dim` dims, of which partial_rotary_factor rotate."""
        found = HfConfig(self.rope_parameters() if parameters is None else parameters)
        context = self.integer("max_position_embeddings")
        kind = found.one_of("rope_type", KINDS, "default")
        original = found.integer("original_max_position_embeddings", context)
        factor = 1.0
        if kind == "yarn" and found.get("factor") is None:
            factor = context / original
        elif kind != "default":
            factor = found.number("factor", minimum=1.0)
        attention = found.get("attention_factor")
        rope = Rope(
            dim=int(dim * found.number("partial_rotary_factor", 1.0)) // 2 * 2,
            theta=found.number("rope_theta", default_theta, minimum=1.0),
            kind=kind,
            factor=factor,
            original_context=original,
            low_freq_factor=found.number("low_freq_factor", 1.0),
            high_freq_factor=found.number("high_freq_factor", 4.0),
            beta_fast=found.number("beta_fast", 32.0),
            beta_slow=found.number("beta_slow", 1.0),
            mscale=found.number("mscale", 0.0),
            mscale_all_dim=found.number("mscale_all_dim", 0.0),
            attention_factor=None if attention is None else float(attention),
            truncate=found.flag("truncate", True),
        )
        self.problems += [f"rope_parameters: {text}" for text in found.problems]
        return rope

    def decoder_fields(self, activation: str = "hidden_act") -> dict[str, Any]:
        """The fields of `DecoderConfig` that every decoder's config.json spells alike.

        `activation` names the field of the activation.
        """
        embed_dim, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            self.problem(
                f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        head_dim = self.integer("head_dim", embed_dim // heads or 1)
        if head_dim % 2:
            self.problem(f"head_dim={head_dim} is odd; rotary embeddings need pairs")
        self._check_quantization()
        return {
            "vocab_size": self.integer("vocab_size"),
            "embed_dim": embed_dim,
            "ffw_dim": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "max_context_tokens": self.context_tokens(),
            "eos_token_ids": self.integers("eos_token_id"),
            "dtype": self.dtype(),
            "activation": self.one_of(activation, _ACTIVATIONS, "silu"),
            "tied_embeddings": self.flag("tie_word_embeddings"),
        }

    def _check_quantization(self) -> None:
        """Block-scaled float8 is dequantized as it is read, before a family sees it."""
        found = self.get("quantization_config")
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        blocks = isinstance(found, Mapping) and found.get("weight_block_size")
        if method is not None and not (method == "fp8" and blocks):
            self.problem(
                f"quantization_config: method {method!r}; supported: 'fp8' with weight_block_size"
            )

    def check_experts(self, experts: ExpertsConfig) -> None:
        """Notes numbers of a mixture that contradict each other."""
        count, groups = experts.num_experts, experts.groups
        if count % groups or (groups > 1 and count < 2 * groups):
            self.problem(f"{count} experts do not make {groups} groups of at least two")
            return
        if experts.kept_groups > groups:
            self.problem(f"topk_group={experts.kept_groups} exceeds n_group={groups}")
        if experts.per_token > count // groups * min(experts.kept_groups, groups):
            self.problem(
                f"num_experts_per_tok={experts.per_token} exceeds the experts a token may choose"
            )

    def context_tokens(self) -> int:
        """The longest context: max_position_embeddings, stretched where rope scaling adds to it."""
        context, parameters = self.integer("max_position_embeddings"), self.rope_parameters()
        kind, factor = parameters.get("rope_type"), parameters.get("factor")
        if kind in ("linear", "dynamic") and isinstance(factor, int | float):
            return int(context * max(factor, 1.0))
        original = parameters.get("original_max_position_embeddings")
        if kind == "yarn" and isinstance(factor, int | float) and isinstance(original, int):
            return max(context, int(original * factor))
        return context

    def windows(self, layers: int, default_use: bool = True) -> tuple[int, ...]:
        """Each layer's sliding window in tokens, 0 for the whole context.

        `layer_types` decides where present; else every layer from `max_window_layers` on (Qwen2),
        or every layer (Mistral). `default_use` is what a missing `use_sliding_window` means.
        """
        if self.get("sliding_window") is None or not self.flag("use_sliding_window", default_use):
            return (0,) * layers
        window = self.integer("sliding_window")
        first = self.integer("max_window_layers", 0, minimum=0)
        plain = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        kinds = self.per_layer("layer_types", layers, plain)
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown:
            self.problem(f"layer_types has {unknown}; supported: full_attention, sliding_attention")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def finish(self) -> None:
        """Raises ModelError listing every problem found so far."""
        if self.problems:
            raise ModelError("config.json", self.problems)
