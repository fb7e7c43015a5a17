"""Catalogue kernels on workloads small enough for the interpreter, for the gate score.

Each kernel's legal schedules are spread over its search space; all of them must pass every gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pallas_kernels import CATALOGUE
from polyjax.core.chips import chip
from polyjax.core.errors import PolyjaxError
from polyjax.core.op import Kernel, Workload
from polyjax.gates.candidate import Candidate, of_kernel
from polyjax.gates.small_workloads import small_workload

CHIP = "NVIDIA H200"
SCHEDULES_PER_KERNEL = 4
_ROW = {"M": 8, "D": 128}
_SIZES: dict[str, dict[str, int]] = {
    "mosaic_gpu.matmul.stream": {"M": 8, "K": 128, "N": 128},
    "mosaic_gpu.matmul.gemv": {"M": 2, "K": 512, "N": 16},
    "mosaic_gpu.norm_gate_up.stream": _ROW | {"F": 64},
    "mosaic_gpu.norm_gate_up.gemv": {"M": 2, "D": 512, "F": 16},
    "mosaic_gpu.norm_qkv_rope_write.stream": _ROW | {"K": 1, "C": 3, "H": 64, "R": 64, "Z": 16},
    "mosaic_gpu.paged_attention.decode": {"B": 2, "T": 1, "K": 1, "N": 2, "H": 64, "Z": 64, "C": 2},
    "mosaic_gpu.lm_head.stream": _ROW | {"V": 128},
    "mosaic_gpu.lm_head_sample.stream": _ROW | {"V": 128},
    "mosaic_gpu.rms_norm.row": {"M": 3, "D": 256},
    "mosaic_gpu.rope.head": {"M": 3, "N": 2, "H": 64, "R": 64},
    "mosaic_gpu.kv_write.slot": {"M": 3, "K": 1, "H": 64, "Z": 16},
    "mosaic_gpu.embed.row": {"M": 3, "V": 16, "D": 256},
}


def catalogue_candidates() -> Iterator[Candidate]:
    """Interpreted candidates: a few legal schedules of each kernel that has a small workload."""
    spec = chip(CHIP)
    for name, sizes in _SIZES.items():
        if name not in CATALOGUE:
            continue
        kernel = CATALOGUE[name]
        workload = small_workload(kernel.op.name).resized(**sizes)
        if kernel.supports(workload) is not None:
            continue
        legal = list(dict.fromkeys(_legal(kernel, workload)))
        step = max(1, len(legal) // SCHEDULES_PER_KERNEL)
        for schedule in legal[::step][:SCHEDULES_PER_KERNEL]:
            yield of_kernel(kernel, schedule, workload, spec, interpreted=True)


def _legal(kernel: Kernel, workload: Workload) -> Iterator[Any]:
    """Legal schedules, in the plain form that the interpreter can run."""
    spec = chip(CHIP)
    plain = getattr(kernel, "plain", lambda schedule: schedule)
    for schedule in kernel.space(workload, spec):
        try:
            kernel.check(workload, plain(schedule), spec)
        except PolyjaxError:
            continue
        yield plain(schedule)
