"""Where the fields of a step's one packed int32 array lie. No jax: host and device both read it.

The host writes through `BatchLayout.split` of a numpy array, a step program reads through `split`
of the traced one (slices and reshapes only). Floats travel as their bits:
`jax.lax.bitcast_convert_type(batch.sampling_floats, jnp.float32)` on the device,
`.view(np.float32)` on the host. Seeds are uint32 in int32 bits.

Fields, and what a kernel may be given of one (a KV group's page table, a column of sampling
parameters), begin at multiples of ALIGNMENT_WORDS: XLA on a GPU passes a contiguous slice to a
kernel as a pointer into the array, and Mosaic GPU refuses pointers that are less aligned.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from polyjax.core.buckets import Bucket

ALIGNMENT_WORDS = 64  # 256 bytes
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

    query_lens: Any
    context_lens: Any
    slots: Any
    flags: Any
    next_tokens: Any
    sampling_floats: Any
    sampling_ints: Any
    tokens: Any
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
            query_lens=(rows,),
            context_lens=(rows,),
            slots=(rows,),
            flags=(rows,),
            next_tokens=(rows,),
            sampling_floats=(rows, len(SAMPLING_FLOATS)),
            sampling_ints=(rows, len(SAMPLING_INTS)),
            tokens=(rows, tokens),
            page_tables=(self.num_groups, rows, pages),
            first_pages=(self.num_groups, rows),
        )

    @property
    def sampler_size(self) -> int:
        """Length of the leading part that holds the fields of a row, all a sampler reads."""
        return self._places[_ROW_FIELDS - 1].end

    @property
    def size(self) -> int:
        """Length of the flat array."""
        return self._places[-1].end

    @property
    def context_words(self) -> slice:
        """Where `context_lens` lies in the flat array."""
        start = self._places[PackedBatch._fields.index("context_lens")].start
        return slice(start, start + self.bucket.sequences)

    def one_token_further(self, flat: Any) -> Any:
        """A copy of a numpy array: the step after, if the same rows decode on in the same pages."""
        further = flat.copy()
        further[self.context_words] += self.split(flat).query_lens
        return further

    def split_rows(self, rows: Any) -> PackedBatch:
        """The fields of the leading `sampler_size` entries; the remaining fields are None."""
        fields = [place.view(rows) for place in self._places[:_ROW_FIELDS]]
        return PackedBatch(*fields, *[None] * (len(PackedBatch._fields) - _ROW_FIELDS))

    def split(self, flat: Any) -> PackedBatch:
        """The fields of a flat array [size]: views of a numpy array, slices of a traced one."""
        return PackedBatch(*[place.view(flat) for place in self._places])

    @property
    def _places(self) -> tuple[_Place, ...]:
        return _places_of(self)


_ROW_FIELDS = PackedBatch._fields.index("tokens")
_BY_COLUMN = ("sampling_floats", "sampling_ints")
_BY_GROUP = ("page_tables", "first_pages")


class _Place(NamedTuple):
    """Where a field lies: `parts` separately aligned ones, `stride` words from one to the next."""

    start: int
    parts: int
    stride: int
    words: int
    shape: tuple[int, ...]
    by_column: bool

    @property
    def end(self) -> int:
        return self.start + self.parts * self.stride

    def view(self, flat: Any) -> Any:
        if self.parts == 1:
            return flat[self.start : self.start + self.words].reshape(self.shape)
        parts = flat[self.start : self.end].reshape(self.parts, self.stride)
        parts = parts[:, : self.words // self.parts]
        return parts.T if self.by_column else parts.reshape(self.shape)


@functools.lru_cache(maxsize=4096)  # every launch asks, of few buckets
def _places_of(layout: BatchLayout) -> tuple[_Place, ...]:
    places: list[_Place] = []
    for name, shape in zip(PackedBatch._fields, layout.shapes, strict=True):
        by_column = name in _BY_COLUMN
        parts = shape[1] if by_column else shape[0] if name in _BY_GROUP else 1
        words = math.prod(shape)
        stride = -(-words // parts // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        start = places[-1].end if places else 0
        places.append(_Place(start, parts, stride, words, shape, by_column))
    return tuple(places)
