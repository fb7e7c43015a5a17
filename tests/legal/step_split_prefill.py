"""Prefill programs whose matmuls sum their reduction in pieces."""

from polyjax.gates.step_candidate import SplitSchedule

KIND = "prefill"
SCHEDULES = [SplitSchedule(tile_k) for tile_k in (8, 16, 64)]
SUBSET = False


def wrap(program):
    return program
