"""A digest of a model's parameters that costs next to nothing beside reading them."""

from __future__ import annotations

import hashlib

import numpy as np

_CHUNK_WORDS = 8192  # of 8 bytes: sums of 64 KiB are what is hashed
_HEX_DIGITS = 16


class ParamsDigest:
    """Folds parameters, added in order, into one digest.

    Hashing a checkpoint byte by byte takes longer than reading it. This hashes the 64-bit sum of
    every 64 KiB instead, at memory speed: any change of values shows, unless someone made it not
    to. It tells weights apart; it does not authenticate them.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_HEX_DIGITS // 2)

    def add(self, name: str, array: np.ndarray) -> None:
        """Takes in one parameter, C-contiguous, in the dtype and layout it is served in."""
        self._hash.update(f"{name} {array.dtype.name}{list(array.shape)}\n".encode())
        raw = array.reshape(-1).view(np.uint8)
        whole = raw.size // (8 * _CHUNK_WORDS) * 8 * _CHUNK_WORDS
        sums = raw[:whole].view(np.uint64).reshape(-1, _CHUNK_WORDS).sum(axis=1, dtype=np.uint64)
        self._hash.update(sums.tobytes())
        self._hash.update(raw[whole:].tobytes())

    @property
    def hexdigest(self) -> str:
        """16 hex digits."""
        return self._hash.hexdigest()
