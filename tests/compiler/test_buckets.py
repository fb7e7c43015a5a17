"""The ladder covers every step within the limits, and a cap keeps its ends."""

import pytest

from polyjax.compiler.buckets import (
    ACCELERATOR_POLICY,
    CPU_POLICY,
    LadderLimits,
    LadderPolicy,
    derive_ladder,
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
