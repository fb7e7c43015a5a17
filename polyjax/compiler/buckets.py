"""The bucket ladder that limits ask for: which padded step shapes get a program.

Coarse and additive: a rung costs seconds of compiling, padding costs microseconds a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
    (1, 2, 4, 8, 16, 32, 64, 128),
    1024,
    4,
    (128, 256, 512, 1024, 2048, 4096, 8192),  # a prompt is compute-bound there: padding is time
    grouped=True,
)

LIVE_PAGES_POLICY = dataclasses.replace(
    ACCELERATOR_POLICY, first_context_tokens=4096, context_factor=8
)
"""Where every attention reads live pages only, a wide page table costs its transfer: 64 columns for
256 rows are 64 KiB a step, 2,048 columns would be 2 MiB."""


@dataclasses.dataclass(frozen=True)
class LadderLimits:
    """The largest step the engine may take. `page_size` in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class LaunchCounts:
    """How many launches had which true size: rows and longest context of decodes, longest new part
    of prefills."""

    decode_sequences: Mapping[int, int]
    decode_context_tokens: Mapping[int, int]
    prefill_tokens: Mapping[int, int]


def derive_ladder(limits: LadderLimits, policy: LadderPolicy, max_buckets: int = 0) -> BucketLadder:
    """Returns a ladder on which every step within `limits` fits.

    `max_buckets` above 0 drops the finest rungs until decode and prefill together have no more.
    Raises ConfigError where even the coarsest ladder has more.
    """
    sequences = sorted({min(count, limits.max_num_seqs) for count in policy.sequences})
    if sequences[-1] < limits.max_num_seqs:
        sequences.append(limits.max_num_seqs)
    contexts = _contexts(limits, policy)
    chunks = sorted({min(c, limits.max_num_batched_tokens) for c in policy.chunk_tokens})
    return _fitting_ladder(sequences, contexts, chunks, limits, policy, max_buckets)


def ladder_for(
    counts: LaunchCounts, limits: LadderLimits, policy: LadderPolicy, max_buckets: int = 0
) -> BucketLadder:
    """Returns the ladder that would have padded these launches least, on which any step fits.

    It has as many rungs of each kind as `derive_ladder` gives. Raises ConfigError as that does.
    """
    usual = derive_ladder(limits, policy)
    sizes = {bucket.sequences for bucket in usual.decode}
    chunks = {bucket.tokens for bucket in usual.prefill}
    contexts = _contexts(limits, policy)
    return _fitting_ladder(
        least_padding(counts.decode_sequences, limits.max_num_seqs, len(sizes)),
        least_padding(counts.decode_context_tokens, limits.max_model_len, len(contexts)),
        least_padding(counts.prefill_tokens, limits.max_num_batched_tokens, len(chunks)),
        *(limits, policy, max_buckets),
    )


def least_padding(counts: Mapping[int, int], top: int, most: int) -> list[int]:
    """At most `most` rungs, `top` the last, over which sizes that occur `counts` times pad least.

    Exact, by dynamic programming over the sizes that occur; more than 64 of them are first merged
    into the next of 64 quantiles.
    """
    seen = {min(size, top): 0 for size in counts if counts[size] > 0 and size > 0}
    for size, count in counts.items():
        if count > 0 and size > 0:
            seen[min(size, top)] += count
    sizes = sorted({*_thinned(seen), top})
    weights = dict.fromkeys(sizes, 0)
    for size, count in seen.items():
        weights[next(rung for rung in sizes if rung >= size)] += count
    # best[k][i]: least padded total of sizes[:i+1] with sizes[i] the last of k + 1 rungs.
    best = [[size * sum(weights[s] for s in sizes[: i + 1]) for i, size in enumerate(sizes)]]
    last: list[list[int]] = [[-1] * len(sizes)]
    for _ in range(min(most, len(sizes)) - 1):
        row, previous = [], []
        for i, size in enumerate(sizes):
            options = [(best[0][i], -1)]
            covered = 0
            for j in range(i - 1, -1, -1):
                covered += weights[sizes[j + 1]]
                options.append((best[-1][j] + size * covered, j))
            cost, j = min(options)
            row.append(cost)
            previous.append(j)
        best.append(row)
        last.append(previous)
    chosen, index = [], len(sizes) - 1
    for previous in reversed(last):
        if index < 0:
            break
        chosen.append(sizes[index])
        index = previous[index]
    return chosen[::-1]


def _thinned(counts: Mapping[int, int], most: int = 64) -> list[int]:
    """The sizes themselves if they are few, else the ends of as many parts of equal count."""
    if len(counts) <= most:
        return list(counts)
    ends: list[int] = []
    total, seen = sum(counts.values()), 0
    for size in sorted(counts):
        seen += counts[size]
        if seen * most >= total * (len(ends) + 1):
            ends.append(size)
    return ends


def _contexts(limits: LadderLimits, policy: LadderPolicy) -> list[int]:
    longest = limits.max_model_len
    if not policy.context_factor:
        return [longest]
    return rungs(min(policy.first_context_tokens, longest), longest, policy.context_factor)


def _fitting_ladder(
    sequences: list[int],
    contexts: list[int],
    chunks: list[int],
    limits: LadderLimits,
    policy: LadderPolicy,
    max_buckets: int,
) -> BucketLadder:
    """The ladder of these rungs, of which the finest go until it has at most `max_buckets`."""
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
