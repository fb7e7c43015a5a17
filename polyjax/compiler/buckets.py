"""The bucket ladder that limits ask for: which padded step shapes get a program.

Coarse and additive: a rung costs seconds of compiling, padding costs microseconds a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class LadderPolicy:
    """How coarse a ladder is.

    Decode: `sequences` up to the limit and the limit itself; contexts start at
    `first_context_tokens` and lie `context_factor` apart. A factor of 0 leaves the longest alone:
    right where attention reads what a row has, not what its page table could hold. Prefill: chunks
    of `chunk_tokens` for one sequence and, up to `max_num_batched_tokens` in all, for several short
    ones (`grouped`).
    """

    sequences: tuple[int, ...]
    first_context_tokens: int
    context_factor: int
    chunk_tokens: tuple[int, ...]
    grouped: bool


CPU_POLICY = LadderPolicy((1, 2, 4, 8), 0, 0, (32, 128, 512), grouped=False)
ACCELERATOR_POLICY = LadderPolicy(
    (1, 2, 4, 8, 16, 32, 64, 128), 1024, 4, (128, 512, 2048, 8192), grouped=True
)


@dataclasses.dataclass(frozen=True)
class LadderLimits:
    """The largest step the engine may take. `page_size` in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int


def derive_ladder(limits: LadderLimits, policy: LadderPolicy, max_buckets: int = 0) -> BucketLadder:
    """Returns a ladder on which every step within `limits` fits.

    `max_buckets` above 0 drops the finest rungs until decode and prefill together have no more.
    Raises ConfigError where even the coarsest ladder has more.
    """
    sequences = sorted({min(count, limits.max_num_seqs) for count in policy.sequences})
    if sequences[-1] < limits.max_num_seqs:
        sequences.append(limits.max_num_seqs)
    longest = limits.max_model_len
    contexts = [longest]
    if policy.context_factor:
        shortest = min(policy.first_context_tokens, longest)
        contexts = rungs(shortest, longest, policy.context_factor)
    chunks = sorted({min(c, limits.max_num_batched_tokens) for c in policy.chunk_tokens})
    while True:
        ladder = _ladder(sequences, contexts, chunks, limits, policy.grouped)
        total = len(ladder.decode) + len(ladder.prefill)
        if not max_buckets or total <= max_buckets:
            return ladder
        finest = max((sequences, contexts, chunks), key=len)
        if len(finest) == 1:
            raise ConfigError(f"--max_programs={max_buckets} is less than the {total} needed")
        keep_first = finest[:1] if len(finest) > 2 else []
        finest[:] = [*keep_first, *finest[2:-1:2], finest[-1]]


def rungs(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... below last, then last: [1, 2, 4, 8, 12] for (1, 12, 2)."""
    values = []
    while first < last:
        values.append(first)
        first *= factor
    return [*values, last]


def _ladder(
    sequences: Sequence[int],
    contexts: Sequence[int],
    chunks: Sequence[int],
    limits: LadderLimits,
    grouped: bool,
) -> BucketLadder:
    pages = [-(-context // limits.page_size) for context in contexts]
    decode = [Bucket(1, count, width) for count in sequences for width in pages]
    prefill = []
    for chunk in chunks:
        own = -(-chunk // limits.page_size)
        widths = [width for width in pages if width >= own] or [pages[-1]]
        prefill += [Bucket(chunk, 1, width) for width in widths]
        if grouped:
            most = min(limits.max_num_batched_tokens // chunk, limits.max_num_seqs)
            # Grouped prompts are short ones: only the narrowest page tables.
            prefill += [Bucket(chunk, n, widths[0]) for n in rungs(1, most, 4) if n > 1]
    ladder = BucketLadder(tuple(sorted(decode)), tuple(sorted(prefill)), ())
    sizes = sorted({bucket.sequences for bucket in (*ladder.decode, *ladder.prefill)})
    return dataclasses.replace(ladder, sampler_sequences=tuple(sizes))
