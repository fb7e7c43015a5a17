"""Edits compose, replay from JSON and are refused before any compile."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.op import Choice, Schedule
from polyjax.core.ops import MATMUL
from polyjax.core.plan import Bucket, BucketLadder, Plan
from search.edits import Edit, Surroundings, apply, edit

WORKLOAD = MATMUL.workload(
    jax.ShapeDtypeStruct((1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
)
KEY = WORKLOAD.key


@dataclasses.dataclass(frozen=True)
class Tiles(Schedule):
    rows: int = 8
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class ToyKernel:
    name: str = "toy.matmul"
    op: object = MATMUL
    requires: frozenset = frozenset()
    platform: str = "gpu"
    schedule_type: ClassVar = Tiles

    def supports(self, workload):
        return None

    def default(self, workload, chip):
        return Tiles()

    def check(self, workload, schedule, chip):
        if workload["N"] % schedule.rows:
            raise ScheduleError(f"N={workload['N']} is no multiple of rows={schedule.rows}")


LADDER = BucketLadder(
    decode=(Bucket(1, 1, 8), Bucket(1, 8, 64)),
    prefill=(Bucket(16, 1, 64),),
    sampler_sequences=(1, 8),
)
AROUND = Surroundings(
    {KEY: WORKLOAD},
    {"toy.matmul": ToyKernel()},
    chip("cpu"),
    {"xla_option": ("1", "2")},
    num_devices=4,
)
PLAN = Plan(ladder=LADDER)
USE_KERNEL = edit("kernel", KEY, kernel="toy.matmul")


def test_edits_compose_in_order_and_replay_from_json():
    edits = [
        USE_KERNEL,
        edit("schedule", KEY, rows=16),
        edit("schedule", KEY, stages=4),
        edit("compiler_option", "xla_option", value="2"),
        edit("ladder", "decode", add=[[1, 4, 16]], remove=[[1, 1, 8]]),
        edit("mesh", model=2),
    ]
    plan = apply(PLAN, edits, AROUND)
    assert dict(plan.choices)[KEY] == Choice("toy.matmul", (("rows", 16), ("stages", 4)))
    assert plan.compiler_options == (("xla_option", "2"),)
    assert plan.ladder.decode == (Bucket(1, 4, 16), Bucket(1, 8, 64))
    assert plan.mesh.model == 2
    replayed = apply(PLAN, [Edit.from_json(e.to_json()) for e in edits], AROUND)
    assert replayed == plan and replayed.digest == plan.digest


def test_going_back_to_the_reference_restores_the_plan():
    assert apply(PLAN, [USE_KERNEL, edit("reference", KEY)], AROUND) == PLAN


def test_the_reference_is_named_where_defaults_would_fill_in():
    filling = dataclasses.replace(PLAN, unlisted="default")
    plan = apply(filling, [USE_KERNEL, edit("reference", KEY)], AROUND)
    assert dict(plan.choices)[KEY] == Choice("reference")
    with pytest.raises(ScheduleError, match="already"):
        apply(plan, [edit("reference", KEY)], AROUND)
    with pytest.raises(ScheduleError, match="runs its reference"):
        apply(plan, [edit("schedule", KEY, rows=16)], AROUND)


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([edit("schedule", KEY, rows=16)], "runs its reference"),
        ([USE_KERNEL, edit("schedule", KEY, rows=48)], "no multiple"),
        ([USE_KERNEL, edit("schedule", KEY, colour=1)], "no field"),
        ([edit("kernel", KEY, kernel="nowhere")], "catalogue"),
        ([edit("kernel", "other[N=1]", kernel="toy.matmul")], "no workload"),
        ([edit("reference", KEY)], "already"),
        ([edit("compiler_option", "xla_option", value="3")], "none of"),
        ([edit("compiler_option", "rm_rf", value="1")], "none of"),
        ([edit("ladder", "decode", remove=[[1, 8, 64]])], "as many sequences|longest context"),
        ([edit("ladder", "decode", remove=[[1, 2, 2]])], "has no"),
        ([edit("ladder", "decode", add=[[2, 8, 64]])], "one new token"),
        ([edit("ladder", "nothing", add=[])], "no part"),
        ([edit("mesh", model=8)], "8 of 4 devices"),
        ([edit("mesh", sideways=2)], "mesh"),
    ],
)
def test_illegal_edits_say_why(edits, reason):
    with pytest.raises(ScheduleError, match=reason):
        apply(PLAN, edits, AROUND)


def test_a_malformed_edit_is_a_config_error():
    with pytest.raises(ConfigError, match="unknown edit kind"):
        Edit.from_json({"kind": "rewrite", "target": "", "value": {}})
    with pytest.raises(ConfigError, match="malformed"):
        Edit.from_json({"kind": "mesh"})
