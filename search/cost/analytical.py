"""The analytical cost model: a roofline of one call under a schedule, and of a whole step.

Time is launch gaps + block starts + the slowest of (memory, level-2 cache, tensor cores, busiest
block) + what nothing hides. Memory runs at what Little's law allows: bytes asked for ahead of use
over the latency. How a schedule divides the work comes from the kernel (`launch_shape`), what the
chip can do from its `ChipSpec`.

The constants below are times of this repository's kernels on an NVIDIA H200, fitted at once to the
28 schedules in docs/results/kernels and the 22 in docs/bitter_lessons.md (median error 6 %, worst
67 %); other GPUs are taken to have the same ones. On a TPU only the pipeline steps have a cost of
their own: nothing was measured there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from polyjax.core.chips import ChipSpec
from polyjax.core.launch import LaunchShape
from polyjax.core.op import Choice, Kernel, Op, Schedule, Workload
from polyjax.core.ops import OPS

STAGED_START_US = 2.2  # a block that streams through shared memory: barriers, descriptors, filling
DIRECT_START_US = 0.9  # a block that loads straight into registers
STEP_US = 0.05  # waiting, multiplying and asking for more, in one pipeline step
TPU_STEP_US = 0.35  # one step of a Pallas grid on a TPU (JAX documentation, Pallas TPU pipelining)
VECTOR_OP_US = 0.0019  # one operation of every thread of a lone warpgroup: dependent, 3 cycles
SYNC_US = 2.9  # a reduction over a cluster, its blocks' loads standing still
REDUCTION_US = 0.2  # adding one more value with nothing to overlap
TILE_US = 0.27  # the epilogue of a tile
BORDER_US = 2.6  # between a Pallas and an XLA kernel in one program, beyond the launch
LITTLE_SHARPNESS = 4  # how abruptly bandwidth saturates as more bytes are in flight
# What an op by XLA takes beyond launch and roofline. With it Llama-3.2-1B's steps of 213 ops at
# batch 1, 16 and 64 come to 1302, 1409, 1754 us; plain JAX on an H200 took 1032 to 1424 (by weight
# layout), 1185, 1785. Matmuls alone want 3.8 and 1.0 (docs/results/kernels, XLA's best forms).
XLA_START_US, XLA_SLOWDOWN = 2.0, 1.1
ALLOCATED_REGISTERS = 8  # registers are given out in units of 8 a thread (CUDA occupancy tables)
RESERVED_SHARED_BYTES = 1024  # a block's own, of the system (CUDA programming guide)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Where the microseconds of one call go. `us` is the prediction.

    `floor_us` is the roofline: least bytes over bandwidth, or least flops over their rate. Blocks
    run in `rounds`; `tail` is the filled share of the last one; `in_flight` the bytes asked for
    over those that keep memory busy; `blocks_per_sm` how many share a multiprocessor.
    """

    gap_us: float
    start_us: float
    memory_us: float
    l2_us: float
    compute_us: float
    busy_us: float
    exposed_us: float
    floor_us: float
    rounds: int
    tail: float
    in_flight: float
    blocks_per_sm: float

    @property
    def us(self) -> float:
        hidden = max(self.memory_us, self.l2_us, self.compute_us, self.busy_us)
        return self.gap_us + self.start_us + hidden + self.exposed_us


def least_bytes(op: Op, workload: Workload) -> float:
    return op.bytes_moved(workload) if op.bytes_moved else 0.0


def least_flops(op: Op, workload: Workload) -> float:
    return op.flops(workload) if op.flops else 0.0


def floor_us(op: Op, workload: Workload, chip: ChipSpec) -> float:
    """Returns the roofline of a workload: no implementation on this chip takes less."""
    memory_us = least_bytes(op, workload) / chip.hbm_bytes_per_s * 1e6
    return max(memory_us, least_flops(op, workload) / chip.bf16_flops_per_s * 1e6)


