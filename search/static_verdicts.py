"""Static verdicts in bulk: seeded draws of legal schedules, each checked and lowered by a pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_kernels import CATALOGUE, verdict
from polyjax.core.chips import ChipSpec, chip
from polyjax.core.errors import ScheduleError
from polyjax.core.op import Workload
from search.compile_pool import CompilePool

Draw = tuple[str, Workload, Mapping[str, Any]]


def judge(kernel_name: str, workload: Workload, schedule: Mapping[str, Any], on: str) -> str:
    """Returns "" where a schedule passes the cheap checks and lowers for a chip, or the reason."""
    kernel, target = CATALOGUE[kernel_name], chip(on)
    made = kernel.schedule_type.from_json(schedule)
    reason = verdict.refusal(kernel, workload, made, target)
    if reason is None:
        try:
            verdict.lower(kernel, workload, made, target)
        except ScheduleError as error:
            reason = str(error)
    return reason or ""


def draws(target: ChipSpec, seed: int) -> Iterator[Draw]:
    """Yields schedules that pass the cheap checks, every kernel in turn, without end.

    Illegal ones are thrown back: their verdict costs next to nothing and would flatter a rate.
    """
    rng = random.Random(seed)
    kernels = [k for k in CATALOGUE.values() if k.platform == target.platform]
    supported = {
        kernel.name: [w for w in verdict.workloads(kernel.op) if kernel.supports(w) is None]
        for kernel in kernels
        if kernel.requires <= target.features
    }
    while True:
        for kernel in kernels:
            if not supported.get(kernel.name):
                continue
            workload = rng.choice(supported[kernel.name])
            space = list(kernel.space(workload, target))
            for schedule in rng.sample(space, min(64, len(space))):
                if verdict.refusal(kernel, workload, schedule, target) is None:
                    yield kernel.name, workload, schedule.to_json()
                    break


def rate_per_hour(pool: CompilePool, chosen: list[Draw], on: str) -> tuple[float, list[str]]:
    """Returns verdicts per hour over `chosen`, and the reasons of those that were refused."""
    begun = time.monotonic()
    for number, draw in enumerate(chosen):
        pool.submit(number, judge, *draw, on)
    reasons: list[str] = []
    while pool.pending:
        for _, answer in pool.poll(1.0):
            reason = answer.error if answer.status != "ok" else answer.result
            reasons += [reason] if reason else []
    return len(chosen) / (time.monotonic() - begun) * 3600, reasons
