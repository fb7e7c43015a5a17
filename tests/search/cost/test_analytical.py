"""The roofline obeys its limits, and says what an H200 measured within a stated factor."""

import dataclasses
import math
import statistics
from pathlib import Path

import pytest

from pallas_kernels import CATALOGUE
from polyjax.core.chips import CHIPS, chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Choice
from search.cost.analytical import (
    all_reduce_us,
    bandwidth,
    floor_us,
    reference_us,
    resident_blocks,
    step_us,
    terms,
)
from search.cost.measured import attention, head, matmul, measured_schedules
from tests.search.cost.synthetic import H200, STREAM, points_of

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "kernels"
GEMV = CATALOGUE["mosaic_gpu.matmul.gemv"]
ATTENTION = CATALOGUE["mosaic_gpu.paged_attention.decode"]
HEAD = CATALOGUE["mosaic_gpu.lm_head.stream"]
WORST_FACTOR, MEDIAN_FACTOR = 1.75, 1.2


def us(kernel, workload, on=H200, **schedule):
    return terms(kernel, workload, kernel.schedule_type.from_json(schedule), on).us


@pytest.mark.smoke
def test_measured_schedules_are_within_a_stated_factor():
    factors = [
        math.exp(abs(math.log(row.predicted_us(H200) / row.us)))
        for row in measured_schedules(RESULTS)
    ]
    assert len(factors) == 28
    assert max(factors) < WORST_FACTOR and statistics.median(factors) < MEDIAN_FACTOR


def test_schedules_measured_against_each_other_come_in_that_order():
    """docs/bitter_lessons.md, Kernels: what was tried on one workload, faster first."""
    big, wide, long = matmul(1, 16384, 2048), matmul(8, 16384, 2048), matmul(8, 4096, 14336)
    streamed = {"tile_k": 128, "stages": 6, "resident": False}
    pairs = [
        (us(GEMV, big, rows=4, tile_k=1024), us(GEMV, big, rows=8, tile_k=1024)),
        (
            us(STREAM, wide, **streamed | {"stages": 12}, split_k=1, blocks=132),
            us(STREAM, wide, **streamed, split_k=4, blocks=66),
        ),
        (
            us(STREAM, long, **streamed, split_k=2, blocks=64),
            us(STREAM, long, **streamed, split_k=4, blocks=32),
        ),
        (
            us(HEAD, head(1, sampled=False), tile_k=256, stages=3, blocks=264, resident=False),
            us(HEAD, head(1, sampled=False), tile_k=256, stages=4, blocks=2004, resident=False),
        ),
        (
            us(ATTENTION, attention(1, 32768), stages=3, splits=16),
            us(ATTENTION, attention(1, 32768), stages=3, splits=64),
        ),
        (
            us(ATTENTION, attention(64, 4096), stages=3, splits=1),
            us(ATTENTION, attention(64, 4096), stages=3, splits=1, chunk=128),
        ),
    ]
    assert all(faster < slower for faster, slower in pairs), pairs


def test_nothing_is_faster_than_its_bytes_at_full_bandwidth():
    for workload in (matmul(8, 3072, 2048), matmul(16, 2048, 8192)):
        for point in points_of(workload, 64):
            schedule = STREAM.schedule_type.from_json(dict(point))
            cost = terms(STREAM, workload, schedule, H200)
            assert cost.us > cost.floor_us == floor_us(STREAM.op, workload, H200)
            least = STREAM.op.bytes_moved(workload) / H200.hbm_bytes_per_s * 1e6
            assert cost.memory_us >= least


def test_more_work_never_takes_less():
    sizes = [us(STREAM, matmul(8, n, 2048), blocks=32) for n in (2048, 4096, 8192, 16384)]
    assert sizes == sorted(sizes)
    contexts = [us(ATTENTION, attention(8, c), splits=2) for c in (512, 1024, 4096, 32768)]
    assert contexts == sorted(contexts)
    rows = [reference_us(matmul(m, 4096, 4096), H200) for m in (1, 64, 1024, 8192)]
    assert rows == sorted(rows)


