"""Writes any opened model as a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from polyjax.core.errors import ConfigError
from polyjax.io.files import ModelFiles, Progress, no_progress
from polyjax.io.safetensors import write_safetensors

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(
    files: ModelFiles, out: Path, dtype: str = "float32", progress: Progress = no_progress
) -> None:
    """Writes `files` to the new directory `out`, all weights as `dtype`.

    One tensor is in memory at a time. The directory is written beside its place and renamed, so it
    exists whole or not at all. Raises ConfigError if `out` exists or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"--out={out} exists; remove it or name another directory")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise ConfigError(f"--out={out}: cannot write there: {error.strerror}") from error
    try:
        _write_text_parts(files, scratch, dtype)
        _write_weights(files, scratch / "model.safetensors", DTYPES[dtype], progress)
        scratch.chmod(0o755)  # mkdtemp makes it private
        scratch.rename(out)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--out={out}: {error.strerror}") from error
        raise


def _write_text_parts(files: ModelFiles, folder: Path, dtype: str) -> None:
    config = {**files.config, "torch_dtype": dtype}
    for stale in ("dtype", "quantization_config", "text_config"):  # no longer true of these weights
        config.pop(stale, None)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", files.generation_config)
    settings = {k: v for k, v in files.tokenizer_config.items() if k != "chat_template"}
    _write_json(folder / "tokenizer_config.json", settings)
    files.open_tokenizer().save(str(folder / "tokenizer.json"))
    for name, source in files.chat_templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(files: ModelFiles, path: Path, dtype: np.dtype, progress: Progress) -> None:
    tensors = files.tensors
    names = sorted(tensors.names())
    written = 0

    def read(name: str) -> np.ndarray:
        nonlocal written
        written += 1
        progress("writing weights", written, len(names))
        return tensors.read(name).astype(dtype, copy=False)

    with path.open("wb") as file:
        write_safetensors(file, [(name, dtype, tensors.shape(name)) for name in names], read)
        os.fsync(file.fileno())
