"""Counts legal schedules per op for a chip, with the reasons of the others; needs no device.

    python -m pallas_kernels --chip="NVIDIA H200" [--op=matmul] [--json] [--all]

Every schedule of every workload gets the cheap checks; a seeded sample of the legal ones, 32 an op,
is lowered too (all of them with --all).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from absl import app, flags

from pallas_kernels import CATALOGUE
from polyjax.core.chips import ChipSpec, chip
from polyjax.core.errors import ConfigError, PolyjaxError, ScheduleError
from polyjax.core.op import Kernel, Schedule, Workload

_CHIP = flags.DEFINE_string("chip", "NVIDIA H200", "Name or device kind of the chip.")
_OP = flags.DEFINE_string("op", None, "Only this op.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
_ALL = flags.DEFINE_bool("all", False, "Lower every legal schedule, not a sample.")

SAMPLE = 32  # legal schedules lowered per op
SEED = 0
Candidate = tuple[Kernel, Workload, Schedule]


def judge_op(op_name: str, target: ChipSpec, lower_all: bool) -> dict[str, Any]:
    """Returns counts and reasons of every kernel, workload and schedule of an op."""
    from pallas_kernels import verdict  # imports Pallas: not before flags are parsed

    legal: list[Candidate] = []
    reasons: Counter[str] = Counter()
    total = 0
    kernels = verdict.kernels_of(op_name)
    for kernel in kernels:
        for workload in verdict.workloads(kernel.op):
            for schedule in kernel.space(workload, target):
                total += 1
                reason = verdict.refusal(kernel, workload, schedule, target)
                if reason is None:
                    legal.append((kernel, workload, schedule))
                else:
                    reasons[_general(reason)] += 1
    draw = random.Random(SEED)
    sample = legal if lower_all else draw.sample(legal, min(SAMPLE, len(legal)))
    refused = 0
    for kernel, workload, schedule in sample:
        try:
            verdict.lower(kernel, workload, schedule, target)
        except ScheduleError as error:
            refused += 1
            reasons[_general(str(error))] += 1
    return {
        "op": op_name,
        "kernels": [kernel.name for kernel in kernels],
        "schedules": total,
        "legal": len(legal),
        "lowered": len(sample) - refused,
        "lowering_sample": len(sample),
        "reasons": dict(reasons.most_common()),
    }


def _general(reason: str) -> str:
    """The reason without its numbers, so that equal ones are counted together."""
    return re.sub(r"(?<![\w.])\d+", "#", reason)


def print_table(judged: list[dict[str, Any]], target: ChipSpec) -> None:
    print(f"{target.name}: schedules that pass every static check, and lowerings tried")
    for row in judged:
        lowered = f"{row['lowered']}/{row['lowering_sample']} lower"
        print(f"{row['op']:22} {row['legal']:>7}/{row['schedules']:<7} legal   {lowered}")
        for reason, count in list(row["reasons"].items())[:6]:
            print(f"    {count:>7}  {reason[:110]}")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    target = chip(_CHIP.value)
    ops = list(dict.fromkeys(name.split(".")[1] for name in CATALOGUE))
    if _OP.value and _OP.value not in ops:
        raise ConfigError(f"--op={_OP.value}: the catalogue has {', '.join(ops)}")
    chosen = [_OP.value] if _OP.value else ops
    # A process per core, op by op: lowering is Python and holds the interpreter lock.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1), mp_context=spawn) as pool:
        every = [_ALL.value] * len(chosen)
        judged = list(pool.map(judge_op, chosen, [target] * len(chosen), every))
    if _JSON.value:
        print(json.dumps({"chip": target.name, "ops": judged}, indent=1))
    else:
        print_table(judged, target)


if __name__ == "__main__":
    try:
        app.run(main)
    except PolyjaxError as error:
        sys.exit(f"pallas_kernels: {error}")
