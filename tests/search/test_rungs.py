"""A rung is missed where launches are padded much, and found by their row counts alone."""

from __future__ import annotations

import pytest

from polyjax.core.buckets import Bucket, BucketLadder
from search.rungs import with_missing_rung

LADDER = BucketLadder(
    (Bucket(1, 4, 8), Bucket(1, 4, 32), Bucket(1, 16, 8), Bucket(1, 16, 32)),
    (Bucket(64, 1, 32),),
    (1, 4, 16),
)


def test_the_rung_that_most_launches_lack_is_added_at_every_width() -> None:
    found = with_missing_rung(LADDER, [8] * 14 + [7, 16])
    assert found is not None
    assert set(found.decode) - set(LADDER.decode) == {Bucket(1, 8, 8), Bucket(1, 8, 32)}
    assert found.sampler_sequences == (1, 4, 8, 16)
    assert found.prefill == LADDER.prefill


@pytest.mark.parametrize("rows", [[4] * 16, [15] * 16, [13] * 16, [16] * 16, [99] * 16])
def test_a_ladder_that_fits_stays(rows: list[int]) -> None:
    assert with_missing_rung(LADDER, rows) is None
