"""From scheduled rows to one int32 array: everything a launch sends to the device, in one transfer.

`core.batch_layout.BatchLayout` says where each field lies. The host writes and the device reads
through it:

    flat, _ = packer.pack(launch)                  # host, numpy
    batch = packer.layout(bucket).split(flat)      # device, inside jit: slices and reshapes only
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from polyjax.core.batch_layout import (
    BANS_STOP,
    FROM_SLOT,
    SAMPLES,
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    BatchLayout,
    PackedBatch,
)
from polyjax.core.buckets import Bucket
from polyjax.engine.sequence import Sequence
from polyjax.engine.step import Launch, ScheduledStep

__all__ = ["BANS_STOP", "FROM_SLOT", "SAMPLES", "BatchLayout", "BatchPacker", "PackedBatch"]

Int32Array = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """A decode launch whose rows all continue from their slot, and what was known then."""

    launch: Launch
    flat: Int32Array
    changes: int

    def leads_to(self, launch: Launch) -> bool:
        """Whether another such launch is this one a step later, nothing else changed."""
        one = self.launch
        return (
            launch.bucket == one.bucket
            and launch.sequences == one.sequences
            and launch.samples == one.samples
            and launch.bans_stop == one.bans_stop
            and [start - 1 for start in launch.starts] == one.starts
        )


class BatchPacker:
    """Packs launches. Keeps page tables and sampling parameters per slot, updated as they change.

    `num_slots` as in Scheduler; slot `num_slots` is the sink of inactive rows. `max_pages` is the
    most page table columns a sequence can have. For every step: `update` once, then `pack` for each
    launch, before the next step is scheduled.
    """

    def __init__(self, num_slots: int, num_groups: int, max_pages: int):
        self.num_groups = num_groups
        self.sink_slot = num_slots
        self._tables: Int32Array = np.zeros((num_groups, num_slots + 1, max_pages), np.int32)
        self._used = [[0] * (num_slots + 1) for _ in range(num_groups)]  # columns not 0
        self._first: Int32Array = np.zeros((num_groups, num_slots + 1), np.int32)
        self._floats: Int32Array = np.zeros((num_slots + 1, len(SAMPLING_FLOATS)), np.int32)
        self._ints: Int32Array = np.zeros((num_slots + 1, len(SAMPLING_INTS)), np.int32)
        self._set_neutral_sampling()
        self._changes = 0  # of page tables and sampling parameters
        self._last: _Packed | None = None

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, self.num_groups)

    def update(self, step: ScheduledStep) -> None:
        """Brings the per-slot tables up to date with a step."""
        self._changes += len(step.admitted) + len(step.extended)
        for sequence in step.admitted:
            self._set_sampling(sequence)
        for sequence in step.extended:
            self._set_pages(sequence)

    def pack(self, launch: Launch) -> tuple[Int32Array, bool]:
        """Returns a fresh flat array (a device transfer may still read the last one; see
        BatchLayout), and whether it is the last one packed, one token further."""
        plain = launch.decode and all(launch.from_slot)
        last = self._last if plain else None
        continues = last is not None and last.changes == self._changes and last.leads_to(launch)
        if last is not None and continues:
            flat = self.layout(launch.bucket).one_token_further(last.flat)
        else:
            flat = self._packed(launch)
        self._last = _Packed(launch, flat, self._changes) if plain else None
        return flat, continues

    def _packed(self, launch: Launch) -> Int32Array:
        layout = self.layout(launch.bucket)
        flat: Int32Array = np.zeros(layout.size, np.int32)
        batch = layout.split(flat)
        rows = len(launch.sequences)
        slots = np.array([sequence.slot for sequence in launch.sequences], np.int32)
        batch.slots[:rows] = slots
        batch.slots[rows:] = self.sink_slot
        batch.query_lens[:rows] = launch.num_tokens
        batch.context_lens[:rows] = launch.starts
        batch.context_lens[:rows] += batch.query_lens[:rows]
        batch.flags[:rows] = (
            FROM_SLOT * np.array(launch.from_slot)
            + SAMPLES * np.array(launch.samples)
            + BANS_STOP * np.array(launch.bans_stop)
        )
        batch.sampling_floats[:] = self._floats[batch.slots]
        batch.sampling_ints[:] = self._ints[batch.slots]
        pages = min(launch.bucket.pages, self._tables.shape[2])
        batch.page_tables[:, :rows, :pages] = self._tables[:, slots, :pages]
        batch.first_pages[:, :rows] = self._first[:, slots]
        self._set_tokens(launch, batch)
        return flat

    def _set_tokens(self, launch: Launch, batch: PackedBatch) -> None:
        if launch.decode and all(launch.from_slot):
            return
        for row, sequence in enumerate(launch.sequences):
            if launch.from_slot[row]:
                continue
            start, known = launch.starts[row], sequence.token_ids
            end = start + launch.num_tokens[row]
            batch.tokens[row, : end - start] = known[start:end]
            if end < len(known):
                batch.next_tokens[row] = known[end]

    def _set_pages(self, sequence: Sequence) -> None:
        slot, pages = sequence.slot, sequence.pages
        for group, table in enumerate(pages.tables):
            synced, length = pages.synced[group], len(table)
            row, used = self._tables[group, slot], self._used[group]
            row[synced:length] = table[synced:]
            if used[slot] > length:
                row[length : used[slot]] = 0
            used[slot] = length
            if not synced:  # admitted, or the window has moved
                self._first[group, slot] = pages.first[group]
            pages.synced[group] = length

    def _set_sampling(self, sequence: Sequence) -> None:
        params, slot = sequence.params, sequence.slot
        floats = [getattr(params, name) for name in SAMPLING_FLOATS]
        self._floats[slot] = np.array(floats, np.float32).view(np.int32)
        self._ints[slot, 0] = max(params.top_k, 0)
        self._ints[slot, 1] = np.uint32(sequence.seed).view(np.int32)

    def _set_neutral_sampling(self) -> None:
        """Greedy without filters, so that inactive rows compute nothing that could trap."""
        neutral = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
        self._floats[:] = np.array(neutral, np.float32).view(np.int32)
