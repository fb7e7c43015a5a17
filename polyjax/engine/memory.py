"""How many KV pages fit into the memory that is left, on a coarse ladder."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import jax

from polyjax.compiler.state import page_bytes
from polyjax.core.errors import ConfigError
from polyjax.core.model import ModelConfig

SINK_PAGES = 1
STEP_SHARE = 0.05
"""Of a device's memory, what is left to the activations of steps when more is put on it."""
CPU_POOL_SHARE, CPU_POOL_BYTES = 0.25, 2 << 30
"""What a CPU engine takes of the free host memory at most: other programs live there, too."""


@dataclasses.dataclass(frozen=True)
class PoolRequest:
    """What the pool has to serve. `scratch_pages` come on top of the usable ones.

    `ways` says into how many shards each KV group's pool is cut.
    """

    config: ModelConfig
    dtype: str
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    scratch_pages: int
    ways: tuple[int, ...]


def memory_budget_bytes(device: jax.Device, utilization: float) -> int:
    """Bytes that KV pages may take on one device, weights already being there."""
    if device.platform == "cpu":
        share = available_host_bytes() * CPU_POOL_SHARE
        return int(min(share, CPU_POOL_BYTES) * utilization)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not tell its memory: set --num_kv_pages")
    return int(stats["bytes_limit"] * utilization) - int(stats["bytes_in_use"])


def free_device_bytes(devices: Sequence[jax.Device]) -> int:
    """Bytes that can still be had on the fullest of the devices while it also runs steps.

    On a CPU, bytes of the host's memory.
    """
    free = []
    for device in devices:
        if device.platform == "cpu":
            return available_host_bytes()
        stats = device.memory_stats() or {}
        limit = int(stats.get("bytes_limit", 0) * (1 - STEP_SHARE))
        free.append(max(limit - int(stats.get("bytes_in_use", 0)), 0))
    return min(free)


@dataclasses.dataclass(frozen=True)
class Room:
    """What a second copy of the weights needs, and what there is for it.

    `weight_bytes` and `pool_bytes` are on the fullest device, `host_weight_bytes` is all of it.
    """

    weight_bytes: int
    host_weight_bytes: int
    pool_bytes: int
    free_device_bytes: int
    free_host_bytes: int


def shard_bytes(array: jax.Array) -> int:
    """Bytes of the array on each device that holds a part of it."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def room_for_weights(params: Sequence[jax.Array], kv: Sequence[jax.Array]) -> Room:
    """The room beside the weights and pools that an engine holds now."""
    devices = list(params[0].sharding.device_set)
    return Room(
        weight_bytes=sum(map(shard_bytes, params)),
        host_weight_bytes=sum(param.nbytes for param in params),
        pool_bytes=sum(map(shard_bytes, kv)),
        free_device_bytes=free_device_bytes(devices),
        free_host_bytes=available_host_bytes(),
    )


def available_host_bytes() -> int:
    """Host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def activation_bytes(request: PoolRequest) -> int:
    """What a step needs besides weights and pages: its widest activations and logits, twice."""
    widest = max(request.config.embed_dim * 16, request.config.vocab_size // 8)
    return 2 * 4 * request.max_num_batched_tokens * widest


def usable_pages(request: PoolRequest, budget_bytes: int) -> list[int]:
    """Usable pages of each KV group within `budget_bytes`, never more than requests can own.

    Windowed groups need no more than their windows and one chunk. The count of the others lies on
    the ladder {4,5,6,7} * 2^n, so that a little more or less free memory gives the same programs.
    Raises ConfigError naming the flag to change where not even one page fits.
    """
    caps = page_caps(request)
    sizes = page_bytes(request.config, request.page_size, request.dtype)
    costs = [size // ways for size, ways in zip(sizes, request.ways, strict=True)]
    fixed = sum(cost * (SINK_PAGES + request.scratch_pages) for cost in costs)
    budget = budget_bytes - fixed
    top = max(caps)
    for count in _ladder_down(top):
        pages = [min(count, cap) for cap in caps]
        if sum(n * cost for n, cost in zip(pages, costs, strict=True)) <= budget:
            return pages
    raise ConfigError(
        f"{max(budget_bytes, 0) / 2**20:.0f} MiB are left for the KV cache and its first page "
        f"needs {(fixed + sum(costs)) / 2**20:.0f} MiB: raise --gpu_memory_utilization, lower "
        "--max_num_batched_tokens or --max_num_seqs, or use more devices"
    )


def page_caps(request: PoolRequest) -> list[int]:
    """Most pages of each group that `max_num_seqs` sequences of `max_model_len` can own."""
    size = request.page_size
    whole = -(-request.max_model_len // size)
    caps = []
    for group in request.config.kv_groups():
        own = whole
        if group.window:
            span = group.window + request.max_num_batched_tokens
            own = min(whole, -(-span // size) + 2)
        caps.append(own * request.max_num_seqs)
    return caps


def _ladder_down(top: int) -> Sequence[int]:
    """The ladder's counts up to `top`, largest first, `top` itself included."""
    counts = {top}
    for exponent in range(math.ceil(math.log2(top)) + 1 if top > 1 else 1):
        counts |= {base * 2**exponent // 4 for base in (4, 5, 6, 7)}
    return sorted((count for count in counts if 0 < count <= top), reverse=True)
