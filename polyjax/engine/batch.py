"""From scheduled rows to one int32 array: everything a launch sends to the device, in one transfer.

`BatchLayout` says where each field lies. The host writes and the device reads through it:

    flat = packer.pack(launch)                 # host, numpy
    batch = layout_of(launch).split(flat)      # device, inside jit: slices and reshapes only

Floats travel as their bits: `jax.lax.bitcast_convert_type(batch.sampling_floats, jnp.float32)` on
the device, `.view(np.float32)` on the host. Seeds are uint32 in int32 bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polyjax.core.buckets import Bucket
from polyjax.engine.sequence import Sequence
from polyjax.engine.step import Launch, ScheduledStep

Int32Array = npt.NDArray[np.int32]

FROM_SLOT = 1  # the row's one token is the slot's last sampled token, not tokens[row, 0]
SAMPLES = 2  # a token is sampled after the row's last token, and becomes the slot's last token
BANS_STOP = 4  # the sequence's stop tokens must not be sampled yet (min_tokens)

SAMPLING_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
SAMPLING_INTS = ("top_k", "seed")


class PackedBatch(NamedTuple):
    """The fields of one launch of bucket (T tokens, B sequences, C pages) with G KV groups.

    All int32, numpy or traced jax arrays. Rows without a sequence have query_lens 0 and the sink
    slot, the one after the last.

    tokens [B,T]; query_lens, context_lens, first_pages as in core.model.StepBatch, the latter and
    page_tables stacked over groups: [G,B], [G,B,C]. slots [B]. flags [B] of FROM_SLOT, SAMPLES,
    BANS_STOP. next_tokens [B]: the known token that follows the row's last, 0 if none is known; for
    prompt logprobs. sampling_floats [B,len(SAMPLING_FLOATS)], sampling_ints [B,len(SAMPLING_INTS)]:
    columns in that order; top_k 0 means all.
    """

    tokens: Any
    query_lens: Any
    context_lens: Any
    slots: Any
    flags: Any
    next_tokens: Any
    sampling_floats: Any
    sampling_ints: Any
    page_tables: Any
    first_pages: Any


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Where the fields of a packed batch lie; a function of bucket and number of KV groups only."""

    bucket: Bucket
    num_groups: int

    @property
    def shapes(self) -> PackedBatch:
        """The shape of every field."""
        tokens, rows, pages = self.bucket.tokens, self.bucket.sequences, self.bucket.pages
        return PackedBatch(
            tokens=(rows, tokens),
            query_lens=(rows,),
            context_lens=(rows,),
            slots=(rows,),
            flags=(rows,),
            next_tokens=(rows,),
            sampling_floats=(rows, len(SAMPLING_FLOATS)),
            sampling_ints=(rows, len(SAMPLING_INTS)),
            page_tables=(self.num_groups, rows, pages),
            first_pages=(self.num_groups, rows),
        )

    @property
    def size(self) -> int:
        """Length of the flat array."""
        return sum(math.prod(shape) for shape in self.shapes)

    def split(self, flat: Any) -> PackedBatch:
        """The fields of a flat array [size]: views of a numpy array, slices of a traced one."""
        fields = []
        offset = 0
        for shape in self.shapes:
            end = offset + math.prod(shape)
            fields.append(flat[offset:end].reshape(shape))
            offset = end
        return PackedBatch(*fields)


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
        self._used = np.zeros((num_groups, num_slots + 1), np.int32)
        self._first: Int32Array = np.zeros((num_groups, num_slots + 1), np.int32)
        self._floats: Int32Array = np.zeros((num_slots + 1, len(SAMPLING_FLOATS)), np.int32)
        self._ints: Int32Array = np.zeros((num_slots + 1, len(SAMPLING_INTS)), np.int32)
        self._set_neutral_sampling()

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, self.num_groups)

    def update(self, step: ScheduledStep) -> None:
        """Brings the per-slot tables up to date with a step."""
        for sequence in step.admitted:
            self._set_sampling(sequence)
        for sequence in step.extended:
            self._set_pages(sequence)

    def pack(self, launch: Launch) -> Int32Array:
        """A fresh flat array (a device transfer may still read the last one), see BatchLayout."""
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
            row = self._tables[group, slot]
            row[synced:length] = table[synced:]
            row[length : self._used[group, slot]] = 0
            self._used[group, slot] = length
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
