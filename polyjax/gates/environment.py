"""The environment gate: a candidate may not touch the clocks and functions that judge it.

Functions are compared by identity with what this module saw before any candidate was loaded;
settings with those at the start of the trial. What was changed is put back.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import chex
import jax
import numpy as np

from polyjax.core.op import Ops
from polyjax.core.ops import OPS
from polyjax.gates.candidate import GateFailure
from polyjax.gates.settings import SETTINGS, VARIABLES, Settings
from polyjax.gates.step_trial import StepTrial
from polyjax.gates.trial import OpTrial

GATE = "environment"
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns",
           "process_time", "sleep", "clock_gettime")  # fmt: skip
_JAX = ("jit", "block_until_ready", "device_get", "device_put", "eval_shape", "make_jaxpr")
_NUMPY = ("asarray", "array", "abs", "isnan", "isfinite", "max", "array_equal", "allclose",
          "matmul", "median", "mean")  # fmt: skip
_CHEX = ("assert_trees_all_close", "assert_trees_all_equal", "assert_tree_all_finite",
         "assert_equal_shape")  # fmt: skip
_OWN_PACKAGES = ("polyjax.gates", "polyjax.core", "polyjax.compiler")
# Read once, so that the gate does not ask through what it suspects.
_perf_counter, _monotonic = time.perf_counter, time.monotonic
_known: dict[tuple[int, str], tuple[Any, Any]] = {}


def watch() -> None:
    """Remembers functions not seen before. Call it before a candidate's module is loaded."""
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (time, _CLOCKS),
        (jax, _JAX),
        (np, _NUMPY),
        (chex, _CHEX),
        (Ops, ("__call__",)),
        *((op, ("reference", "inputs")) for op in OPS.values()),
    ]
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(_OWN_PACKAGES):
            owners.append((module, _functions_of(module)))
    for owner, names in owners:
        for attribute in names:
            _known.setdefault((id(owner), attribute), (owner, getattr(owner, attribute)))


def _functions_of(module: ModuleType) -> tuple[str, ...]:
    kinds = (FunctionType, BuiltinFunctionType, type)
    return tuple(name for name, value in vars(module).items() if isinstance(value, kinds))


def changed(settings: Settings) -> list[str]:
    """Returns what differs from what was watched, and puts functions and jax settings back."""
    found = []
    for (_, attribute), (owner, original) in _known.items():
        if getattr(owner, attribute) is not original:
            found.append(f"{getattr(owner, '__name__', None) or owner.name}.{attribute}")
            _put_back(owner, attribute, original)
    for (name, before), (_, after) in zip(settings.values, Settings.now().values, strict=True):
        if before != after:
            found.append(f"{name} is {after!r}, was {before!r}")
            if name in SETTINGS:
                jax.config.update(name, before)
            elif name in VARIABLES:
                _restore_variable(name, before)
    return found


def _put_back(owner: Any, attribute: str, original: Any) -> None:
    if dataclasses.is_dataclass(owner) and not isinstance(owner, type):
        object.__setattr__(owner, attribute, original)
    else:
        setattr(owner, attribute, original)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def check(trial: OpTrial | StepTrial) -> dict[str, Any]:
    """Returns evidence. Raises GateFailure naming what was tampered with."""
    return unchanged(trial.settings)


def unchanged(settings: Settings) -> dict[str, Any]:
    """Evidence that nothing watched changed since `settings`. Raises GateFailure."""
    started = _perf_counter(), _monotonic()
    tampered = changed(settings)
    if tampered:
        raise GateFailure(f"tampered with {', '.join(tampered[:5])}")
    if time.perf_counter is not _perf_counter or time.monotonic() < started[1]:
        raise GateFailure("the clock runs backwards")
    return {"watched": len(_known)}
