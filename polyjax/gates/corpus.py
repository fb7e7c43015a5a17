"""Loads mutants and legal implementations from directories of Python files.

tests/mutants/README.md describes the format. A file is loaded anew for every seed, so that nothing
it remembers outlives a trial.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from polyjax.compiler.program import StepProgram
from polyjax.core.errors import ConfigError
from polyjax.core.op import Op, Workload
from polyjax.gates.candidate import Candidate
from polyjax.gates.small_workloads import small_workload

_counter = itertools.count()


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file; `variants` are its (workload, schedule) pairs, (None, schedule) for a step."""

    path: Path
    kind: str
    subset: bool
    variants: tuple[tuple[Workload | None, Any], ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def wraps_step(self) -> bool:
        return self.variants[0][0] is None


def load(path: Path) -> ModuleType:
    """Executes the file. Raises ConfigError if it is no mutant."""
    spec = importlib.util.spec_from_file_location(f"candidate_{next(_counter)}_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    is_kernel = isinstance(getattr(module, "OP", None), Op) and hasattr(module, "build")
    if not is_kernel and not hasattr(module, "wrap"):
        raise ConfigError(f"{path} has neither OP and build(workload, schedule) nor wrap(program)")
    return module


def entries(folder: str | Path) -> Iterator[Entry]:
    """Every file of a directory, in name order. Raises ConfigError if there is none."""
    paths = [p for p in sorted(Path(folder).glob("*.py")) if not p.name.startswith("_")]
    if not paths:
        raise ConfigError(f"{folder} holds no Python files")
    for path in paths:
        module = load(path)
        kind = (module.__doc__ or path.stem).strip().splitlines()[0]
        yield Entry(path, kind, bool(getattr(module, "SUBSET", True)), tuple(_variants(module)))


def _variants(module: ModuleType) -> Iterator[tuple[Workload | None, Any]]:
    if hasattr(module, "wrap"):
        yield from ((None, schedule) for schedule in getattr(module, "SCHEDULES", (None,)))
        return
    own = getattr(module, "WORKLOAD", None)
    default = (
        ()
        if own is None and hasattr(module, "WORKLOADS")
        else (own or small_workload(module.OP.name),)
    )
    workloads = tuple(getattr(module, "WORKLOADS", default))
    for workload in workloads:
        yield from ((workload, schedule) for schedule in getattr(module, "SCHEDULES", (None,)))


def candidate(module: ModuleType, workload: Workload, schedule: Any, name: str) -> Candidate:
    """The candidate of a loaded kernel module."""
    supports: Callable[[Workload], bool] = getattr(module, "supports", lambda _: True)

    def build(resized: Workload) -> Callable[..., Any] | None:
        return module.build(resized, schedule) if supports(resized) else None

    return Candidate(
        name,
        workload,
        build,
        pallas=bool(getattr(module, "PALLAS", False)),
        interpreted=bool(getattr(module, "INTERPRETED", False)),
    )


def wrapped(module: ModuleType, program: StepProgram, incumbent: StepProgram) -> StepProgram:
    """`wrap(program)` of a module, or `wrap(program, incumbent)` if it takes two."""
    takes = len(inspect.signature(module.wrap).parameters)
    result: StepProgram = module.wrap(*(program, incumbent)[:takes])
    return result
