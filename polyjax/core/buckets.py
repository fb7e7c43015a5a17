"""The padded step shapes that programs exist in. No jax: the scheduler picks among them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One padded step shape: `tokens` new tokens for each of `sequences`, with `pages` of context.

    tokens == 1 is decode. Context capacity is pages x page size.
    """

    tokens: int
    sequences: int
    pages: int


@dataclasses.dataclass(frozen=True)
class BucketLadder:
    """Padded sizes the programs exist in, each ascending; forward and sampler are separate.

    `decode` holds buckets with tokens == 1; `prefill` holds the others; `sampler_sequences` the
    batch sizes of the stand-alone samplers.
    """

    decode: tuple[Bucket, ...]
    prefill: tuple[Bucket, ...]
    sampler_sequences: tuple[int, ...]
