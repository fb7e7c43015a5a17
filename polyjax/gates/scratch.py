"""Step inputs that touch nothing but scratch pages and the sink slot of a live engine's state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyjax.compiler.state import StateSpec
from polyjax.core.batch_layout import (
    SAMPLES,
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    BatchLayout,
    PackedBatch,
)
from polyjax.core.buckets import Bucket

_NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0}


def set_neutral_sampling(batch: PackedBatch) -> None:
    """Makes every row of a packed batch greedy without filters, as inactive rows have to be."""
    floats = [_NEUTRAL.get(name, 0.0) for name in SAMPLING_FLOATS]
    batch.sampling_floats[:] = np.array(floats, np.float32).view(np.int32)


@dataclasses.dataclass(frozen=True)
class ScratchRows:
    """Rows of one step: new tokens [n] arrays, and contexts that end with them.

    Each row writes to pages of its own; what it reads before them are `read_pages`, over and over.
    """

    tokens: tuple[np.ndarray, ...]
    context_lens: np.ndarray
    seeds: np.ndarray
    temperatures: np.ndarray


class ScratchSpace:
    """Divides the scratch pages of a state into pages to read and pages to write."""

    def __init__(self, spec: StateSpec):
        self.spec = spec
        self.num_read = max(spec.scratch_pages // 4, 1)
        self.groups = spec.config.kv_groups()

    @property
    def read_tokens(self) -> int:
        return self.num_read * self.spec.page_size

    def rows(self, bucket: Bucket, rng: np.random.Generator, hot: bool) -> ScratchRows:
        """As many rows as fit the bucket and the pages, with contexts of every length up to it."""
        size = self.spec.page_size
        writable = self.spec.scratch_pages - self.num_read
        count = min(bucket.sequences, writable)
        capacity = bucket.pages * size
        # A chunk that starts inside a page touches one page more than its length needs.
        longest = max(min(bucket.tokens, (writable // count - 1) * size, capacity), 1)
        lengths = rng.integers(1, longest + 1, count)
        lengths[0] = longest
        contexts = np.array([rng.integers(length, capacity + 1) for length in lengths])
        contexts[-1] = capacity
        vocab = self.spec.config.vocab_size
        temperatures = rng.uniform(0.5, 1.5, count) if hot else np.zeros(count)
        return ScratchRows(
            tuple(rng.integers(0, vocab, length) for length in lengths),
            contexts,
            rng.integers(0, 2**31, count),
            temperatures.astype(np.float32),
        )

    def fill(self, start: int, count: int, bucket: Bucket, rng: np.random.Generator) -> np.ndarray:
        """A packed prefill of random tokens [start, start + count) into the pages that are read."""
        vocab = self.spec.config.vocab_size
        rows = ScratchRows(
            (rng.integers(0, vocab, count),),
            np.array([start + count]),
            np.zeros(1, np.int64),
            np.zeros(1, np.float32),
        )
        return self.pack(rows, bucket, read_only=False)

    def pack(self, rows: ScratchRows, bucket: Bucket, read_only: bool = True) -> np.ndarray:
        """The flat array of `rows` in `bucket`, sampling into the sink slot.

        `read_only` False lays contexts over the pages to read instead, in order: for filling them.
        """
        layout = BatchLayout(bucket, len(self.groups))
        flat = np.zeros(layout.size, np.int32)
        batch = layout.split(flat)
        batch.slots[:] = self.spec.num_slots
        set_neutral_sampling(batch)
        # By the rows there are, not by the bucket: they get the same pages in every bucket.
        writable = self.spec.scratch_pages - self.num_read
        share = writable // max(len(rows.tokens), 1) if read_only else None
        for row, tokens in enumerate(rows.tokens):
            batch.tokens[row, : len(tokens)] = tokens
            batch.query_lens[row] = len(tokens)
            batch.context_lens[row] = rows.context_lens[row]
            batch.flags[row] = SAMPLES
            temperature = np.float32(rows.temperatures[row])
            batch.sampling_floats[row, 0] = temperature.view(np.int32)
            batch.sampling_ints[row, SAMPLING_INTS.index("seed")] = rows.seeds[row]
            self._set_pages(batch, row, len(tokens), int(rows.context_lens[row]), share)
        return flat

    def _set_pages(
        self, batch: Any, row: int, length: int, context: int, share: int | None
    ) -> None:
        size = self.spec.page_size
        start = context - length
        for index, group in enumerate(self.groups):
            scratch = self.spec.num_pages[index] - self.spec.scratch_pages
            first = max(0, start - group.window + 1) // size if group.window else 0
            batch.first_pages[index, row] = first
            for logical in range(first, -(-context // size)):
                page = logical % self.num_read
                if share is not None and logical >= start // size:
                    page = self.num_read + row * share + (logical - start // size)
                batch.page_tables[index, row, logical - first] = scratch + page
