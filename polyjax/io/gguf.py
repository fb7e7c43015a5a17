"""Reads the GGUF container: metadata and tensors as the file names them, dequantized one at a time.

Layout from the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. The header
is parsed here because a vocabulary of 262,144 strings takes the `gguf` package's reader seconds and
because the HTTP processes need no more than the header; blocks are dequantized by that package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyjax.core.errors import ModelError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One stored tensor. `shape` is rows first, as in numpy; `type_code` is ggml's type."""

    name: str
    shape: tuple[int, ...]
    type_code: int
    offset_bytes: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as float32. Raises ModelError if the file cannot give it."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type_code)
        with self.path.open("rb") as file:
            file.seek(tensor.offset_bytes)
            data = file.read(tensor.num_bytes)
        if len(data) != tensor.num_bytes:
            raise ModelError(str(self.path), [f"{name}: the file was cut off"])
        try:
            values = dequantize(np.frombuffer(data, np.uint8).reshape(tensor.shape[0], -1), kind)
        except NotImplementedError as error:
            raise ModelError(str(self.path), [f"{name}: cannot dequantize {kind.name}"]) from error
        return np.require(values, np.float32, "W").reshape(tensor.shape)


class _Cursor:
    """Reads values one after the other; running past the end raises struct.error."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return str(self._take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise ValueError(f"unknown metadata type {kind}")

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            item = np.dtype("<" + _SCALARS[kind])
            return np.frombuffer(self._take(count * item.itemsize), item).tolist()
        return [self.value(kind) for _ in range(count)]

    def _take(self, num_bytes: int) -> bytes:
        data = self.data[self.at : self.at + num_bytes]
        if len(data) != num_bytes:
            raise struct.error("the file was cut off")
        self.at += num_bytes
        return data


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file. Raises ModelError if it is none, cut off or too new."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(str(path), [str(error.strerror)]) from error
    except (struct.error, ValueError) as error:  # Unicode errors and an empty mapping too
        raise ModelError(str(path), [f"not a readable GGUF file: {error}"]) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; this reads little-endian versions 2 and 3")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    raw = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    problems: list[str] = []
    for name, shape, code, offset in raw:
        num_bytes = _stored_bytes(shape, code)
        if num_bytes is None:
            problems.append(f"{name}: unknown tensor type {code}")
            continue
        tensors[name] = GGUFTensor(name, shape, code, start + offset, num_bytes)
        if start + offset + num_bytes > len(data):
            problems.append(f"{name}: its data lies past the end of the file, which was cut off")
    if problems:
        raise ModelError(str(path), problems)
    return GGUFFile(path, metadata, tensors)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    rank = cursor.scalar("I")
    if not 1 <= rank <= 4:
        raise ValueError(f"tensor {name} has {rank} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _stored_bytes(shape: tuple[int, ...], type_code: int) -> int | None:
    """Bytes of a tensor in the file, or None for a type the `gguf` package does not know."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_code)]
    except (KeyError, ValueError):
        return None
    return math.prod(shape) * block_bytes // block_values
