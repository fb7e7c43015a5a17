"""The true sizes of launches, counted: what a ladder for this traffic is derived from. No jax."""

from __future__ import annotations

import collections
from typing import Any

from polyjax.engine.step import ScheduledStep


class LaunchShapes:
    """Counts rows and context pages of decode launches, new tokens and rows of prefill launches.

    Every `halve_after` launches all counts are halved, so that old traffic fades.
    """

    def __init__(self, halve_after: int = 100_000):
        self._halve_after = halve_after
        self._since_halving = 0
        self.decode_sequences: collections.Counter[int] = collections.Counter()
        self.decode_pages: collections.Counter[int] = collections.Counter()
        self.prefill_tokens: collections.Counter[int] = collections.Counter()
        self.prefill_sequences: collections.Counter[int] = collections.Counter()
        self.buckets: collections.Counter[str] = collections.Counter()

    def add(self, step: ScheduledStep, page_size: int) -> None:
        """Counts the launches of a step."""
        for launch in step.launches:
            rows, bucket = len(launch.sequences), launch.bucket
            self.buckets[f"T={bucket.tokens},B={bucket.sequences},C={bucket.pages}"] += 1
            if launch.decode:
                self.decode_sequences[rows] += 1
                self.decode_pages[max(launch.starts) // page_size + 1] += 1
            else:
                self.prefill_tokens[max(launch.num_tokens)] += 1
                self.prefill_sequences[rows] += 1
            self._since_halving += 1
        if self._since_halving >= self._halve_after:
            self._since_halving = 0
            for counter in self._counters.values():
                for size in list(counter):
                    counter[size] //= 2
                    if not counter[size]:
                        del counter[size]

    @property
    def total(self) -> int:
        return self.decode_sequences.total() + self.prefill_tokens.total()

    @property
    def _counters(self) -> dict[str, collections.Counter[Any]]:
        names = ("decode_sequences", "decode_pages", "prefill_tokens", "prefill_sequences")
        return {name: getattr(self, name) for name in (*names, "buckets")}

    def to_json(self) -> dict[str, dict[str, int]]:
        """Counter by name; sizes are spelled as strings, ascending."""
        return {
            name: {str(size): counter[size] for size in sorted(counter)}
            for name, counter in self._counters.items()
        }
