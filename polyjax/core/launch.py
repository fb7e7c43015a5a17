"""How a kernel divides its work over a chip: what a cost model reads beside the op itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LaunchShape:
    """One kernel call under a schedule. "Busiest" is the block with the most to do.

    `blocks` of `threads` threads are launched, `cluster` of them placed together; each thread takes
    about `registers`. All blocks together load `read_bytes`, repeats included, and keep
    `in_flight_bytes` each asked for ahead of use. The busiest block takes `steps` pipeline steps
    one after the other, finishes `tiles` results, waits `syncs` times for other blocks, adds
    `reductions` values in sequence that no loads hide, and takes `vector_ops` arithmetic operations
    on its CUDA cores. `flops` are those of the tensor cores, padding included. `kernels` counts
    device kernels, XLA's own around the call included.
    """

    blocks: int
    threads: int
    registers: int
    read_bytes: float
    in_flight_bytes: float
    cluster: int = 1
    steps: int = 1
    tiles: int = 1
    syncs: int = 0
    reductions: int = 0
    vector_ops: float = 0.0
    flops: float = 0.0
    kernels: int = 1
