"""The ladder covers every step within the limits, and a cap keeps its ends."""

import itertools
import random
from collections.abc import Sequence

import pytest

from polyjax.compiler.buckets import (
    ACCELERATOR_POLICY,
    CPU_POLICY,
    LadderLimits,
    LadderPolicy,
    LaunchCounts,
    derive_ladder,
    ladder_for,
    least_padding,
    rungs,
)
from polyjax.core.errors import ConfigError
from polyjax.engine.bucketing import BucketChooser

LIMITS = LadderLimits(
    max_num_seqs=48, max_num_batched_tokens=2048, max_model_len=5000, page_size=16
)
PAGES = -(-5000 // 16)


@pytest.mark.parametrize("policy", [CPU_POLICY, ACCELERATOR_POLICY])
@pytest.mark.parametrize("max_buckets", [0, 30, 12, 4])
def test_every_step_within_the_limits_fits(policy: LadderPolicy, max_buckets: int) -> None:
    ladder = derive_ladder(LIMITS, policy, max_buckets)
    assert not max_buckets or len(ladder.decode) + len(ladder.prefill) <= max_buckets
    chooser = BucketChooser(ladder, PAGES)  # raises where a sequence fits nowhere
    assert chooser.decode(48, PAGES) is not None
    assert all(chooser.prefill(1, 1, pages) is not None for pages in (1, 7, PAGES))
    assert all(bucket.tokens * bucket.sequences <= 2048 for bucket in ladder.prefill)
    used = {bucket.sequences for bucket in (*ladder.decode, *ladder.prefill)}
    assert set(ladder.sampler_sequences) == used


def test_short_contexts_do_not_pay_for_long_ones_where_padding_costs() -> None:
    ladder = derive_ladder(LIMITS, ACCELERATOR_POLICY)
    chooser = BucketChooser(ladder, PAGES)
    short = chooser.decode(48, 3)
    assert short is not None
    assert short.pages == 1024 // 16


def test_thinning_keeps_the_smallest_rungs() -> None:
    ladder = derive_ladder(LIMITS, ACCELERATOR_POLICY, max_buckets=20)
    assert min(bucket.sequences for bucket in ladder.decode) == 1
    assert min(bucket.pages for bucket in ladder.decode) == 1024 // 16


def test_an_impossible_cap_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--max_programs=1 is less than the 2 needed"):
        derive_ladder(LIMITS, CPU_POLICY, max_buckets=1)


def test_rungs_end_with_the_limit() -> None:
    assert rungs(1, 12, 2) == [1, 2, 4, 8, 12]
    assert rungs(5, 5, 4) == [5]


@pytest.mark.parametrize("seed", range(20))
def test_rungs_pad_what_occurs_least(seed: int) -> None:
    """Against every choice of rungs there is."""
    rng = random.Random(seed)
    top, most = rng.randint(3, 10), rng.randint(1, 4)
    counts = {size: rng.randint(0, 5) for size in range(1, top + 1)}

    def padded(rungs: Sequence[int]) -> int:
        return sum(n * next(r for r in rungs if r >= size) for size, n in counts.items())

    found = least_padding(counts, top, most)
    assert len(found) <= most
    assert found[-1] == top
    others = itertools.combinations(range(1, top), min(most, top) - 1)
    assert padded(found) == min(padded([*other, top]) for other in others)


def test_many_sizes_are_thinned_out() -> None:
    counts = dict.fromkeys(range(1, 1000), 1) | {500: 10_000}
    found = least_padding(counts, 2000, 3)
    assert found[-1] == 2000
    assert 500 in found
    assert least_padding({}, 16, 3) == [16]


def test_a_ladder_for_traffic_has_its_sizes_and_still_holds_any_step() -> None:
    limits = LadderLimits(16, 512, 2048, 16)
    counts = LaunchCounts({3: 100, 5: 40}, {}, {7: 30, 100: 50})
    ladder = ladder_for(counts, limits, CPU_POLICY)
    assert [bucket.sequences for bucket in ladder.decode] == [3, 5, 16]
    assert [bucket.tokens for bucket in ladder.prefill] == [7, 100, 512]
    assert ladder.sampler_sequences == (1, 3, 5, 16)
    BucketChooser(ladder, 128)
    few = ladder_for(counts, limits, CPU_POLICY, max_buckets=2)
    assert (len(few.decode), len(few.prefill)) == (1, 1)
