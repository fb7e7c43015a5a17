"""Choice of buckets: whatever the ladder, every row fits its bucket and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import ConfigError
from polyjax.engine.bucketing import LAUNCH_COST_TOKENS, BucketChooser
from tests.engine.paged_device import ladder

MAX_PAGES = 32
SIZES = st.sampled_from([1, 2, 4, 8])
PAGES = st.sampled_from([4, 16, MAX_PAGES])
LADDERS = st.builds(
    lambda decode, prefill, rung: ladder(
        [*decode, (1, MAX_PAGES)], [*prefill, (rung, 1, MAX_PAGES)]
    ),
    st.lists(st.tuples(SIZES, PAGES), max_size=5),
    st.lists(st.tuples(st.sampled_from([4, 16, 64]), SIZES, PAGES), max_size=6),
    st.sampled_from([4, 16]),
)


@given(
    buckets=LADDERS,
    remaining=st.integers(1, 300),
    allowed=st.integers(1, 300),
    pages=st.integers(1, MAX_PAGES),
)
@settings(max_examples=200, deadline=None)
def test_a_chunk_is_allowed_and_has_a_bucket(
    buckets: BucketLadder, remaining: int, allowed: int, pages: int
) -> None:
    chooser = BucketChooser(buckets, MAX_PAGES)
    length = chooser.chunk_tokens(remaining, allowed, pages)
    assert 1 <= length <= min(remaining, allowed)
    bucket = chooser.prefill(length, 1, pages)
    assert bucket is not None and bucket.tokens >= length and bucket.pages >= pages


@pytest.mark.parametrize(
    ("remaining", "allowed", "expected"),
    [
        (16, 100, 16),
        (9, 100, 9),  # the rest, padded to 16
        (40, 100, 40),  # the rest, padded to 64
        (20, 100, 16),  # 64 would be more than twice as much
        (500, 100, 64),
        (500, 60, 60),  # nearly a whole bucket
        (500, 30, 16),
        (500, 3, 3),  # less than any bucket has
    ],
)
def test_a_chunk_wastes_little_padding(remaining: int, allowed: int, expected: int) -> None:
    rungs = [(4, 8, 8), (16, 4, MAX_PAGES), (64, 1, MAX_PAGES)]
    chooser = BucketChooser(ladder([(1, MAX_PAGES)], rungs), MAX_PAGES)
    assert chooser.chunk_tokens(remaining, allowed, pages=MAX_PAGES) == expected


@given(buckets=LADDERS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_grouping_covers_every_row_once_and_pays_off(
    buckets: BucketLadder, data: st.DataObject
) -> None:
    chooser = BucketChooser(buckets, MAX_PAGES)
    longest = chooser.chunk_tokens(1000, 1000, MAX_PAGES)
    rows = data.draw(
        st.lists(st.tuples(st.integers(1, longest), st.integers(1, MAX_PAGES)), max_size=12)
    )
    lengths, pages = [row[0] for row in rows], [row[1] for row in rows]
    groups = chooser.group(lengths, pages)
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(rows)))
    for bucket, indices in groups:
        assert bucket in buckets.prefill
        assert len(indices) <= bucket.sequences
        assert all(lengths[i] <= bucket.tokens and pages[i] <= bucket.pages for i in indices)
    cost = sum(b.tokens * b.sequences + LAUNCH_COST_TOKENS for b, _ in groups)
    alone = [chooser.prefill(length, 1, page) for length, page in rows]
    assert cost <= sum(b.tokens * b.sequences + LAUNCH_COST_TOKENS for b in alone if b)


def test_alike_rows_share_a_launch_and_unlike_ones_do_not() -> None:
    rungs = [(16, 1, 8), (16, 4, 8), (256, 1, 8), (256, 4, 8)]
    chooser = BucketChooser(ladder([(1, 8)], rungs), 8)
    groups = chooser.group([10, 250, 12, 9, 16], [1, 8, 1, 1, 1])
    assert [(bucket.tokens, sorted(rows)) for bucket, rows in groups] == [
        (256, [1]),
        (16, [0, 2, 3, 4]),
    ]


@given(buckets=LADDERS, pages=st.lists(st.integers(1, MAX_PAGES), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_split_decodes_cover_every_row_once(buckets: BucketLadder, pages: list[int]) -> None:
    chooser = BucketChooser(buckets, MAX_PAGES)
    groups = chooser.split_decode(pages)
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(pages)))
    for bucket, indices in groups:
        assert bucket in buckets.decode
        assert len(indices) <= bucket.sequences
        assert max(pages[index] for index in indices) <= bucket.pages


def test_the_cheapest_decode_bucket_is_chosen() -> None:
    chooser = BucketChooser(ladder([(1, 8), (4, 8), (4, 32), (8, 32)], [(4, 1, 32)]), 32)
    choices = {
        (sequences, pages): chooser.decode(sequences, pages)
        for sequences, pages in [(1, 3), (2, 8), (2, 9), (5, 1), (1, 9), (9, 1)]
    }
    found = {key: (b.sequences, b.pages) if b else None for key, b in choices.items()}
    assert found == {
        (1, 3): (1, 8),
        (2, 8): (4, 8),
        (2, 9): (4, 32),
        (5, 1): (8, 32),
        (1, 9): (4, 32),
        (9, 1): None,
    }


@pytest.mark.parametrize(
    ("buckets", "names"),
    [
        (ladder([(1, 31)], [(4, 1, 32)]), "decode buckets reach 31"),
        (ladder([(1, 32)], [(4, 1, 31)]), "prefill buckets reach 31"),
        (ladder([], [(4, 1, 32)]), "decode buckets reach 0"),
        (
            BucketLadder(ladder([], [(4, 1, 32)]).prefill, ladder([], [(4, 1, 32)]).prefill, ()),
            "one",
        ),
    ],
)
def test_ladders_that_leave_a_sequence_out_are_refused(buckets: BucketLadder, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        BucketChooser(buckets, 32)
