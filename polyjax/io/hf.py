"""Opens a Hugging Face model directory, and fetches one from the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError, ModelError
from polyjax.io.files import ModelFiles, Progress, TensorReader
from polyjax.io.fp8 import BlockScaledReader
from polyjax.io.safetensors import Entry, SafetensorsReader, read_header

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
# Where checkpoints of models with images or sound keep their language model.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("lm_head.", "lm_head."),
)


def open_directory(path: Path, name: str | None = None) -> ModelFiles:
    """Opens a directory holding config.json, safetensors and a tokenizer.

    Raises ModelError for a missing or malformed config.json; headers of weights and the tokenizer
    are read when first asked for.
    """
    if not (path / "config.json").is_file():
        raise ModelError(str(path), ["config.json is missing: not a Hugging Face model directory"])
    config = read_json_object(path / "config.json")
    is_nested = isinstance(config.get("text_config"), dict)
    if is_nested:
        config = {**config, **_text_config(config)}
    tokenizer_config = _optional_json(path / "tokenizer_config.json")
    special_tokens = _optional_json(path / "special_tokens_map.json")
    return ModelFiles(
        name=name or path.resolve().name,
        path=path,
        config=config,
        generation_config=_optional_json(path / "generation_config.json"),
        tokenizer_config={**special_tokens, **tokenizer_config},
        chat_templates=read_chat_templates(path, tokenizer_config),
        open_tensors=lambda: open_tensors(path, config, is_nested),
        open_tokenizer=lambda: _open_tokenizer(path),
    )


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a nested config, except what only the outer part sets.

    The outer architecture name stays in force: it names the model.
    """
    text = config["text_config"]
    kept = {key: value for key, value in text.items() if value is not None or key not in config}
    kept.pop("architectures", None)
    return kept


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ModelError if it is not one."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(str(path), [str(error.strerror)]) from error
    except ValueError as error:  # JSON and Unicode errors are ValueErrors
        raise ModelError(str(path), [f"not valid JSON: {error}"]) from error
    if not isinstance(data, dict):
        raise ModelError(str(path), [f"holds a JSON {type(data).__name__}, not an object"])
    return data


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def read_chat_templates(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Returns templates by name. A chat_template.jinja file wins over tokenizer_config.json's.

    Raises ModelError if a template is neither a string nor a list of {name, template}.
    """
    templates: dict[str, str] = {}
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, str):
        templates["default"] = inline
    elif inline is not None:
        try:
            templates.update({str(item["name"]): str(item["template"]) for item in inline})
        except (KeyError, TypeError) as error:
            problem = "chat_template is neither a string nor a list of {name, template}"
            raise ModelError(str(path / "tokenizer_config.json"), [problem]) from error
    files = {"default": path / "chat_template.jinja"}
    files.update({file.stem: file for file in path.glob("additional_chat_templates/*.jinja")})
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(str(file), [f"cannot be read as UTF-8 text: {error}"]) from error
    return templates


def _open_tokenizer(path: Path) -> Any:
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        problem = "tokenizer.json is missing; AutoTokenizer(...).save_pretrained(...) writes it"
        raise ModelError(str(path), [problem])
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(str(file), [f"does not parse: {error}"]) from error


# Weights


def open_tensors(path: Path, config: Mapping[str, Any], is_nested: bool = False) -> TensorReader:
    """Returns the reader of a directory's weights: one file, or the shards its index names.

    Block-scaled float8 weights read as float32. Raises ModelError listing every missing shard,
    truncated file and tensor that the index promises but no shard holds.
    """
    index_path = path / "model.safetensors.index.json"
    if index_path.is_file():
        entries, problems = _sharded_entries(path, read_json_object(index_path))
    elif (path / "model.safetensors").is_file():
        entries, problems = read_header(path / "model.safetensors")
    else:
        raise ModelError(str(path), [_no_weights(path)])
    if problems:
        raise ModelError(str(path), problems)
    names = _text_names(entries) if is_nested else {name: name for name in entries}
    hidden = _prediction_layers(config)
    names = {name: stored for name, stored in names.items() if not name.startswith(hidden)}
    reader: TensorReader = SafetensorsReader({name: entries[names[name]] for name in names})
    quantization = config.get("quantization_config")
    if not quantization:
        return reader
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not block:
        kind = quantization.get("quant_method")
        problem = f"weights quantized by {kind!r} cannot be read (fp8 with weight_block_size can)"
        raise ModelError(str(path / "config.json"), [problem])
    return BlockScaledReader(reader, tuple(block))


def _no_weights(path: Path) -> str:
    wanted = "neither model.safetensors nor model.safetensors.index.json is there"
    others = sorted(file.name for file in path.glob("*.bin")) + sorted(
        file.name for file in path.glob("*.gguf")
    )
    if others:
        advice = "name a GGUF file itself; save .bin files again as safetensors"
        return f"{wanted}, but {', '.join(others[:4])}: {advice}"
    return wanted


def _sharded_entries(path: Path, index: Mapping[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        return {}, ["model.safetensors.index.json: no weight_map object"]
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for shard in sorted(set(map(str, weight_map.values()))):
        if "/" in shard or "\\" in shard:
            problems.append(
                f"model.safetensors.index.json: shard {shard!r} is not a plain file name"
            )
            continue
        if not (path / shard).is_file():
            wanted = sum(1 for file in weight_map.values() if file == shard)
            problems.append(f"{shard} is missing ({wanted} tensors lie in it)")
            continue
        found, defects = read_header(path / shard)
        problems += defects
        if not defects:
            expected = {name for name, file in weight_map.items() if file == shard}
            problems += [f"{shard}: {name} is missing" for name in sorted(expected - set(found))]
        entries.update(found)
    return entries, problems


def _text_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns plain name -> stored name of the language model's tensors in a checkpoint of more."""
    names: dict[str, str] = {}
    for full in stored:
        for prefix, plain in _TEXT_PREFIXES:
            if full.startswith(prefix):
                names[plain + full.removeprefix(prefix)] = full
                break
    return names


def _prediction_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of DeepSeek's layers that predict further tokens: training aids, not the model."""
    layers, extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(layers, int) or not isinstance(extra, int):
        return ()
    return tuple(f"model.layers.{layers + i}." for i in range(extra))


# Hub


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def fetch_from_hub(name: str, progress: Progress) -> Path:
    """Returns the directory of a hub model in huggingface_hub's cache, downloading what is missing.

    Without network the cached copy is used. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN mean what they
    mean to huggingface_hub. Raises ConfigError where it is not installed, nothing is cached and the
    network is gone, or the hub refuses.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"--model={name} looks like a hub id: pip install huggingface_hub, or name a directory"
        ) from error
    progress(f"fetching {name} from the hub", 0, 0)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # its errors share no base class, httpx's among them
        raise ConfigError(
            f"--model={name}: no such directory, and the hub gave no model of that name "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). "
            "Check the spelling, the network and HF_TOKEN, or name a local directory."
        ) from error
