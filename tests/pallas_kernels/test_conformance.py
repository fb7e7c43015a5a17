"""Every kernel against its op's truth in GPU interpret mode: fresh inputs, poisoned outputs, races.

Interpret mode fills unwritten memory with NaN, so an element that the body leaves out fails. Knobs
it lacks (dependent launch, reduction through a cluster) run as their plain paths; the device bench
proves them on the chip.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_kernels import CATALOGUE
from pallas_kernels.base import MosaicGpuKernel, uncovered
from polyjax.core.chips import chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Schedule, Workload, Writes


def _load_cases():
    spec = importlib.util.spec_from_file_location(
        "kernel_cases", Path(__file__).with_name("cases.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CASES = _load_cases().cases(seed=11)
H200 = chip("NVIDIA H200")
SMALL = dataclasses.replace(H200, num_sms=4)  # schedules then give each block more than one tile
WHOLE_STEP = ("dense_decode_stack", "dense_decode_greedy")  # kernels with a suite of their own
KERNELS = [name for name in CATALOGUE if name.split(".")[1] not in WHOLE_STEP]


def pairs() -> list[tuple[str, int]]:
    found = []
    for name in KERNELS:
        kernel = CATALOGUE[name]
        for i, case in enumerate(CASES):
            if case.op is kernel.op and kernel.supports(case.workload) is None:
                found.append((name, i))
    return found


PAIRS = pairs()
IDS = [f"{name.removeprefix('mosaic_gpu.')}-{CASES[i].name}" for name, i in PAIRS]


def mosaic_gpu_kernel(name: str) -> MosaicGpuKernel:
    kernel = CATALOGUE[name]
    assert isinstance(kernel, MosaicGpuKernel)
    return kernel


def plain_schedules(
    kernel: MosaicGpuKernel, workload: Workload, count: int, seed: int
) -> list[Schedule]:
    """Legal schedules of a small chip, drawn by seed, as the plain paths interpret mode can run."""
    legal = []
    for schedule in kernel.space(workload, SMALL):
        schedule = kernel.plain(schedule)
        try:
            kernel.check(workload, schedule, SMALL)
        except ScheduleError:
            continue
        legal.append(schedule)
    legal = list(dict.fromkeys(legal))
    assert legal, f"{kernel.name}: no schedule of {workload.key} is legal"
    return random.Random(seed).sample(legal, min(count, len(legal)))


def run_and_judge(name: str, index: int, schedule: Schedule, capfd: pytest.CaptureFixture) -> None:
    kernel, case = CATALOGUE[name], CASES[index]
    function = jax.jit(kernel.build(case.workload, schedule))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        outputs = jax.block_until_ready(function(*case.arguments))
    assert not gpu_callbacks.get_races().races_found
    assert "RACE DETECTED" not in capfd.readouterr().out, "a race in an earlier kernel of the call"
    case.judge(outputs)


@pytest.mark.parametrize(("name", "index"), PAIRS, ids=IDS)
def test_kernel_matches_the_truth(name: str, index: int, capfd: pytest.CaptureFixture) -> None:
    kernel, case = mosaic_gpu_kernel(name), CASES[index]
    (schedule,) = plain_schedules(kernel, case.workload, 1, seed=index)
    run_and_judge(name, index, schedule, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), PAIRS, ids=IDS)
def test_more_schedules_match_the_truth(
    name: str, index: int, capfd: pytest.CaptureFixture
) -> None:
    kernel, case = mosaic_gpu_kernel(name), CASES[index]
    for schedule in plain_schedules(kernel, case.workload, 6, seed=100 + index):
        run_and_judge(name, index, schedule, capfd)


def test_every_kernel_has_a_case() -> None:
    assert {name for name, _ in PAIRS} == set(KERNELS)


def test_the_judge_sees_a_wrong_element() -> None:
    case = CASES[0]
    right = np.asarray(case.op.reference(None, *case.arguments), np.float32)
    case.judge(right)
    wrong = right.copy()
    wrong[-1, -1] += 1.0
    with pytest.raises(AssertionError, match="bound"):
        case.judge(wrong)
    wrong[-1, -1] = np.nan
    with pytest.raises(AssertionError):
        case.judge(wrong)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([((0, 0), (2, 4)), ((0, 4), (2, 4))], None),
        ([((0, 0), (2, 4)), ((0, 4), (2, 3))], "no block"),
        ([((0, 0), (2, 5)), ((0, 4), (2, 4))], "more than one"),
        ([((0, 0), (2, 4)), ((0, 4), (2, 5))], "bounds"),
        ([], "no block"),
    ],
)
def test_coverage_finds_gaps_overlaps_and_excess(blocks: list, reason: str | None) -> None:
    found = uncovered([Writes(0, *block) for block in blocks], ((2, 8),))
    assert (found is None) if reason is None else (reason in str(found))
