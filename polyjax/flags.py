"""Flags that mirror the fields of config dataclasses, spelled as the field's users are used to.

    flags.define(EngineConfig, help_texts=flags.ENGINE_HELP)
    app.run(main, flags_parser=flags.parse)
    config = flags.read(EngineConfig)

Names and defaults are read off the dataclass, so there is one source of truth. On the command line
dashes may stand for underscores: --max-model-len is --max_model_len.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from polyjax.core.errors import ConfigError
from polyjax.engine.types import EngineConfig

FLAGS = absl_flags.FLAGS

_SHORT_NAMES = {"-tp": "--tensor_parallel_size", "-ep": "--expert_parallel_size"}

ENGINE_HELP: Mapping[str, str] = {
    "model": "Hub id, Hugging Face directory, GGUF file or packaged model; also as an argument "
    "without a flag. Default: SmolLM2-135M-Instruct, fetched once.",
    "served_model_name": "Name of the model in the API; default: the model's own.",
    "tokenizer": "Directory or file to take the tokenizer from; default: the model.",
    "load_format": "auto, safetensors, gguf, or dummy (random weights of the model's shapes).",
    "dtype": "auto, float32, bfloat16 or float16; auto is float32 on a CPU, else the checkpoint's.",
    "seed": "Seed of random weights and of requests that bring none.",
    "block_size": "Tokens per KV page, a power of two up to 256; 0: the platform's default.",
    "max_model_len": "Longest prompt and answer together, in tokens; 0: the model's.",
    "max_num_seqs": "Most sequences in a step; 0: the platform's default.",
    "max_num_batched_tokens": "Most new tokens in a step; 0: the platform's default.",
    "gpu_memory_utilization": "Share of the device's memory to use, in (0, 1].",
    "num_kv_pages": "Pages of the KV pool; 0: as many as fit.",
    "enable_prefix_caching": "Reuse the KV pages of prompts that begin alike.",
    "tensor_parallel_size": "Devices that share each layer (also -tp).",
    "expert_parallel_size": "Devices that share each layer's experts (also -ep).",
    "plan": "Plan to start with: default, reference (plain JAX), or a plan file.",
    "tables": "Tuning tables to choose kernels from: auto, none, or a directory.",
    "max_programs": "Most step programs to compile; 0: the platform's default.",
    "compile_cache_dir": "Where compiled programs are kept; default: the user's cache directory.",
    "fail_on_recompile": "End with an error if anything is compiled after start-up.",
    "resident_plans": "Plans kept loaded, so that rolling back takes one step.",
    "max_queued_requests": "Requests beyond this queue length get 503.",
    "state_dir": "Directory that keeps the last good plan; a restart comes back on it.",
    "audit_log": "File to which each change of plans, limits and leases is appended as JSON.",
    "watch_steps": "Steps after which a new plan has proved itself; until then it is rolled back "
    "where its results are not finite or, if it claimed to be faster, its steps are slower.",
    "tune_duty": "Share of the time, in [0, 1], that a background tuner may lease the device.",
}


class _NumberParser(absl_flags.FloatParser):
    """Numbers; 0.5% is 0.005."""

    def convert(self, argument: float | str) -> float:
        if isinstance(argument, str) and argument.endswith("%"):
            return float(argument[:-1]) / 100
        return super().convert(argument)


def define(config_type: type, help_texts: Mapping[str, str] | None = None) -> None:
    """Defines one flag per field. Help is the field's metadata["help"], else from `help_texts`."""
    types = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        help_text = field.metadata.get("help") or (help_texts or {})[field.name]
        _define_one(field.name, types[field.name], field.default, help_text)
        absl_flags.declare_key_flag(field.name)


def _define_one(name: str, kind: Any, default: Any, help_text: str) -> None:
    if kind is bool:
        absl_flags.DEFINE_bool(name, default, help_text)
    elif kind is int:
        absl_flags.DEFINE_integer(name, default, help_text)
    elif kind is float:
        absl_flags.DEFINE(_NumberParser(), name, default, help_text)
    elif kind == tuple[str, ...]:
        absl_flags.DEFINE_list(name, list(default), help_text)
    elif kind in (str, str | None):
        absl_flags.DEFINE_string(name, default, help_text)
    else:
        raise TypeError(f"no flag can hold {name}: {kind}")


def read[C](config_type: type[C], **overrides: Any) -> C:
    """Returns the config that the parsed flags describe. Raises ConfigError as its type does."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):  # type: ignore[arg-type]  # C is a dataclass
        value = getattr(FLAGS, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return config_type(**{**values, **overrides})


def read_engine(arguments: Sequence[str]) -> EngineConfig:
    """Returns the engine's config; the model may be an argument without a flag."""
    model = FLAGS.model
    if len(arguments) > 1 or (arguments and model is not None):
        raise ConfigError(f"more than one model: {' '.join([model or '', *arguments]).strip()}")
    return read(EngineConfig, model=arguments[0] if arguments else model)


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the command line and returns what is no flag. Exits where a flag is unknown."""
    FLAGS.set_gnu_getopt(True)  # flags may follow the model's name
    rest: list[str] = app.parse_flags_with_usage(normalise(argv))
    return rest


def normalise(argv: Sequence[str]) -> list[str]:
    """Spells flags the absl way: underscores, --noflag, no short names. Values stay as they are."""
    spelled: list[str] = []
    for position, argument in enumerate(argv):
        if argument == "--":
            return [*spelled, *argv[position:]]
        name, equals, value = argument.partition("=")
        name = _SHORT_NAMES.get(name, name)
        if name.startswith("--"):
            bare = name[2:].replace("-", "_")
            if bare.startswith("no_") and bare not in FLAGS:
                bare = "no" + bare[3:]
            name = f"--{bare}"
        spelled.append(name + equals + value)
    return spelled
