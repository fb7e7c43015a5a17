"""Block-scaled float8 checkpoints (DeepSeek-V3, Kimi-K2) read as the float32 they stand for.

Each weight `x` of shape [rows, cols] comes with `x_scale_inv`, of one number per block of 128 x 128
(edges rounded up): a value is the float8 number times the scale of its block (DeepSeek-V3 technical
report, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyjax.core.errors import ModelError
from polyjax.io.files import TensorReader

_SUFFIX = "_scale_inv"


class BlockScaledReader:
    """A `TensorReader` that multiplies every scaled weight with its scales and hides the scales."""

    def __init__(self, reader: TensorReader, block: tuple[int, ...]):
        self._reader = reader
        self._block = block
        stored = set(reader.names())
        self._scaled = {name for name in stored if name + _SUFFIX in stored}
        scales = {name + _SUFFIX for name in self._scaled}
        self._names = tuple(name for name in reader.names() if name not in scales)
        self._check()

    def _check(self) -> None:
        problems = []
        for name in sorted(self._scaled):
            shape, scales = self._reader.shape(name), self._reader.shape(name + _SUFFIX)
            wanted = tuple(-(-n // b) for n, b in zip(shape, self._block, strict=False))
            if len(shape) != len(self._block) or scales != wanted:
                problems.append(
                    f"{name}{_SUFFIX} has shape {list(scales)}, wanted {list(wanted)} "
                    f"for {list(shape)} in blocks of {list(self._block)}"
                )
        if problems:
            raise ModelError("quantization_config", problems)

    def names(self) -> Sequence[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._scaled else self._reader.dtype(name)

    def read(self, name: str) -> np.ndarray:
        weight = self._reader.read(name)
        if name not in self._scaled:
            return weight
        scales = self._reader.read(name + _SUFFIX).astype(np.float32)
        for axis, size in enumerate(self._block):
            scales = np.repeat(scales, size, axis=axis)
        rows, cols = weight.shape
        return weight.astype(np.float32) * scales[:rows, :cols]
