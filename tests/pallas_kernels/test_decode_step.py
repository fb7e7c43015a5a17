"""The persistent decode step on CPU: addresses, emulated arithmetic, legality and lowering."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.base import uncovered
from pallas_kernels.decode_step import mosaic_gpu
from pallas_kernels.decode_step.emulation import Emulation, folded_product
from pallas_kernels.decode_step.layout import (
    GROUP_ROWS,
    DecodeSchedule,
    Exchange,
    SharedMemory,
    Step,
    stream_order,
    tile_number,
)
from polyjax.core.chips import chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import REFERENCE, Workload
from polyjax.core.ops import DENSE_DECODE_GREEDY, DENSE_DECODE_STACK

H200 = chip("NVIDIA H200")
EPS = 1e-5
BF16_EPS = 2.0**-8  # spacing of bfloat16 next to 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """A small dense decoder."""

    batch: int = 2
    layers: int = 2
    embed: int = 128
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    ffw: int = 256
    vocab: int = 136
    page_size: int = 16
    pages: int = 4

    def arrays(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """The arguments of DENSE_DECODE_GREEDY with random values; contexts are set by the test."""
        keys = iter(jax.random.split(jax.random.key(seed), 100))
        k, g, h, d = self.kv_heads, self.group, self.head_dim, self.embed

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return (scale * jax.random.normal(next(keys), shape)).astype(jnp.bfloat16)

        def each(*shape: int, scale: float) -> Any:
            return tuple(normal(*shape, scale=scale) for _ in range(self.layers))

        def norms() -> Any:
            return tuple(1 + normal(d, scale=0.1) for _ in range(self.layers))

        pool = (1 + self.batch * self.pages, 2, k, self.page_size, h)
        angles = jax.random.uniform(next(keys), (self.batch, h // 2), maxval=6.28)
        table = np.random.default_rng(seed).permutation(np.arange(1, pool[0]))
        return (
            normal(self.batch, d),
            norms(),
            each(k, g + 2, h, d, scale=d**-0.5),
            each(d, k * g * h, scale=(k * g * h) ** -0.5),
            norms(),
            each(2, self.ffw, d, scale=d**-0.5),
            each(d, self.ffw, scale=self.ffw**-0.5),
            each(*pool, scale=1.0),
            jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1),
            jnp.asarray(table.reshape(self.batch, self.pages), jnp.int32),
            jnp.full((self.batch,), 1, jnp.int32),
            1 + normal(d, scale=0.1),
            normal(self.vocab, d, scale=d**-0.5),
        )

    def workload(self, greedy: bool = True) -> Workload:
        args = jax.eval_shape(self.arrays)
        op = DENSE_DECODE_GREEDY if greedy else DENSE_DECODE_STACK
        return op.workload(*args[: 13 if greedy else 11], eps=EPS, scale=self.head_dim**-0.5)


SMALL = DecodeSchedule(blocks=8, warpgroups=2, chunk=128, stages=2, hint_copies=4)


def llama(name: str, batch: int = 1, pages: int = 16) -> Workload:
    """DENSE_DECODE_GREEDY of Llama 3.2 1B or 3.1 8B, page size 64."""
    layers, d, h, f = {"1b": (16, 2048, 64, 8192), "8b": (32, 4096, 128, 14336)}[name]
    bf16 = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731
    i32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)  # noqa: E731
    each = lambda *s: (bf16(*s),) * layers  # noqa: E731
    return DENSE_DECODE_GREEDY.workload(
        bf16(batch, d), each(d), each(8, 6, h, d), each(d, 32 * h), each(d), each(2, f, d),
        each(d, f),
        each(99, 2, 8, 64, h), jax.ShapeDtypeStruct((batch, h), jnp.float32), i32(batch, pages),
        i32(batch), bf16(d), bf16(128256, d), eps=EPS, scale=h**-0.5,
    )  # fmt: skip


SCHEDULES = [
    SMALL,
    dataclasses.replace(SMALL, warpgroups=1, blocks=4),
    dataclasses.replace(SMALL, warpgroups=4, down_parts=2, stages=4, chains=2),
    dataclasses.replace(SMALL, warpgroups=3, stages=3, blocks=4),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_weight_is_streamed_once_and_consumed_in_the_order_it_is_streamed(
    schedule: DecodeSchedule,
) -> None:
    step = Step.of(Shape().workload(), schedule)
    streamed: list[Any] = []
    seen: collections.Counter[Any] = collections.Counter()
    for name, parts in step.phases().items():
        for part in parts:
            for _, group, chunk in stream_order(part, schedule.warpgroups):
                streamed.append((name, group, chunk))
                for block in range(schedule.blocks):
                    row = step.weight_row(name, block, group)
                    seen.update((name, row + r, chunk) for r in range(GROUP_ROWS))
    rows = {"qkv": 512, "o": 128, "gate_up": 512, "down": 128}
    columns = {"qkv": 128, "o": 256, "gate_up": 128, "down": 256}
    wanted = {
        (n, r, c) for n in rows for r in range(rows[n]) for c in range(columns[n] // schedule.chunk)
    }
    assert set(seen) == wanted and set(seen.values()) == {1}
    numbers: dict[int, Any] = {}
    for name, parts in step.phases().items():
        for part in parts:
            for warpgroup in range(schedule.warpgroups):
                for item in range(warpgroup, part.items, schedule.warpgroups):
                    first = item - warpgroup
                    items = min(schedule.warpgroups, part.items - first)
                    for q in range(part.item_chunks):
                        group, piece = item // part.split, item % part.split
                        chunk = part.first_chunk + piece * part.item_chunks + q
                        tile = tile_number(part, first, items, q, warpgroup)
                        assert numbers.setdefault(tile, (name, group, chunk)) == (
                            name,
                            group,
                            chunk,
                        )
    assert [numbers[i] for i in range(step.layer_tiles)] == streamed


def test_parity_flips_at_every_reuse_of_a_ring_slot() -> None:
    step = Step.of(Shape().workload(), dataclasses.replace(SMALL, stages=3))
    uses = collections.defaultdict(list)
    for tile in range(20):
        slot, parity = step.ring_slot(tile)
        uses[slot].append(parity)
    assert sorted(uses) == [0, 1, 2]
    assert all(history == [n % 2 for n in range(len(history))] for history in uses.values())


def test_vocabulary_is_divided_without_gap() -> None:
    step = Step.of(Shape(vocab=136).workload(), SMALL)
    ranges = [step.vocab_range(block) for block in range(8)]
    assert ranges[0][0] == 0 and ranges[-1][1] == 136 // GROUP_ROWS
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def test_exchange_words_do_not_overlap_and_vectors_are_aligned() -> None:
    exchange = Exchange(Step.of(Shape().workload(), SMALL))
    used: set[int] = set()
    for name, (copies, size) in exchange._sizes().items():
        for copy in range(copies):
            first = exchange.at(name, copy)
            assert first % 4 == 0, name
            words = set(range(first, first + size))
            assert not used & words
            used |= words
    assert used == set(range(exchange.words))


def test_shared_memory_regions_do_not_overlap() -> None:
    memory = SharedMemory(Step.of(llama("1b"), DecodeSchedule()))
    offsets = [v for k, v in vars(memory).items() if k not in ("_next", "total_bytes")]
    assert len(set(offsets)) == len(offsets) and max(offsets) < memory.total_bytes


@pytest.mark.parametrize("rows", [1, 3])
def test_traces_of_the_folded_product_are_the_dot_products(rows: int) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(GROUP_ROWS, 256)).astype(np.float32)
    x = rng.normal(size=(rows, 256)).astype(np.float32)
    np.testing.assert_allclose(folded_product(weights, x), weights @ x.T, rtol=1e-4, atol=1e-4)


def float32_reference(args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    raised = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args)
    return jax.jit(
        lambda *a: REFERENCE(DENSE_DECODE_GREEDY, *a, eps=EPS, scale=args[2][0].shape[2] ** -0.5)
    )(*raised)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_emulated_step_agrees_with_the_float32_reference(schedule: DecodeSchedule) -> None:
    shape = Shape(batch=2 if schedule.blocks == 8 else 1)
    args = list(shape.arrays())
    args[10] = jnp.asarray(
        [64, 17][: shape.batch], jnp.int32
    )  # the last slot of a page, one past it
    out = Emulation(Step.of(shape.workload(), schedule)).run(*args)
    tokens, x, pools = float32_reference(tuple(args))
    # Each of about 6 roundings a layer is off by half a bf16 step of values around the largest.
    bound = 6 * shape.layers * BF16_EPS / 2 * float(jnp.abs(x).max())
    np.testing.assert_allclose(out["x"], x, atol=bound, rtol=0)
    for ours, pool in zip(out["pools"], pools, strict=True):
        np.testing.assert_allclose(ours, pool, atol=bound, rtol=0)
    assert out["tokens"].tolist() == tokens.tolist()


def test_emulated_step_leaves_other_slots_and_inactive_rows_alone() -> None:
    shape = Shape()
    args: list[Any] = list(shape.arrays())
    args[10] = jnp.asarray([0, 5], jnp.int32)
    args[7] = tuple(pool.at[:, :, :, 5:].set(jnp.nan) for pool in args[7])  # unowned slots
    out = Emulation(Step.of(shape.workload(), SMALL)).run(*args)
    assert not np.isnan(out["x"]).any()
    page = int(args[9][1, 0])
    for ours, before in zip(out["pools"], args[7], strict=True):
        changed = ~np.isclose(ours, np.asarray(before, np.float32), equal_nan=True)
        assert set(zip(*np.nonzero(changed.any((1, 2, 4))), strict=True)) == {(page, 4)}


@pytest.mark.parametrize(("name", "batch"), [("1b", 1), ("1b", 3), ("1b", 8), ("8b", 1), ("8b", 8)])
def test_default_schedule_is_legal(name: str, batch: int) -> None:
    workload = llama(name, batch)
    mosaic_gpu.GREEDY.check(workload, mosaic_gpu.GREEDY.default(workload, H200), H200)


def test_batches_that_separate_kernels_win_are_left_to_them() -> None:
    reason = mosaic_gpu.GREEDY.supports(llama("1b", 16))
    assert reason and "batch 16" in reason


def test_illegal_schedules_and_chips_are_refused_with_the_reason() -> None:
    workload, kernel = llama("1b"), mosaic_gpu.GREEDY
    good = kernel.default(workload, H200)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"blocks": 120}, "do not divide"),
        ({"chunk": 96}, "multiple of 128"),
        ({"chunk": 4096}, "multiple of the chunk"),
        ({"stages": 40}, "shared memory"),
        ({"down_parts": 3}, "down"),
        ({"warpgroups": 5}, "warpgroups"),
        ({"hint_copies": 129}, "hint copies"),
    )
    for changes, reason in wrong:
        with pytest.raises(ScheduleError, match=reason):
            kernel.check(workload, dataclasses.replace(good, **changes), H200)
    with pytest.raises(ScheduleError, match="wgmma"):
        kernel.check(workload, good, chip("NVIDIA B200"))
    assert "batch" in (kernel.supports(llama("1b", 64)) or "")


def test_write_map_covers_x_and_the_new_keys_and_values() -> None:
    workload, kernel = Shape().workload(), mosaic_gpu.GREEDY
    assert uncovered(kernel.writes(workload, SMALL), kernel.outputs(workload, SMALL)) is None
    lost = list(kernel.writes(workload, SMALL))[1:]
    assert uncovered(lost, kernel.outputs(workload, SMALL)) is not None


def lowered_for_h200(shape: Shape, schedule: DecodeSchedule, greedy: bool) -> str:
    kernel = mosaic_gpu.GREEDY if greedy else mosaic_gpu.STACK
    args = jax.eval_shape(shape.arrays)[: 13 if greedy else 11]
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(kernel.build(shape.workload(greedy), schedule), donate_argnums=(7,))
        return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.smoke
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
def test_lowers_to_one_kernel_with_pools_in_place(schedule: DecodeSchedule, greedy: bool) -> None:
    shape = Shape(batch=2 if schedule.blocks == 8 else 1)
    text = lowered_for_h200(shape, schedule, greedy)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1
    assert text.count("tf.aliasing_output") == shape.layers  # every donated pool, nothing else
    operations = set(re.findall(r"= stablehlo\.(\w+)", text))
    # The exchange buffer's fill is all there is beside the kernel: no copy of a pool or weight.
    allowed = {"custom_call", "constant", "broadcast_in_dim", "reshape"}
    assert operations <= allowed, operations - allowed
