"""Directories that differ from a tiny checkpoint in one respect: other numbers, or a defect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from polyjax.io.safetensors import SafetensorsReader, read_header, write_safetensors

WEIGHTS = "model.safetensors"


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    entries, problems = read_header(folder / WEIGHTS)
    assert not problems
    reader = SafetensorsReader(entries)
    return {name: reader.read(name) for name in reader.names()}


def write_variant(
    base: Path,
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """A copy of `base` with these tensors, if any, and these changes of config.json."""
    shutil.copytree(base, folder)
    if tensors is not None:
        listed = [(name, array.dtype, array.shape) for name, array in tensors.items()]
        with (folder / WEIGHTS).open("wb") as file:
            write_safetensors(file, listed, tensors.__getitem__)
    if config:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


def other_numbers(base: Path, folder: Path, seed: int = 0) -> Path:
    """The same tensors with every matrix negated or reordered at random: another model."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: array if array.ndim == 1 else rng.permutation(array) * array.dtype.type(-1)
        for name, array in read_tensors(base).items()
    }
    return write_variant(base, folder, tensors)


def truncate(folder: Path, keep: float) -> Path:
    """Cuts the weights off after this share of the file."""
    file = folder / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    return folder
