"""Reads and writes safetensors files with numpy: headers first, tensors one at a time.

The format (huggingface/safetensors README): a little-endian uint64 header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the data. Parsed here rather than with the library
because a checkpoint's defects are to be listed together, and because float8 tensors are needed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from polyjax.core.errors import ModelError

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `offset_bytes` counts from the start of the file."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """Returns (entries by tensor name, problems), reading the header only; never raises."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or header_bytes > min(MAX_HEADER_BYTES, size_bytes - 8):
                return {}, [f"{path.name}: not a safetensors file, or cut off in its header"]
            header = json.loads(file.read(header_bytes))
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
    except OSError as error:
        return {}, [f"{path.name}: {error.strerror}"]
    except ValueError as error:  # JSON and Unicode errors are ValueErrors
        return {}, [f"{path.name}: header does not parse ({error})"]
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for name, item in header.items():
        if name == "__metadata__":
            continue
        try:
            entries[name] = _entry(path, item, 8 + header_bytes, size_bytes)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{path.name}: {name}: {error}")
    return entries, problems


def _entry(path: Path, item: Mapping[str, Any], data_start: int, file_bytes: int) -> Entry:
    if item["dtype"] not in DTYPES:
        raise ValueError(f"unsupported dtype {item['dtype']}")
    start, end = (int(offset) for offset in item["data_offsets"])
    entry = Entry(path, DTYPES[item["dtype"]], tuple(map(int, item["shape"])), data_start + start)
    if start < 0 or end - start != entry.num_bytes:
        raise ValueError(f"{end - start} bytes do not hold shape {list(entry.shape)}")
    if entry.offset_bytes + entry.num_bytes > file_bytes:
        raise ValueError("its data lies past the end of the file, which was cut off")
    return entry


class SafetensorsReader:
    """A `TensorReader` over one or more safetensors files."""

    def __init__(self, entries: Mapping[str, Entry]):
        self._entries = dict(entries)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        data = np.empty(entry.num_bytes, np.uint8)
        # Read rather than map: a file that shrinks under a mapping kills the process (SIGBUS).
        try:
            with entry.path.open("rb", buffering=0) as file:
                file.seek(entry.offset_bytes)
                got = _read_fully(file, memoryview(data))
        except OSError as error:
            raise ModelError(str(entry.path), [f"{name}: {error.strerror}"]) from error
        if got != entry.num_bytes:
            raise ModelError(
                str(entry.path), [f"{name}: the file ended {entry.num_bytes - got} bytes early"]
            )
        return data.view(entry.dtype).reshape(entry.shape)


def _read_fully(file: Any, into: memoryview) -> int:
    """Fills `into` from an unbuffered file and returns the bytes read (one read may give fewer)."""
    done = 0
    while done < len(into):
        got = file.readinto(into[done:])
        if not got:
            break
        done += got
    return done


def write_safetensors(
    file: BinaryIO,
    tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
) -> None:
    """Writes one safetensors file, holding one tensor in memory at a time.

    `tensors` gives (name, dtype, shape) in file order; `read(name)` must return exactly that dtype
    and shape. Raises ValueError otherwise, KeyError for a dtype the format does not know.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on the key
    declared = list(tensors)
    offset = 0
    for name, dtype, shape in declared:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name, dtype, shape in declared:
        array = read(name)
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name}: declared {dtype}{shape}, read {array.dtype}{array.shape}")
        file.write(np.ascontiguousarray(array).view(np.uint8).data)
    file.flush()
    os.fsync(file.fileno())
