"""The default plan: tables before defaults, whole composites before their pieces."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from polyjax.compiler.choose import default_choices
from polyjax.core.chips import chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Choice, Ops, Schedule
from polyjax.core.ops import MATMUL, NORM_GATE_UP
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
