"""Tables that look measured: analytical times under a structured distortion, and a little noise."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from pallas_kernels import CATALOGUE
from pallas_kernels.shapes import array
from polyjax.core.chips import chip
from polyjax.core.ops import MATMUL
from search.cost.analytical import terms
from search.space import legal_schedules

H200 = chip("NVIDIA H200")
STREAM = CATALOGUE["mosaic_gpu.matmul.stream"]
SHAPES = ((3072, 2048), (2048, 2048), (6144, 4096), (4096, 4096), (8192, 2048), (2048, 8192))


def matmul(rows, outputs, depth):
    return MATMUL.workload(array(rows, depth), array(outputs, depth), None, array(rows, outputs))


def workloads():
    return [matmul(rows, *shape) for shape in SHAPES for rows in (8, 16)]


def points_of(workload, count, seed=0, kernel=STREAM):
    """A seeded draw of legal points: enumerating is the slow part, so spaces are kept small."""
    space, _ = legal_schedules(kernel, workload, H200)
    rng = np.random.default_rng([seed, *(size for _, size in workload.dims)])
    drawn = rng.permutation(len(space))[:count]
    return [space.points[i] for i in sorted(drawn)]


def microseconds(workload, point, seed=0, kernel=STREAM):
    """Analytical time, bent by how knobs go together and by the workload, with 0.5 % of noise."""
    schedule = kernel.schedule_type.from_json(dict(point))
    base = terms(kernel, workload, schedule, H200).us
    bend = 0.25 * np.log2(schedule.tile_k / 128) * np.log2(schedule.stages / 4)
    bend += 0.3 * (schedule.resident - 0.5) * np.log2(workload["M"] / 8 + 1)
    bend += 0.15 * np.log2(schedule.split_k) * np.log2(workload["K"] / 4096)
    digest = hashlib.sha256(json.dumps([workload.key, point, seed]).encode()).digest()
    noise = np.random.default_rng(int.from_bytes(digest[:8])).standard_normal()
    return float(base * np.exp(bend + 0.005 * noise))
