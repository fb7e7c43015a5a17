"""Accelerators as data. Constants cite where they come from; nothing branches on a chip's name."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ChipSpec:
    """What legality and the cost model need to know of one chip.

    `kind` is the beginning of `jax.Device.device_kind`. Bandwidths are bytes/s, rates dense flop/s.
    `measured` constants replace vendor numbers where polyjax measured them.

    `memory_latency_us` is what a load takes under traffic (a GPU's where nothing was measured). The
    limits of one multiprocessor bound how many blocks it runs at once; 0 where blocks do not share
    one. A collective takes `collective_base_us` and `collective_hop_us` for every hop besides its
    bytes.
    """

    name: str
    kind: str
    platform: str  # "gpu" | "tpu" | "cpu"
    features: frozenset[str]
    num_sms: int
    shared_memory_bytes: int  # per block at most (VMEM of one core on a TPU)
    l2_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    launch_gap_us: float
    interconnect_bytes_per_s: float
    source: str
    memory_latency_us: float = 0.8
    l2_bytes_per_s: float = 0.0
    shared_memory_per_sm_bytes: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    blocks_per_sm: int = 0
    collective_base_us: float = 0.0
    collective_hop_us: float = 0.0


_HOPPER = frozenset({"tma", "wgmma", "cluster", "pdl", "fp8", "bf16"})
_BLACKWELL = frozenset({"tma", "tcgen05", "cluster", "pdl", "fp8", "fp4", "bf16"})
_KIB, _GB = 1024, 10**9

# CUDA C++ programming guide, table of compute capabilities (9.0 and 10.0).
_SM: dict[str, Any] = {
    "shared_memory_per_sm_bytes": 228 * _KIB,
    "registers_per_sm": 65536,
    "threads_per_sm": 2048,
    "blocks_per_sm": 32,
}
# NCCL's own model of a small all-reduce over NVLink (src/graph/tuning.cc): ring, LL protocol.
_NVLINK: dict[str, Any] = {"collective_base_us": 3.6, "collective_hop_us": 0.47}
# "How To Scale Your Model" (Austin et al. 2025), chapter on TPUs: about 1 us a hop.
_ICI: dict[str, Any] = {"collective_base_us": 1.0, "collective_hop_us": 1.0}
# Loads under traffic: 0.8 us fits the measured kernels (docs/results/kernels); 2 tiles of 16 KiB a
# block in flight starve the persistent decode step, 3 do not (docs/bitter_lessons.md).
_LOADED_US = 0.8

CHIPS: tuple[ChipSpec, ...] = (
    ChipSpec(
        "NVIDIA H100",
        "NVIDIA H100",
        "gpu",
        _HOPPER,
        132,
        227 * _KIB,
        50 * 2**20,
        80 * _GB,
        3.0e12,
        780e12,
        1560e12,
        1.7,
        450e9,
        "NVIDIA H100 SXM datasheet: 3.35 TB/s at 90 %; practical bf16 matmul ceiling",
        memory_latency_us=_LOADED_US,
        l2_bytes_per_s=7e12,  # 80 % of 8.99 TB/s (PMC10448217, table 3)
        **_SM,
        **_NVLINK,
    ),
    ChipSpec(
        "NVIDIA H200",
        "NVIDIA H200",
        "gpu",
        _HOPPER,
        132,
        227 * _KIB,
        60 * 2**20,
        141 * _GB,
        4.3e12,
        780e12,
        1560e12,
        1.7,
        450e9,
        "measured: 4 GiB read 4.30-4.41 TB/s, bf16 8192^3 matmul 769-798 TFLOP/s",
        memory_latency_us=_LOADED_US,
        l2_bytes_per_s=7e12,  # as the H100's: the same die
        **_SM,
        **_NVLINK,
    ),
    ChipSpec(
        "NVIDIA B200",
        "NVIDIA B200",
        "gpu",
        _BLACKWELL,
        148,
        227 * _KIB,
        126 * 2**20,
        180 * _GB,
        7.2e12,
        1800e12,
        3600e12,
        1.3,
        900e9,
        "NVIDIA B200 datasheet: 8 TB/s, 2250 TFLOP/s bf16 dense; 90 % and 80 % of them",
        memory_latency_us=_LOADED_US,  # not measured there: the H200's
        l2_bytes_per_s=10e12,  # not measured there: the H200's by clocks and SMs
        **_SM,
        **_NVLINK,
    ),
    ChipSpec(
        "TPU v5e",
        "TPU v5 lite",
        "tpu",
        frozenset({"mxu", "bf16", "int8"}),
        1,
        128 * 2**20,
        0,
        16 * _GB,
        819e9,
        197e12,
        197e12,
        2.0,
        200e9,
        "Google Cloud TPU v5e system architecture page",
        **_ICI,
    ),
    ChipSpec(
        "TPU v5p",
        "TPU v5",
        "tpu",
        frozenset({"mxu", "bf16", "int8", "sparsecore"}),
        2,
        64 * 2**20,
        0,
        95 * _GB,
        2765e9,
        459e12,
        459e12,
        2.0,
        600e9,
        "Google Cloud TPU v5p system architecture page; VMEM a core: jax 0.11.2, tpu_info",
        **_ICI,
    ),
    ChipSpec(
        "TPU v6e",
        "TPU v6 lite",
        "tpu",
        frozenset({"mxu", "bf16", "int8", "sparsecore"}),
        1,
        128 * 2**20,
        0,
        32 * _GB,
        1640e9,
        918e12,
        918e12,
        2.0,
        448e9,
        "Google Cloud TPU v6e system architecture page",
        **_ICI,
    ),
    ChipSpec(
        "CPU",
        "cpu",
        "cpu",
        frozenset(),
        2,
        0,
        32 * 2**20,
        16 * _GB,
        20e9,
        0.2e12,
        0.1e12,
        20.0,
        10e9,
        "measured on a 2-core x86 host: dispatch of a jitted call 16 us, streaming read 20 GB/s",
        memory_latency_us=0.1,  # about a miss in every cache
        collective_base_us=10.0,  # psum of 256 bytes over 2, 4, 8 virtual devices of that host,
        collective_hop_us=15.0,  # others at work beside it: 21, 270, 245 us
    ),
)


def find_chip(name: str) -> ChipSpec | None:
    """Returns the chip with this name or device kind, None if it is not among CHIPS."""
    for spec in sorted(CHIPS, key=lambda c: -len(c.kind)):
        if name == spec.name or name.lower().startswith(spec.kind.lower()):
            return spec
    return None


def chip(name: str) -> ChipSpec:
    """Returns the chip with this name or device kind. Raises ConfigError listing the known ones."""
    spec = find_chip(name)
    if spec is None:
        raise ConfigError(f"unknown chip {name!r}; known: {', '.join(c.name for c in CHIPS)}")
    return spec
