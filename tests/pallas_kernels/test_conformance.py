"""Every kernel against its op's truth in interpret mode: fresh inputs, poisoned outputs, races.

Interpret mode fills unwritten memory with NaN, so an element that the body leaves out fails. Knobs
it lacks (dependent launch, reduction through a cluster) run as their plain paths; the device bench
proves them on the chip. TPU kernels run on two simulated cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import CATALOGUE
from pallas_kernels.base import PallasKernel, uncovered
from pallas_kernels.tpu_base import MosaicTpuKernel
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
# Schedules for four SMs give each block more than one tile; a v5p has two cores to share tiles.
SMALL = {"gpu": dataclasses.replace(H200, num_sms=4), "tpu": chip("TPU v5p")}
WHOLE_STEP = ("dense_decode_stack", "dense_decode_greedy")  # kernels with a suite of their own
KERNELS = [name for name in CATALOGUE if name.split(".")[1] not in WHOLE_STEP]


def pairs() -> list[tuple[str, int]]:
    found = []
    for name in KERNELS:
        kernel = CATALOGUE[name]
        for i, case in enumerate(CASES):
            suits = case.op is kernel.op and kernel.platform in case.platforms
            if suits and kernel.supports(case.workload) is None:
                found.append((name, i))
    return found


PAGE_EDGES = tuple(
    f"attention {name}"
    for name in ("last-page edges", "no token", "window and soft cap", "freed first pages")
)


PROMPT_EDGES = ("attention ragged prompts", "attention prompt after freed pages")


def marked(pair: tuple[str, int]) -> Any:
    """A TPU kernel's proof is the case made for its edges; the others take their time.

    Of prompts, which take several warpgroups, two cases have all edges.
    """
    name, index = pair
    kernel, case = CATALOGUE[name], CASES[index]
    thorough = case.platforms == ("tpu",) or case.name in PAGE_EDGES
    slow = kernel.platform == "tpu" and not thorough
    slow |= case.workload.get("T") > 1 and case.name not in PROMPT_EDGES
    return pytest.param(*pair, marks=pytest.mark.slow if slow else ())


PAIRS = pairs()
IDS = [f"{name.removeprefix('mosaic_')}-{CASES[i].name}" for name, i in PAIRS]


def kernel_of(name: str) -> PallasKernel:
    kernel = CATALOGUE[name]
    assert isinstance(kernel, PallasKernel)
    return kernel


def legal_schedules(kernel: PallasKernel, workload: Workload) -> list[Schedule]:
    """Legal schedules of a small chip, as the plain paths interpret mode can run."""
    legal: dict[Schedule, None] = {}
    small = SMALL[kernel.platform]
    for schedule in kernel.space(workload, small):
        schedule = kernel.plain(schedule)
        try:
            kernel.check(workload, schedule, small)
        except ScheduleError:
            continue
        legal[schedule] = None
    assert legal, f"{kernel.name}: no schedule of {workload.key} is legal"
    return list(legal)


def plain_schedules(
    kernel: PallasKernel, workload: Workload, count: int, seed: int
) -> list[Schedule]:
    legal = legal_schedules(kernel, workload)
    return random.Random(seed).sample(legal, min(count, len(legal)))


def with_most_steps(kernel: MosaicTpuKernel, workload: Workload) -> Schedule:
    """The schedule that divides the work the most: no knob stays at "all of it" if it need not."""
    legal = legal_schedules(kernel, workload)
    return max(legal, key=lambda s: (math.prod(kernel.grid(workload, s)), str(s)))


@contextlib.contextmanager
def gpu_interpreter(capfd: pytest.CaptureFixture) -> Iterator[None]:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert not gpu_callbacks.get_races().races_found
    assert "RACE DETECTED" not in capfd.readouterr().out, "a race in an earlier kernel of the call"


@contextlib.contextmanager
def simulated_tpu(capfd: pytest.CaptureFixture) -> Iterator[None]:
    tpu_interpreter.reset_tpu_interpret_mode_state()  # a test that failed may have left its memory
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(params):
        yield
    assert tpu_interpreter.races is not None and not tpu_interpreter.races.races_found
    assert "RACE DETECTED" not in capfd.readouterr().out, "a race in an earlier kernel of the call"


INTERPRETERS = {"gpu": gpu_interpreter, "tpu": simulated_tpu}


def run_and_judge(name: str, index: int, schedule: Schedule, capfd: pytest.CaptureFixture) -> None:
    kernel, case = CATALOGUE[name], CASES[index]
    function = jax.jit(
        kernel.build(case.workload, schedule),
        compiler_options={"xla_backend_optimization_level": 0},  # half the time to compile
    )
    with INTERPRETERS[kernel.platform](capfd):
        outputs = jax.block_until_ready(function(*case.arguments))
    case.judge(outputs)


@pytest.mark.parametrize(("name", "index"), [marked(pair) for pair in PAIRS], ids=IDS)
def test_kernel_matches_the_truth(name: str, index: int, capfd: pytest.CaptureFixture) -> None:
    kernel, case = kernel_of(name), CASES[index]
    (schedule,) = plain_schedules(kernel, case.workload, 1, seed=index)
    if case.platforms == ("tpu",):
        assert isinstance(kernel, MosaicTpuKernel)
        schedule = with_most_steps(kernel, case.workload)
    run_and_judge(name, index, schedule, capfd)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), PAIRS, ids=IDS)
def test_more_schedules_match_the_truth(
    name: str, index: int, capfd: pytest.CaptureFixture
) -> None:
    kernel, case = kernel_of(name), CASES[index]
    for schedule in plain_schedules(kernel, case.workload, 6, seed=100 + index):
        run_and_judge(name, index, schedule, capfd)


def test_every_kernel_has_a_case() -> None:
    assert {name for name, _ in PAIRS} == set(KERNELS)


def test_the_judge_sees_a_wrong_element() -> None:
    case = CASES[0]
    right = np.asarray(case.op.reference(None, *case.arguments), np.float32)
    judge = case.prepare()
    judge(right)
    wrong = right.copy()
    wrong[-1, -1] += 1.0
    with pytest.raises(AssertionError, match="bound"):
        judge(wrong)
    wrong[-1, -1] = np.nan
    with pytest.raises(AssertionError):
        judge(wrong)


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
