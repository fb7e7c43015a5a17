"""Digests of compiled executables: equal where two candidates became the same machine code."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_METADATA = re.compile(r",? ?metadata=\{[^}]*\}")
_ELF64 = re.compile(rb"\x7fELF\x02\x01")
_SECTION_TABLE_AT, _SECTION_SIZE_AT = 40, 58  # e_shoff, e_shentsize; the ELF-64 specification

# XLA options that act through the code they generate alone, so that equal code means equal speed.
# Any other option may be read when a program runs and keeps two programs apart.
CODE_OPTIONS = frozenset(
    {
        "xla_backend_optimization_level",
        "xla_cpu_prefer_vector_width",
        "xla_cpu_max_isa",
        "xla_gpu_autotune_level",
        "xla_gpu_enable_triton_gemm",
    }
)


def executable_digest(compiled: Any, options: Mapping[str, str]) -> str:
    """Returns 16 hex digits over the optimised HLO, the machine code, and options beyond it.

    Names of source lines do not count. `compiled` is a `jax.stages.Compiled` compiled here: one
    that came out of a cache does not give back all of its code.
    """
    digest = hashlib.sha256(_METADATA.sub("", compiled.as_text() or "").encode())
    try:
        serialized: bytes = compiled.runtime_executable().serialize()
    except Exception:  # a backend that cannot: the HLO and all options have to do
        digest.update(repr(sorted(options.items())).encode())
        return digest.hexdigest()[:16]
    for code in sorted(_code_objects(serialized)):
        digest.update(code)
    beyond = sorted((k, v) for k, v in options.items() if k not in CODE_OPTIONS)
    digest.update(repr(beyond).encode())
    return digest.hexdigest()[:16]


def joint_digest(parts: Mapping[str, str]) -> str:
    """Returns one digest of several named ones."""
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]


def _code_objects(serialized: bytes) -> Iterator[bytes]:
    """Yields the ELF objects inside a serialized executable, from header to section table."""
    for match in _ELF64.finditer(serialized):
        start = match.start()
        if start + 64 > len(serialized):
            continue
        (table_at,) = struct.unpack_from("<Q", serialized, start + _SECTION_TABLE_AT)
        size, count = struct.unpack_from("<HH", serialized, start + _SECTION_SIZE_AT)
        yield serialized[start : min(start + table_at + size * count, len(serialized))]
