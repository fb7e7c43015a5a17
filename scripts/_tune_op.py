"""Tunes one workload of an op on this machine's device: what the scripts/tune_<op> share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from polyjax.core.errors import ConfigError, PolyjaxError

if TYPE_CHECKING:  # imports jax, which takes a second: not before flags are parsed
    from polyjax.core.op import Workload

_LEDGER = flags.DEFINE_string("ledger", None, "The file that remembers trials.", required=True)
_RESUME = flags.DEFINE_bool("resume", False, "Go on from what the ledger knows.")
_BUDGET = flags.DEFINE_string("budget", "10m", "How long this run may take.")
_TRIALS = flags.DEFINE_integer("max_trials", 0, "Most new trials; 0: as the budget allows.")
_AGENT = flags.DEFINE_string("agent", "bandit", "Who proposes schedules.")
_WORKLOAD = flags.DEFINE_string("workload", None, "Workload key, whole or a part of one.")
_KERNEL = flags.DEFINE_string(
    "kernel",
    None,
    "Kernel to tune, empty for forms that XLA compiles; default: the first that can, here.",
)


def tune(op: str, argv: Sequence[str]) -> int:
    """Tunes a workload of `op`; returns the exit code. For absl's `app.run`."""
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected arguments: {' '.join(argv[1:])}")
        return _tuned(op)
    except PolyjaxError as error:
        print(f"tune_{op}: {error}", file=sys.stderr)
        return 1


def _tuned(op: str) -> int:
    from polyjax.tune_progress import Shown, seconds
    from search.run import RunConfig, tune_op

    workload = chosen_workload(op, _WORKLOAD.value)
    run = RunConfig(
        Path(_LEDGER.value), _RESUME.value, seconds(_BUDGET.value), _TRIALS.value, _AGENT.value
    )
    shown = Shown(run.budget_s, run.max_trials)
    winner, gain = tune_op(workload, run, _KERNEL.value, shown.trial)
    shown.end()
    print(f"{gain:.3f} times as fast as the start: {winner.to_json()}")
    return 0


def chosen_workload(op: str, wanted: str | None) -> Workload:
    """Returns the op's first declared workload whose key contains `wanted`.

    A whole key names a workload that is not declared, too. Raises ConfigError with the known ones.
    """
    from search.findings import workload_of

    if wanted is not None and (named := workload_of(wanted)) is not None:
        return named
    declared = list(importlib.import_module(f"pallas_kernels.{op}.workloads").workloads())
    for workload in declared:
        if wanted is None or wanted in workload.key:
            found: Workload = workload
            return found
    known = "\n  ".join(workload.key for workload in declared[:12])
    raise ConfigError(f"--workload={wanted}: no workload of {op} is like it; some are\n  {known}")
