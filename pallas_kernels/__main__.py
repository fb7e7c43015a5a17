"""Counts legal schedules per op for a chip, with the reasons of the others; needs no device.

    python -m pallas_kernels --chip="NVIDIA H200" [--op=matmul] [--json] [--all]

Every schedule of every workload gets the cheap checks; a seeded sample of the legal ones, 32 an op,
is lowered too (all of them with --all). Kernels are those of the chip's platform. For a TPU the
lowering ends where its compiler would begin; scripts/check_tpu compiles.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from absl import app, flags

from pallas_kernels import CATALOGUE
from polyjax.core.chips import ChipSpec, chip
from polyjax.core.errors import ConfigError, PolyjaxError

_CHIP = flags.DEFINE_string("chip", "NVIDIA H200", "Name or device kind of the chip.")
_OP = flags.DEFINE_string("op", None, "Only this op.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
_ALL = flags.DEFINE_bool("all", False, "Lower every legal schedule, not a sample.")


def ops_of(platform: str) -> list[str]:
    """Returns the ops that have a kernel for a platform; kernels are named platform.op.variant."""
    names = [name.split(".") for name in CATALOGUE]
    return list(dict.fromkeys(op for family, op, _ in names if family.endswith(platform)))


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
    ops = ops_of(target.platform)
    if not ops:
        raise ConfigError(
            f"--chip={target.name}: the catalogue has no kernel for a {target.platform}"
        )
    if _OP.value and _OP.value not in ops:
        raise ConfigError(f"--op={_OP.value}: the catalogue has {', '.join(ops)}")
    chosen = [_OP.value] if _OP.value else ops
    # A process per core, op by op: lowering is Python and holds the interpreter lock.
    from pallas_kernels.verdict import judge_op  # imports Pallas: not before flags are parsed

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
