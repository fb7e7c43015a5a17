"""Timing of one op on a device, as a decode step would see it: chained, L2-cold, alternating.

A chain calls the op once per weight set inside one executable, each call depending on the one
before, so that launches are captured together and nothing runs side by side that a decode step
would run in sequence. The weight sets together exceed the L2 cache several times.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

COLD_BYTES = 256 * 2**20  # weights rotated through one chain: four times the largest L2 of today
WARM_UP_CALLS = 4  # XLA records its command buffer on the second run and replays from the third
MAX_LINKS = 32


def chain_links(bytes_per_link: int, *, cold_bytes: int = COLD_BYTES) -> int:
    """Returns how many links make a chain L2-cold without making it needlessly long."""
    return max(2, min(MAX_LINKS, -(-cold_bytes // bytes_per_link)))


@dataclasses.dataclass(frozen=True)
class Chain:
    """A compiled chain, its arguments and its length."""

    name: str
    compiled: Callable[..., Any]
    arguments: tuple[Any, ...]
    links: int

    def run(self, calls: int) -> float:
        """Returns the microseconds a link takes, averaged over `calls` queued calls."""
        begin = time.perf_counter()
        for _ in range(calls):
            result = self.compiled(*self.arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / calls / self.links * 1e6


def alternate(
    chains: Sequence[Chain], samples: int, sample_ms: float = 8.0
) -> dict[str, list[float]]:
    """Returns `samples` microseconds per link of every chain, taken in turns against drift."""
    calls = {}
    for chain in chains:
        for _ in range(WARM_UP_CALLS):
            jax.block_until_ready(chain.compiled(*chain.arguments))
        once = chain.run(8) * chain.links
        calls[chain.name] = max(2, int(sample_ms * 1e3 / max(once, 1.0)))
    timed: dict[str, list[float]] = {chain.name: [] for chain in chains}
    for _ in range(samples):
        for chain in chains:
            timed[chain.name].append(chain.run(calls[chain.name]))
    return timed
