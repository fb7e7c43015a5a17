"""Packing: every field of a launch lands where the layout says, floats and seeds bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from polyjax.core.batch_layout import (
    ALIGNMENT_WORDS,
    BANS_STOP,
    FROM_SLOT,
    SAMPLES,
    SAMPLING_FLOATS,
    SAMPLING_INTS,
    BatchLayout,
    PackedBatch,
)
from polyjax.core.buckets import Bucket
from polyjax.engine.batch import BatchPacker
from polyjax.engine.pages import PageAllocator
from polyjax.engine.sequence import Sequence, fold_seed
from polyjax.engine.step import Launch, ScheduledStep, make_launch
from polyjax.engine.types import Request, SamplingParams
from tests.engine.paged_device import full_group, window_group

NUM_SLOTS = 5
PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    frequency_penalty=-0.5,
    presence_penalty=0.25,
    seed=-3,
    min_tokens=2,
)


class Packing:
    """A packer with an allocator of two KV groups, pages of four tokens, window eight."""

    def __init__(self) -> None:
        groups = (full_group(), window_group(8))
        self.allocator = PageAllocator(groups, 4, [64, 64])
        self.packer = BatchPacker(NUM_SLOTS, len(groups), max_pages=12)

    def sequence(self, slot: int, num_tokens: int, params: SamplingParams) -> Sequence:
        ask = Request(f"r{slot}", list(range(100, 100 + num_tokens)), params)
        sequence = Sequence(ask, slot, num_tokens + 9, (2,), self.allocator.new_pages())
        sequence.slot = slot
        assert self.allocator.admit(sequence.pages, 0, num_tokens, num_tokens, 0.0)
        return sequence

    def pack(
        self,
        launch: Launch,
        admitted: tuple[Sequence, ...] = (),
        extended: tuple[Sequence, ...] = (),
    ) -> PackedBatch:
        step = ScheduledStep(0, (launch,), [*admitted], [*admitted, *extended], 0)
        self.packer.update(step)
        return self.packer.layout(launch.bucket).split(self.packer.pack(launch)[0])


@pytest.mark.parametrize("bucket", [Bucket(3, 4, 5), Bucket(1, 1, 1), Bucket(1, 70, 65)])
def test_fields_are_disjoint_aligned_views(bucket: Bucket) -> None:
    layout = BatchLayout(bucket, num_groups=2)
    flat = np.arange(layout.size, dtype=np.int32)
    fields = layout.split(flat)
    assert [field.shape for field in fields] == list(layout.shapes)
    assert all(np.shares_memory(field, flat) for field in fields), "the host writes through views"
    words = np.concatenate([field.reshape(-1) for field in fields])
    assert len(set(words.tolist())) == len(words), "two fields share a word"
    rows = layout.split_rows(flat[: layout.sampler_size])
    assert all(np.array_equal(a, b) for a, b in zip(rows, fields, strict=True) if a is not None)

    starts = [*fields[:5], *fields.sampling_floats.T, *fields.sampling_ints.T, fields.tokens]
    starts += [*fields.page_tables, *fields.first_pages]
    firsts = [int(part.reshape(-1)[0]) for part in starts]
    assert all(first % ALIGNMENT_WORDS == 0 for first in firsts), "kernels get pointers to these"


def test_device_reads_what_the_host_wrote() -> None:
    import jax

    layout = BatchLayout(Bucket(1, 4, 5), num_groups=2)
    flat = np.arange(layout.size, dtype=np.int32)
    flat[:] = np.random.default_rng(0).integers(-(2**31), 2**31, layout.size)
    host, device = layout.split(flat), jax.jit(layout.split)(flat)
    for ours, theirs in zip(host, device, strict=True):
        assert np.array_equal(ours, theirs)

    def floats(packed: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(layout.split(packed).sampling_floats, "float32")

    expected = host.sampling_floats.view(np.float32)
    assert np.array_equal(np.asarray(jax.jit(floats)(flat)).view(np.int32), expected.view(np.int32))


def test_prefill_rows() -> None:
    packing = Packing()
    long = packing.sequence(slot=3, num_tokens=11, params=PARAMS)
    short = packing.sequence(slot=1, num_tokens=4, params=SamplingParams(temperature=0.0, top_k=-1))
    short.num_total += 1  # its row samples
    launch = make_launch(Bucket(8, 4, 6), [long, short], [4, 0], [6, 4], [False, True])
    batch = packing.pack(launch, admitted=(long, short))

    assert batch.tokens.tolist() == [
        [104, 105, 106, 107, 108, 109, 0, 0],
        [100, 101, 102, 103, 0, 0, 0, 0],
        [0] * 8,
        [0] * 8,
    ]
    assert batch.query_lens.tolist() == [6, 4, 0, 0]
    assert batch.context_lens.tolist() == [10, 4, 0, 0]
    assert batch.slots.tolist() == [3, 1, NUM_SLOTS, NUM_SLOTS]
    assert batch.next_tokens.tolist() == [110, 0, 0, 0]
    assert batch.flags.tolist() == [0, SAMPLES, 0, 0]
    for group in range(2):
        tables = [sequence.pages.tables[group] for sequence in (long, short)]
        assert batch.page_tables[group].tolist() == [
            [*tables[0], 0, 0, 0],
            [*tables[1], 0, 0, 0, 0, 0],
            [0] * 6,
            [0] * 6,
        ]
    assert not batch.first_pages.any()


def test_sampling_parameters_keep_their_bits() -> None:
    packing = Packing()
    sequence = packing.sequence(slot=2, num_tokens=4, params=PARAMS)
    sequence.num_total += 1
    launch = make_launch(Bucket(4, 2, 2), [sequence], [0], [4], [True])
    batch = packing.pack(launch, admitted=(sequence,))
    floats = batch.sampling_floats.view(np.float32)
    assert floats[0].tolist() == [np.float32(getattr(PARAMS, name)) for name in SAMPLING_FLOATS]
    neutral = dict(zip(SAMPLING_FLOATS, floats[1].tolist(), strict=True))
    assert neutral == {
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    ints = dict(zip(SAMPLING_INTS, batch.sampling_ints.view(np.uint32)[0].tolist(), strict=True))
    assert ints == {"top_k": 40, "seed": fold_seed(-3)}
    assert batch.flags[0] == SAMPLES | BANS_STOP, "min_tokens is 2"


def test_seeds_fold_into_32_bits() -> None:
    seeds = [0, 1, 5, 2**31, 2**32 - 1, -1, -2, 2**32, 5 << 32, 5 << 32 | 5, 2**63 - 1]
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
    folded = [fold_seed(seed) for seed in seeds]
    assert folded[:5] == seeds[:5]
    assert len(set(folded)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in folded)


def test_decode_rows_take_tokens_in_flight_from_the_slot() -> None:
    packing = Packing()
    params = SamplingParams(max_tokens=9, temperature=0.0)
    known = packing.sequence(slot=0, num_tokens=5, params=params)
    flying = packing.sequence(slot=4, num_tokens=8, params=params)
    flying.num_total = 10  # one token in flight, one sampled by this launch
    known.num_total = 6
    assert packing.allocator.extend(flying.pages, 8, 9)
    launch = make_launch(Bucket(1, 4, 4), [known, flying], [4, 8], [1, 1], [True, True])
    batch = packing.pack(launch, admitted=(known, flying))
    assert batch.tokens[:, 0].tolist() == [104, 0, 0, 0]
    assert batch.flags.tolist() == [SAMPLES, SAMPLES | FROM_SLOT, 0, 0]
    assert batch.context_lens.tolist() == [5, 9, 0, 0]


def test_tables_follow_growth_and_sliding_windows() -> None:
    packing = Packing()
    sequence = packing.sequence(slot=2, num_tokens=4, params=PARAMS)
    bucket = Bucket(1, 1, 12)
    batch = packing.pack(make_launch(bucket, [sequence], [3], [1], [False]), admitted=(sequence,))
    for start in range(4, 40):
        assert packing.allocator.extend(sequence.pages, start, start + 1)
        launch = make_launch(bucket, [sequence], [start], [1], [False])
        batch = packing.pack(launch, extended=(sequence,))
        for group in range(2):
            table = sequence.pages.tables[group]
            assert batch.page_tables[group, 0].tolist() == table + [0] * (12 - len(table))
            assert batch.first_pages[group, 0] == sequence.pages.first[group]
    assert batch.first_pages[:, 0].tolist() == [0, (39 - 7) // 4]


def test_the_next_owner_of_a_slot_sees_nothing_of_the_last() -> None:
    packing = Packing()
    bucket = Bucket(4, 1, 12)
    last = packing.sequence(slot=1, num_tokens=40, params=PARAMS)
    packing.pack(make_launch(bucket, [last], [36], [4], [False]), admitted=(last,))
    packing.allocator.release(last.pages)
    following = packing.sequence(slot=1, num_tokens=4, params=SamplingParams())
    launch = make_launch(bucket, [following], [0], [4], [False])
    batch = packing.pack(launch, admitted=(following,))
    assert np.count_nonzero(batch.page_tables) == 2
    assert batch.sampling_ints[0, 0] == 0
    assert batch.sampling_floats.view(np.float32)[0, 0] == 1.0


def test_a_bucket_may_have_more_columns_than_any_sequence() -> None:
    packing = Packing()
    sequence = packing.sequence(slot=0, num_tokens=4, params=PARAMS)
    launch = make_launch(Bucket(4, 1, 20), [sequence], [0], [4], [False])
    assert packing.pack(launch, admitted=(sequence,)).page_tables.shape == (2, 1, 20)


def test_every_launch_gets_an_array_of_its_own() -> None:
    packing = Packing()
    sequence = packing.sequence(slot=0, num_tokens=4, params=PARAMS)
    launch = make_launch(Bucket(4, 1, 4), [sequence], [0], [4], [False])
    packing.pack(launch, admitted=(sequence,))
    first, second = packing.packer.pack(launch)[0], packing.packer.pack(launch)[0]
    assert np.array_equal(first, second) and not np.shares_memory(first, second)


def test_a_decode_that_goes_on_is_the_last_one_a_token_further() -> None:
    packing = Packing()
    one = packing.sequence(slot=0, num_tokens=4, params=PARAMS)
    two = packing.sequence(slot=3, num_tokens=6, params=PARAMS)
    bucket = Bucket(1, 4, 12)

    def pack(rows: dict[Sequence, int], changed: tuple[Sequence, ...] = ()) -> bool:
        ones = [1] * len(rows)
        launch = make_launch(bucket, [*rows], [*rows.values()], ones, [True] * len(rows))
        packing.packer.update(ScheduledStep(0, (launch,), [], [*changed], 0))
        flat, continues = packing.packer.pack(launch)
        assert np.array_equal(flat, packing.packer._packed(launch))
        return continues

    packing.packer.update(ScheduledStep(0, (), [one, two], [one, two], 0))
    assert not pack({one: 4, two: 6})
    assert pack({one: 5, two: 7})
    assert pack({one: 6, two: 8})
    assert not pack({one: 7}), "a row less"
    assert not pack({one: 9}), "a token was left out"
    assert not pack({one: 10}, changed=(one,)), "a page more"
    assert pack({one: 11})
    assert not pack({two: 12}), "another row"


def test_scheduling_needs_no_jax() -> None:
    modules = "scheduler, batch, pages, sequence, step, launches, commit, roster, bucketing"
    code = f"import sys; from polyjax.engine import {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