def test_bandwidth_follows_littles_law_and_saturates():
    wanted = H200.hbm_bytes_per_s * H200.memory_latency_us * 1e-6
    few = wanted / 100
    assert bandwidth(few, H200) == pytest.approx(few / (H200.memory_latency_us * 1e-6), rel=1e-3)
    assert bandwidth(100 * wanted, H200) == pytest.approx(H200.hbm_bytes_per_s, rel=1e-3)
    steps = [bandwidth(wanted * s, H200) for s in (0.1, 0.5, 1, 2, 8)]
    assert steps == sorted(steps) and steps[-1] <= H200.hbm_bytes_per_s


def test_each_limit_of_a_multiprocessor_can_be_the_one_that_counts():
    shape = dataclasses.replace(
        STREAM.launch_shape(matmul(8, 3072, 2048), STREAM.schedule_type()),
        threads=128,
        registers=32,
    )
    assert resident_blocks(shape, 100 * 1024, H200) == 2
    assert resident_blocks(shape, 0, H200) == 16  # threads
    assert resident_blocks(dataclasses.replace(shape, registers=255), 0, H200) == 2
    assert resident_blocks(dataclasses.replace(shape, threads=32), 0, H200) == 32
    assert resident_blocks(shape, 0, chip("TPU v5e")) == 1


def test_a_faster_chip_is_faster_and_every_chip_has_an_answer():
    workload = matmul(8, 16384, 2048)
    h100, h200, b200 = (us(STREAM, workload, chip(f"NVIDIA {n}")) for n in ("H100", "H200", "B200"))
    assert h100 > h200 > b200
    for each in CHIPS:
        assert reference_us(workload, each) >= floor_us(STREAM.op, workload, each) > 0
        assert all_reduce_us(1e6, 1, each) == 0.0
        small, large = (all_reduce_us(b, 4, each) for b in (1e4, 1e8))
        assert 0 < small < large
        assert all_reduce_us(1e4, 2, each) < all_reduce_us(1e4, 8, each)


def test_a_step_is_its_calls_and_mixing_kernels_with_xla_costs_borders():
    plain = matmul(8, 2048, 2048)
    schedule = tuple(sorted(STREAM.default(plain, H200).to_json().items()))
    choice = Choice(STREAM.name, schedule)
    kernel_us = us(STREAM, plain, **dict(schedule))
    both = step_us([(plain, choice)] * 3, CATALOGUE, H200)
    assert both == pytest.approx(3 * kernel_us)
    mixed = step_us([(plain, choice), (plain, None), (plain, choice)], CATALOGUE, H200)
    assert mixed > 2 * kernel_us + reference_us(plain, H200)


def test_a_composite_by_its_reference_counts_as_its_pieces():
    lone = head(8, sampled=False)
    assert step_us([(lone, None)], CATALOGUE, H200) == 0.0
    piece = matmul(8, 128256, 2048)
    assert step_us([(lone, None), (piece, None)], CATALOGUE, H200) == reference_us(piece, H200)


def test_a_kernel_that_does_not_say_how_it_divides_its_work_has_a_cost():
    class Silent:
        op, shared_memory_bytes = STREAM.op, staticmethod(lambda *_: 0)

    workload = matmul(8, 2048, 2048)
    cost = terms(Silent(), workload, STREAM.schedule_type(), H200)
    assert cost.us > cost.floor_us


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_kernel_says_how_it_divides_its_work(name):
    from pallas_kernels.verdict import workloads

    kernel = CATALOGUE[name]
    target = H200 if kernel.platform == "gpu" else chip("TPU v5e")
    supported = [w for w in workloads(kernel.op) if kernel.supports(w) is None]
    legal = [w for w in supported if is_legal(kernel, w, target)]
    for workload in (legal[0], legal[-1]):
        schedule = kernel.default(workload, target)
        shape = kernel.launch_shape(workload, schedule)
        assert shape.blocks >= 1 and shape.steps >= 1 and shape.in_flight_bytes > 0
        moved = kernel.op.bytes_moved(workload)
        # Blocks read at least the inputs; outputs and what is written in place come on top.
        assert shape.read_bytes > 0.45 * moved
        assert terms(kernel, workload, schedule, target).us > 0


def is_legal(kernel, workload, target):
    try:
        kernel.check(workload, kernel.default(workload, target), target)
    except ScheduleError:
        return False
    return True
