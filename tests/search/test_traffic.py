"""Replayed traffic: drawn by seed, within limits, cut into the ladder's buckets."""

import numpy as np
import pytest

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError
from polyjax.engine.bucketing import BucketChooser
from search.traffic import Row, Traffic, TrafficSpec, buckets_used, draw, launches

SPEC = TrafficSpec((100, 700), (50, 200), (1, 6), decode_steps=20, prefill_steps=10, seed=3)


def test_steps_are_drawn_by_seed_within_the_limits():
    traffic = draw(SPEC, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128)
    assert traffic == draw(SPEC, 512, 4, 128)
    assert {len(step) for step in traffic.steps["decode"]} == {1, 4}
    for step in traffic.steps["decode"]:
        assert all(row.tokens == 1 and 1 < row.context <= 512 for row in step)
    for (row,) in traffic.steps["prefill"]:
        assert 1 <= row.tokens <= 128 and row.tokens <= row.context <= 511
    assert max(row.context for (row,) in traffic.steps["prefill"]) > 128  # later chunks, too


def test_a_token_takes_its_share_of_decode_steps_and_of_its_prompt():
    spec = TrafficSpec((256,), (64,), (4,), decode_steps=3, prefill_steps=3)
    traffic = draw(spec, 4096, 8, 128)
    # 4 rows a step; two chunks a prompt for 64 tokens of answer.
    assert traffic.us_per_token({"decode": 40.0, "prefill": 320.0}) == pytest.approx(10 + 10)


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "concurrency"])
def test_lengths_are_checked_by_name(field):
    with pytest.raises(ConfigError, match=field):
        TrafficSpec.from_json({field: [0]})
    with pytest.raises(ConfigError, match="malformed"):
        TrafficSpec.from_json({field: 7})
    with pytest.raises(ConfigError, match="no_such"):
        TrafficSpec.from_json({"no_such": [1]})


def test_a_description_survives_json():
    assert TrafficSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.digest != TrafficSpec().digest


def test_rows_run_in_the_buckets_the_scheduler_would_choose():
    ladder = BucketLadder((Bucket(1, 2, 4), Bucket(1, 4, 16)), (Bucket(32, 1, 16),), (1, 2, 4))
    chooser = BucketChooser(ladder, 16)
    short = (Row(1, 20), Row(1, 30))
    assert launches(short, "decode", chooser, 8) == [(Bucket(1, 2, 4), [0, 1])]
    many = tuple(Row(1, 40) for _ in range(6))  # more than any bucket holds
    cut = launches(many, "decode", chooser, 8)
    assert sorted(row for _, rows in cut for row in rows) == list(range(6))
    assert launches((Row(20, 60),), "prefill", chooser, 8) == [(Bucket(32, 1, 16), [0])]
    with pytest.raises(ConfigError, match="33"):
        launches((Row(33, 60),), "prefill", chooser, 8)
    traffic = Traffic({"decode": (short,)}, {"decode": 1.0})
    assert buckets_used(traffic, ladder, 8, 16) == {"decode": (Bucket(1, 2, 4),)}


def test_every_drawn_step_fits_a_ladder_for_the_same_limits():
    ladder = BucketLadder((Bucket(1, 4, 64),), (Bucket(32, 1, 64), Bucket(128, 1, 64)), (1, 4))
    rng = np.random.default_rng(0)
    for seed in rng.integers(0, 1000, 20):
        spec = TrafficSpec((5, 900), (1, 90), (1, 3, 9), seed=int(seed))
        used = buckets_used(draw(spec, 512, 4, 128), ladder, 8, 64)
        assert used["decode"] == (Bucket(1, 4, 64),)
