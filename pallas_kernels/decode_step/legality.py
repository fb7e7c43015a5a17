"""Which workloads and schedules the persistent decode step can run, and the default schedule."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.decode_step.layout import (
    FOLD_COLUMNS,
    GROUP_ROWS,
    DecodeSchedule,
    SharedMemory,
    Step,
)
from polyjax.core.op import Workload

STATIC_SHARED_BYTES = 1024  # what Mosaic GPU itself takes
REGISTERS_PER_BLOCK = 65536  # 32-bit registers of a multiprocessor
ENOUGH_RING_BYTES = 96 * 1024  # keeps memory busy for 3 us: about two exchanges between blocks
# N = 8 * batch columns of a wgmma, and a lane for each of 2 * batch traces, allow 16; from there on
# separate kernels are faster (1B, batch 16, on an H200: 1212 us against plain JAX's 1185).
MAX_BATCH = 8
BF16_ARGUMENTS = ("x", "attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down", "kv")


def unsupported(w: Workload) -> str | None:
    """None, or what no schedule can compute of the workload."""
    wrong = [name for name in BF16_ARGUMENTS if w.dtype(name) != jnp.bfloat16]
    if wrong:
        return f"{', '.join(wrong)}: only bfloat16"
    if w["B"] > MAX_BATCH:
        return f"batch {w['B']}: at most {MAX_BATCH}"
    if w["H"] not in (64, 128) or w["R"] != w["H"]:
        return f"head dim {w['H']} with {w['R']} rotated: only 64 and 128, all rotated"
    if w["G"] - 2 not in (1, 2, 4, 8):
        return f"{w['G'] - 2} query heads a kv head: only 1, 2, 4, 8"
    if w["N"] != w["K"] * (w["G"] - 2) * w["H"]:
        return f"o takes {w['N']} columns, not kv heads x group x head dim"
    if w.get("V") % GROUP_ROWS:
        return f"vocabulary {w['V']} is no multiple of {GROUP_ROWS}"
    if blocks_of(w) is None:
        return "no number of blocks divides every projection's rows by 8"
    if any(columns % FOLD_COLUMNS for columns in (w["D"], w["N"], w["F"])):
        return f"a row of weights is no multiple of {FOLD_COLUMNS} columns"
    return None


def blocks_of(w: Workload) -> int | None:
    """The most blocks among which every projection's rows divide in groups of 8."""
    rows = (w["K"] * w["G"] * w["H"], w["D"], w["F"])
    fits = lambda blocks: all(r % (blocks * GROUP_ROWS) == 0 for r in rows)  # noqa: E731
    return next((blocks for blocks in (128, 64, 32, 16, 8) if fits(blocks)), None)


def broken_rule(w: Workload, s: DecodeSchedule) -> str | None:
    """None, or why this schedule cannot run this (supported) workload on any chip."""
    return next(filter(None, (*_counts(w, s), *_divisions(w, s), *_shares(w, s))), None)


def _counts(w: Workload, s: DecodeSchedule) -> Iterator[str | None]:
    if s.blocks % 4 or not 8 <= s.blocks <= 128:
        yield f"{s.blocks} blocks: a multiple of 4 from 8 to 128"
    if s.warpgroups not in (1, 2, 3, 4):
        yield f"{s.warpgroups} consumer warpgroups: 1 to 4"
    if s.chains not in (1, 2) or not 1 <= s.hint_copies <= s.blocks:
        yield f"{s.chains} chains (1 or 2), {s.hint_copies} hint copies (1 to blocks)"
    if s.stages < s.warpgroups or min(s.down_parts, s.kv_stages, s.in_flight) < 1:
        yield "fewer stages than warpgroups, or a count below 1"
    if s.chunk < FOLD_COLUMNS or s.chunk % FOLD_COLUMNS:
        yield f"chunk {s.chunk} is no multiple of {FOLD_COLUMNS}"
    registers = 4 * w["B"] * s.chains + (w["G"] - 2) * 10 + 40
    if (s.warpgroups + 1) * 128 * registers > REGISTERS_PER_BLOCK:
        yield f"about {registers} registers a thread do not fit {s.warpgroups} warpgroups"


def _divisions(w: Workload, s: DecodeSchedule) -> Iterator[str | None]:
    if s.blocks < 1 or s.chunk < 1 or s.down_parts < 1:
        return
    for name, rows in (("qkv", w["K"] * w["G"] * w["H"]), ("o", w["D"]), ("gate_up", w["F"])):
        if rows % (s.blocks * GROUP_ROWS):
            yield f"{rows} rows of {name} do not divide into {s.blocks} blocks of groups of 8"
    if w["F"] % s.down_parts:
        yield f"{w['F']} columns of down do not divide into {s.down_parts} parts"
    for name, columns in (("qkv", w["D"]), ("o", w["N"]), ("down", w["F"] // s.down_parts)):
        if columns % s.chunk:
            yield f"{columns} columns of {name} are no multiple of the chunk {s.chunk}"


def _shares(w: Workload, s: DecodeSchedule) -> Iterator[str | None]:
    step = Step.of(w, s)
    half = step.embed_rows // 2
    if half & (half - 1) or half > 32:
        yield f"{step.embed_rows} rows of x a block: a power of two up to 64"
    if step.pairs > s.blocks or step.pairs * step.splits % 4:
        yield f"{step.pairs} (row, kv head) pairs, {step.splits} blocks each, of {s.blocks} blocks"
    share = step.group_dim // step.splits
    if share < 4 or share & (share - 1):
        yield f"{step.splits} splits leave {share} dims to combine a block"


def shared_memory_bytes(w: Workload, s: DecodeSchedule) -> int:
    return SharedMemory(Step.of(w, s)).total_bytes + STATIC_SHARED_BYTES


def best_fit(w: Workload, shared_bytes: int) -> DecodeSchedule | None:
    """The default: the fewest parts of the down projection that leave room for a long ring."""
    blocks = blocks_of(w)
    assert blocks is not None, "asked for a schedule of an unsupported workload"
    columns = (w["D"], w["N"], w["F"])
    chunk = next(c for c in (1024, 512, 256, 128) if all(k % c == 0 for k in columns))
    pages = -(-w["C"] * w["B"] * w["K"] // blocks)
    best = None
    for down_parts in (n for n in range(1, w["F"] // chunk + 1) if w["F"] // chunk % n == 0):
        for stages in range(2, 25):
            schedule = DecodeSchedule(
                blocks=blocks,
                chunk=chunk,
                stages=stages,
                kv_stages=min(2, max(1, pages)),
                down_parts=down_parts,
                hint_copies=min(64, blocks),
            )
            if shared_memory_bytes(w, schedule) > shared_bytes:
                break
            best = schedule
        if best is not None and best.stages * GROUP_ROWS * 2 * chunk >= ENOUGH_RING_BYTES:
            break
    return best
