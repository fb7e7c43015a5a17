"""Which decode rung a ladder lacks for the traffic it serves: found by counting, not by timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyjax.core.buckets import Bucket, BucketLadder

PADDING = 1.25  # rows of the rung in use over rows of a launch, from which on a rung is missed
_SHARE = 0.9  # of the launches that the new rung has to hold


def with_missing_rung(ladder: BucketLadder, rows: Sequence[int]) -> BucketLadder | None:
    """Returns the ladder with a rung for the row counts of decode launches, None if it has one.

    The rung has the row count that nine launches in ten do not exceed, at every context width.
    """
    common = sorted(rows)[int(_SHARE * (len(rows) - 1))]
    in_use = min((b.sequences for b in ladder.decode if b.sequences >= common), default=0)
    if in_use < PADDING * common:
        return None
    added = (Bucket(1, common, width) for width in {b.pages for b in ladder.decode})
    return dataclasses.replace(
        ladder,
        decode=tuple(sorted({*ladder.decode, *added})),
        sampler_sequences=tuple(sorted({*ladder.sampler_sequences, common})),
    )
