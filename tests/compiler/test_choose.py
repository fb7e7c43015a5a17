"""The default plan: tables before defaults, whole composites before their pieces."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from polyjax.compiler.choose import DefaultingOps, default_choices, defaults_for
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.op import Choice, Ops, Schedule
from polyjax.core.ops import MATMUL, NORM_GATE_UP
from polyjax.core.plan import Plan
from polyjax.core.tables import load_tables, merge_tables

H200, B200 = chip("NVIDIA H200"), chip("NVIDIA B200")


@dataclasses.dataclass(frozen=True)
class Tile(Schedule):
    rows: int = 8


@dataclasses.dataclass(frozen=True)
class ToyKernel:
    """A kernel that exists only to be chosen."""

    name: str
    op: object
    requires: frozenset = frozenset({"wgmma"})
    platform: str = "gpu"
    most_rows: int = 64
    schedule_type: ClassVar = Tile

    def supports(self, workload):
        return None if workload["M"] <= self.most_rows else "too many rows"

    def preferred(self, workload):
        return workload["M"] > 1

    def default(self, workload, chip):
        return Tile()

    def check(self, workload, schedule, chip):
        if schedule.rows > 16:
            raise ScheduleError("too many rows a tile")

    def build(self, workload, schedule):
        raise AssertionError("choosing must not build a kernel")


CATALOGUE = {
    k.name: k for k in (ToyKernel("toy.matmul", MATMUL), ToyKernel("toy.mlp", NORM_GATE_UP))
}


def mlp(rows):
    x, norm = jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    w_in = jax.ShapeDtypeStruct((2, 16, 8), jnp.float32)
    w_out = jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def step(ops: Ops):
        def run(x, norm, w_in, w_out):
            return ops(MATMUL, ops(NORM_GATE_UP, x, norm, w_in, eps=1e-5), w_out, None, x)

        return jax.eval_shape(run, x, norm, w_in, w_out)

    return step


def kernels(choices):
    return sorted((key.split("[")[0], choice.kernel) for key, choice in choices)


def test_a_composite_with_a_kernel_is_taken_whole():
    choices = default_choices([mlp(4)], CATALOGUE, H200, {})
    assert kernels(choices) == [("matmul", "toy.matmul"), ("norm_gate_up", "toy.mlp")]


def test_a_composite_without_a_kernel_is_looked_into():
    only_matmul = {"toy.matmul": CATALOGUE["toy.matmul"]}
    choices = default_choices([mlp(4)], only_matmul, H200, {})
    assert kernels(choices) == [("matmul", "toy.matmul")] * 2


def test_unsupported_workloads_and_chips_keep_the_reference():
    assert default_choices([mlp(65)], CATALOGUE, H200, {}) == ()
    assert default_choices([mlp(4)], CATALOGUE, B200, {}) == ()
    assert default_choices([mlp(4)], CATALOGUE, chip("cpu"), {}) == ()


def test_a_kernel_that_is_not_preferred_needs_a_measurement():
    assert default_choices([mlp(1)], CATALOGUE, H200, {}) == ()
    ((key, choice), *_) = default_choices([mlp(4)], CATALOGUE, H200, {})
    single = key.replace("M=4", "M=1")
    assert single in dict(default_choices([mlp(1)], CATALOGUE, H200, {single: choice}))


def test_a_measured_choice_wins_while_it_is_legal(tmp_path):
    ((key, _), *_) = default_choices([mlp(4)], CATALOGUE, H200, {})
    merge_tables(tmp_path, "NVIDIA H200", {key: Choice("toy.matmul", (("rows", 16),))})
    loaded = load_tables(tmp_path, "NVIDIA H200")
    assert dict(default_choices([mlp(4)], CATALOGUE, H200, loaded))[key] == Choice(
        "toy.matmul", (("rows", 16),)
    )
    for stale in (("rows", 32), ("no_such_field", 1)):
        illegal = {key: Choice("toy.matmul", (stale,))}
        chosen = dict(default_choices([mlp(4)], CATALOGUE, H200, illegal))[key]
        assert chosen.schedule == (("rows", 8),)


def test_a_workload_without_a_choice_gets_the_default_kernel_or_stays():
    x, norm, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 16), (16,), (2, 8, 16)))
    workload = NORM_GATE_UP.workload(x, norm, w, eps=1e-5)
    found = DefaultingOps({}, CATALOGUE, H200).choice(workload)
    assert found is not None and found.kernel == "toy.mlp"
    assert DefaultingOps({}, CATALOGUE, None).choice(workload) is None
    listed = Choice("toy.matmul", (("rows", 16),))
    assert DefaultingOps({workload.key: listed}, CATALOGUE, H200).choice(workload) == listed
    insists = DefaultingOps({workload.key: Choice("reference")}, CATALOGUE, H200)
    assert insists.choice(workload) is None, "a plan may insist on the reference"
    assert not insists.chosen(NORM_GATE_UP, x, norm, w, eps=1e-5)


def test_only_plans_that_say_so_get_defaults():
    assert defaults_for(Plan(), "NVIDIA H200") is None
    assert defaults_for(Plan(unlisted="default"), "NVIDIA H200") == H200
    assert defaults_for(Plan(unlisted="default"), "an unknown chip") is None
    with pytest.raises(ConfigError, match="unlisted"):
        Plan(unlisted="fastest")
    plan = Plan(unlisted="default")
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json({}).digest != plan.digest
