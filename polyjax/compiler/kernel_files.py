"""Kernels that came as files: loaded in compiler and measuring processes, and nowhere else.

docs/adding_a_kernel.md describes the file. A process that serves never executes one: it must not
call `allow_kernel_files`, and without that every load is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import jax

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.kernel_source import PREFIX, KernelSource, check_name
from polyjax.core.op import Kernel, Op, Schedule, Workload, Writes

KERNEL_FOLDER = "kernels"  # in the program cache's directory: each text under its sha256

_allowed = False


def allow_kernel_files() -> None:
    """Lets this process execute kernel files: it can be killed and serves nobody."""
    global _allowed
    _allowed = True


class FileKernel:
    """The kernel of one file: `polyjax.core.op.Kernel` around its module. Equal only to itself."""

    requires: frozenset[str] = frozenset()

    def __init__(self, name: str, module: ModuleType):
        """Raises ConfigError where the module is no kernel."""
        self.name = name
        self.op = _op_of(module)
        self.pallas = bool(getattr(module, "PALLAS", False))
        self._module = module
        self._space = _space_of(module)
        fields = [(field, Any) for field in self._space]
        self.schedule_type: type[Schedule] = dataclasses.make_dataclass(
            "FileSchedule", fields, bases=(Schedule,), frozen=True
        )

    @property
    def platform(self) -> str:
        """A file is written for the device that it is given to."""
        return jax.default_backend()

    def supports(self, workload: Workload) -> str | None:
        if workload.op != self.op.name:
            return f"computes {self.op.name}"
        supports: Callable[[Workload], bool] = getattr(self._module, "supports", lambda _: True)
        return None if supports(workload) else "its supports() says no"

    def preferred(self, workload: Workload) -> bool:
        return False

    def space(self, workload: Workload, chip: ChipSpec | None = None) -> Iterator[Schedule]:
        """What `schedules(workload)` yields, else every combination of SPACE, the default first."""
        schedules = getattr(self._module, "schedules", None)
        if schedules is not None:
            yield from (self.schedule_type.from_json(dict(s)) for s in schedules(workload))
            return
        for values in itertools.product(*self._space.values()):
            yield self.schedule_type(*values)

    def default(self, workload: Workload, chip: ChipSpec | None = None) -> Schedule:
        """Raises ScheduleError if the file has no schedule for the workload."""
        for schedule in self.space(workload, chip):
            return schedule
        raise ScheduleError(f"{self.name} has no schedule for {workload.key}")

    def check(self, workload: Workload, schedule: Schedule, chip: ChipSpec | None = None) -> None:
        if (reason := self.supports(workload)) is not None:
            raise ScheduleError(f"{self.name}: {workload.key}: {reason}")
        if schedule not in self.space(workload, chip):
            raise ScheduleError(f"{self.name}: {schedule} is no schedule of {workload.key}")

    def shared_memory_bytes(self, workload: Workload, schedule: Schedule) -> int:
        return 0

    def writes(self, workload: Workload, schedule: Schedule) -> Iterator[Writes]:
        return iter(())

    def build(self, workload: Workload, schedule: Schedule) -> Callable[..., Any]:
        built: Callable[..., Any] = self._module.build(workload, schedule)
        return built


def _op_of(module: ModuleType) -> Op:
    op = getattr(module, "OP", None)
    if not isinstance(op, Op):
        raise ConfigError("the file has no OP, one of polyjax.core.ops")
    if not callable(getattr(module, "build", None)):
        raise ConfigError("the file has no function build(workload, schedule)")
    return op


def _space_of(module: ModuleType) -> dict[str, tuple[Any, ...]]:
    """Field -> values. Raises ConfigError where they are no JSON scalars."""
    space = getattr(module, "SPACE", {})
    if not isinstance(space, Mapping):
        raise ConfigError("SPACE is no mapping from a field to its values")
    if hasattr(module, "schedules") and not space:
        raise ConfigError("schedules() needs SPACE, which names the fields")
    for field, values in space.items():
        if not isinstance(field, str) or not field.isidentifier():
            raise ConfigError(f"SPACE: {field!r} is no field name")
        if not isinstance(values, tuple | list) or not values:
            raise ConfigError(f"SPACE: {field} needs a tuple of values")
        if not all(isinstance(value, bool | int | float | str) for value in values):
            raise ConfigError(f"SPACE: the values of {field} must be numbers, bools or strings")
    return {field: tuple(values) for field, values in space.items()}


@functools.lru_cache(maxsize=64)
def load_kernel(name: str, source: KernelSource) -> FileKernel:
    """Executes the file and returns its kernel, once a process.

    Raises ConfigError where the text is not what its digest says or is no kernel, or in a process
    that serves; and whatever the file raises.
    """
    if not _allowed:
        raise ConfigError(f"{name}: a process that serves does not load kernel files")
    text = source.read()
    module = ModuleType(f"polyjax_kernel_{source.sha256[:12]}")
    module.__file__ = source.path
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    exec(compile(text, source.path, "exec"), module.__dict__)
    return FileKernel(name, module)


def kept_kernel(name: str, folder: Path) -> FileKernel:
    """The kernel of a plan's name, from the texts kept in `folder`.

    Raises ConfigError where there is none.
    """
    digits = name.removeprefix(PREFIX).partition("/")[0]
    for path in folder.glob(f"{digits}*.py"):
        source = KernelSource(str(path), path.stem)
        check_name(name, source)
        return load_kernel(name, source)
    raise ConfigError(f"{folder} keeps no text of {name}")


def with_kernel_files(
    catalogue: Mapping[str, Kernel], sources: tuple[tuple[str, KernelSource], ...]
) -> Mapping[str, Kernel]:
    """The catalogue and the kernels of a plan's sources, each loaded when it is looked up."""
    return _WithFiles(catalogue, dict(sources)) if sources else catalogue


class _WithFiles(Mapping[str, Kernel]):
    def __init__(self, catalogue: Mapping[str, Kernel], sources: Mapping[str, KernelSource]):
        self._catalogue = catalogue
        self._sources = sources

    def __getitem__(self, name: str) -> Kernel:
        if name in self._sources:
            return cast(Kernel, load_kernel(name, self._sources[name]))
        return self._catalogue[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._catalogue
        yield from self._sources

    def __len__(self) -> int:
        return len(self._catalogue) + len(self._sources)
