"""The knobs of a plan: rungs from the traffic, edits that are legal, equal plans once."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels import CATALOGUE
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.chips import chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from search import plan_space
from search.edits import Surroundings, apply, edit
from search.plan_space import BASE, COMPILER_OPTIONS, edits_of, knobs
from search.traffic import Row, Traffic

LADDER = BucketLadder((Bucket(1, 8, 64),), (Bucket(512, 1, 64),), (1, 8))
TRAFFIC = Traffic(
    {
        "decode": ((Row(1, 40),), (Row(1, 50), Row(1, 90))),
        "prefill": ((Row(30, 30),), (Row(24, 24),)),
    },
    {"decode": 1.0, "prefill": 0.1},
)
AROUND = Surroundings({}, CATALOGUE, chip("cpu"), COMPILER_OPTIONS["cpu"])


def space(base, choices=None):
    choices = choices or knobs(base, TRAFFIC, 8, "cpu")
    return plan_space.plan_space(base, choices, AROUND, seed=0)


def test_rungs_come_from_the_traffic():
    found = knobs(Plan(ladder=LADDER), TRAFFIC, 8, "cpu")
    assert found["decode sequences"][:2] == [BASE, "2"]
    assert found["decode pages"][1] == "12"  # 90 tokens in pages of 8
    assert found["prefill tokens"][1] == "30"
    assert all(values[0] == BASE for values in found.values())


def test_every_point_is_a_legal_plan_and_no_two_are_equal():
    base = Plan(ladder=LADDER)
    found, plans, refused = space(base)
    assert len({plan.digest for plan in plans.values()}) == len(plans) == len(found)
    assert base in plans.values() and refused == {}
    for point, plan in plans.items():
        assert apply(base, edits_of(point, base), AROUND) == plan
        assert set(LADDER.decode) <= set(plan.ladder.decode)
        sizes = set(plan.ladder.sampler_sequences)
        assert {b.sequences for b in (*plan.ladder.decode, *plan.ladder.prefill)} <= sizes


def test_added_decode_buckets_are_rows_by_pages():
    base = Plan(ladder=LADDER)
    point = (("decode pages", "12"), ("decode sequences", "1,2"))
    plan = apply(base, edits_of(point, base), AROUND)
    assert set(plan.ladder.decode) == {
        Bucket(1, rows, pages) for rows in (1, 2, 8) for pages in (12, 64)
    }


def test_ops_may_fall_back_to_their_reference():
    key = "matmul[M=8,K=64,N=64|x:bfloat16,w:bfloat16]"
    choice = Choice("mosaic_gpu.matmul.stream", ())
    base = dataclasses.replace(Plan(ladder=LADDER), choices=((key, choice),))
    assert knobs(base, TRAFFIC, 8, "gpu")["kernel matmul"] == [BASE, "reference"]
    assert edits_of((("kernel matmul", "reference"),), base) == (edit("reference", key),)


def test_illegal_points_are_left_out_and_counted():
    choices = {"option xla_backend_optimization_level": [BASE, "1", "99"]}
    found, _, refused = space(Plan(ladder=LADDER), choices)
    assert len(found) == 2 and list(refused.values()) == [1]
    with pytest.raises(ScheduleError, match="99"):
        apply(
            Plan(ladder=LADDER),
            edits_of((("option xla_backend_optimization_level", "99"),), Plan(ladder=LADDER)),
            AROUND,
        )


def test_a_large_space_is_drawn_by_seed_and_keeps_the_start(monkeypatch):
    monkeypatch.setattr(plan_space, "MAX_POINTS", 10)
    base = Plan(ladder=LADDER)
    found, plans, _ = space(base)
    assert 2 <= len(found) <= 10 and base in plans.values()
    assert space(base)[0].points == found.points
