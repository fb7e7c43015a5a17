"""From the rows chosen for a step to its launches: which rows share a bucket."""

from __future__ import annotations

import operator

from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.pages import PageAllocator
from polyjax.engine.sequence import Sequence
from polyjax.engine.step import Launch, make_launch


class Chunk:
    """A part of a prompt that the step being scheduled computes: positions [start, end)."""

    __slots__ = ("length", "prompt_logprobs", "samples", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, length: int):
        self.sequence = sequence
        self.start = start
        self.length = length
        self.samples = False
        self.prompt_logprobs = sequence.prompt_logprobs_due and start + 1 < sequence.prompt_tokens

    @property
    def end(self) -> int:
        return self.start + self.length


class DecodeRows:
    """Rows of one token; parallel lists, because there are many of them every step."""

    __slots__ = ("samples", "sequences", "starts")

    def __init__(self, sequences: list[Sequence], starts: list[int]):
        self.sequences = sequences
        self.starts = starts
        self.samples = [True] * len(sequences)

    def add(self, chunk: Chunk) -> None:
        self.sequences.append(chunk.sequence)
        self.starts.append(chunk.start)
        self.samples.append(chunk.samples)


def decode_launches(
    rows: DecodeRows, chooser: BucketChooser, allocator: PageAllocator
) -> list[Launch]:
    """One launch, or more if no bucket of the ladder holds all rows; none without rows."""
    count = len(rows.sequences)
    if not count:
        return []
    ones = [1] * count
    columns = _columns(allocator, rows.sequences, rows.starts, ones)
    bucket = chooser.decode(count, columns)
    if bucket is not None:
        return [make_launch(bucket, rows.sequences, rows.starts, ones, rows.samples)]
    each = [
        _columns(allocator, [sequence], [start], [1])
        for sequence, start in zip(rows.sequences, rows.starts, strict=True)
    ]
    return [
        make_launch(
            bucket,
            [rows.sequences[index] for index in indices],
            [rows.starts[index] for index in indices],
            ones[: len(indices)],
            [rows.samples[index] for index in indices],
        )
        for bucket, indices in chooser.split_decode(each)
    ]


def prefill_launches(
    chunks: list[Chunk], chooser: BucketChooser, allocator: PageAllocator
) -> list[Launch]:
    """Launches for these chunks; those that want prompt logprobs run apart from the others."""
    launches = []
    for wanted in (False, True):
        part = [chunk for chunk in chunks if chunk.prompt_logprobs is wanted]
        lengths = [chunk.length for chunk in part]
        columns = [_columns(allocator, [c.sequence], [c.start], [c.length]) for c in part]
        for bucket, indices in chooser.group(lengths, columns):
            group = [part[index] for index in indices]
            launch = make_launch(
                bucket,
                [chunk.sequence for chunk in group],
                [chunk.start for chunk in group],
                [chunk.length for chunk in group],
                [chunk.samples for chunk in group],
                prompt_logprobs=wanted,
            )
            launches.append(launch)
    return launches


def _columns(
    allocator: PageAllocator, sequences: list[Sequence], starts: list[int], lengths: list[int]
) -> int:
    """Page table columns that the rows read."""
    if allocator.has_full_group:
        return -(-max(map(operator.add, starts, lengths)) // allocator.page_size)
    return max(
        -(-(start + length) // allocator.page_size) - min(sequence.pages.first)
        for sequence, start, length in zip(sequences, starts, lengths, strict=True)
    )