def resident_blocks(shape: LaunchShape, shared_bytes: int, chip: ChipSpec) -> int:
    """Returns how many blocks one multiprocessor runs at once, by every limit it has; at least 1.

    Chips whose blocks share no multiprocessor (TPU cores) run one.
    """
    if not chip.shared_memory_per_sm_bytes:
        return 1
    registers = -(-max(shape.registers, 1) // ALLOCATED_REGISTERS) * ALLOCATED_REGISTERS
    return max(
        1,
        min(
            chip.shared_memory_per_sm_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
            chip.registers_per_sm // (shape.threads * registers),
            chip.threads_per_sm // shape.threads,
            chip.blocks_per_sm,
        ),
    )


def bandwidth(in_flight_bytes: float, chip: ChipSpec) -> float:
    """Returns bytes/s with this many bytes asked for ahead of use on the whole chip.

    Little's law: bandwidth = bytes in flight / latency, up to what the memory has.
    """
    asked = max(in_flight_bytes, 1.0) / (chip.memory_latency_us * 1e-6)
    ratio = chip.hbm_bytes_per_s / asked
    return chip.hbm_bytes_per_s / (1.0 + ratio**LITTLE_SHARPNESS) ** (1.0 / LITTLE_SHARPNESS)


def terms(kernel: Kernel, workload: Workload, schedule: Schedule, chip: ChipSpec) -> Terms:
    """Returns the cost of one call of a legal schedule, term by term."""
    shape = _launch_shape(kernel, workload, schedule, chip)
    shared_bytes = kernel.shared_memory_bytes(workload, schedule)
    resident = resident_blocks(shape, shared_bytes, chip)
    sms = max(1, chip.num_sms // shape.cluster) * shape.cluster
    slots = resident * sms
    running = min(shape.blocks, slots)
    rounds = -(-shape.blocks // slots)
    per_sm = max(1.0, min(float(resident), shape.blocks / sms))
    in_flight_bytes = running * shape.in_flight_bytes
    moved = least_bytes(kernel.op, workload)
    start_us, step_us, tile_us = _block_costs(shape, shared_bytes, chip)
    working = min(shape.blocks, sms) / sms
    block_us = shape.steps * step_us + shape.vector_ops / shape.threads * VECTOR_OP_US
    reductions_us = rounds * shape.reductions * REDUCTION_US / per_sm
    return Terms(
        gap_us=shape.kernels * chip.launch_gap_us,
        start_us=rounds * start_us / per_sm,
        memory_us=moved / bandwidth(in_flight_bytes, chip) * 1e6,
        l2_us=shape.read_bytes / chip.l2_bytes_per_s * 1e6 if chip.l2_bytes_per_s else 0.0,
        compute_us=max(shape.flops, least_flops(kernel.op, workload))
        / (chip.bf16_flops_per_s * working)
        * 1e6,
        busy_us=rounds * block_us,
        exposed_us=shape.syncs * SYNC_US + reductions_us + shape.tiles * tile_us,
        floor_us=floor_us(kernel.op, workload, chip),
        rounds=rounds,
        tail=shape.blocks / slots - (rounds - 1),
        in_flight=in_flight_bytes / (chip.hbm_bytes_per_s * chip.memory_latency_us * 1e-6),
        blocks_per_sm=per_sm,
    )


def _block_costs(
    shape: LaunchShape, shared_bytes: int, chip: ChipSpec
) -> tuple[float, float, float]:
    """Returns microseconds of a block's start, of a pipeline step and of a tile's epilogue."""
    if chip.platform != "gpu":
        return 0.0, TPU_STEP_US, 0.0
    staged = shared_bytes > shape.in_flight_bytes  # what is in flight lies in shared memory
    return STAGED_START_US if staged else DIRECT_START_US, STEP_US, TILE_US


def _launch_shape(
    kernel: Kernel, workload: Workload, schedule: Schedule, chip: ChipSpec
) -> LaunchShape:
    """What the kernel says; of one that does not say, a block a multiprocessor, all in flight."""
    declared = getattr(kernel, "launch_shape", None)
    if declared is not None:
        shape: LaunchShape = declared(workload, schedule)
        return shape
    moved = least_bytes(kernel.op, workload)
    return LaunchShape(chip.num_sms, 128, 64, moved, moved / chip.num_sms)


def reference_us(workload: Workload, chip: ChipSpec) -> float:
    """Returns what XLA takes for an op's reference: its roofline, slowed, and a launch."""
    own_us = XLA_START_US if chip.platform == "gpu" else 0.0
    roofline_us = floor_us(OPS[workload.op], workload, chip)
    return chip.launch_gap_us + own_us + XLA_SLOWDOWN * roofline_us


def is_composite(workload: Workload) -> bool:
    """Whether the op's reference calls simpler ops, which then are listed on their own."""
    return OPS[workload.op].reference.__module__ == "polyjax.core.composites"


def step_us(
    calls: Iterable[tuple[Workload, Choice | None]], catalogue: Mapping[str, Kernel], chip: ChipSpec
) -> float:
    """Returns the time of a step: its calls one after the other, with the gaps between them.

    `calls` are those of `ModelConfig.workloads` or `Ops.used`, in order and with repeats, each with
    the plan's choice or None for the reference. Pieces of a composite that a kernel fuses must be
    left out, as a traced plan does.
    """
    total_us, before = 0.0, None
    for workload, choice in calls:
        if choice is None and is_composite(workload):
            continue
        by_kernel = choice is not None
        if choice is None:
            total_us += reference_us(workload, chip)
        else:
            kernel = catalogue[choice.kernel]
            schedule = kernel.schedule_type.from_json(dict(choice.schedule))
            total_us += terms(kernel, workload, schedule, chip).us
        if before is not None and before != by_kernel and chip.platform == "gpu":
            total_us += BORDER_US
        before = by_kernel
    return total_us


def all_reduce_us(num_bytes: float, devices: int, chip: ChipSpec) -> float:
    """Returns the time of a ring all-reduce of `num_bytes` a device; 0 on one device.

    2(n-1) hops, each moving 1/n of the bytes (Patarasuk and Yuan 2009). NVLink reaches 77 % of its
    rate in NCCL's (366 of 475 GB/s on 4 H100s, waynehacking8.github.io/blog/nccl-nvlink-bandwidth).
    """
    if devices <= 1:
        return 0.0
    hops = 2 * (devices - 1)
    wire_us = hops / devices * num_bytes / (0.77 * chip.interconnect_bytes_per_s) * 1e6
    return chip.collective_base_us + hops * chip.collective_hop_us + wire_us
