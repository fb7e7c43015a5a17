"""What an op, a workload, a schedule and a kernel are, and how a model calls an op.

An `Op` is a mathematical function with one plain-jnp reference, the truth. A `Workload` is an op
at concrete shapes, dtypes and static arguments. A `Kernel` implements an op for one accelerator
family; a `Schedule` is its frozen knobs. Model code calls ops through an `Ops` object, which looks
each workload up in the plan and falls back to the reference:

    ops = Ops(plan.choices, catalogue)
    y = ops(MATMUL, x, w)            # x[M,K], w[N,K] -> y[M,N]
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, Self, cast

import jax
import jax.numpy as jnp

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.launch import LaunchShape

_SPEC = re.compile(r"^(\w+)([?*])?\[([\w,]*)\]$")


@dataclasses.dataclass(frozen=True)
class Workload:
    """An op at concrete axis sizes, dtypes and static arguments.

    `dims` maps axis letters (B, T, S, N, K, H, D, F, V, E, P, Z) to sizes, `dtypes` maps argument
    names to dtype names, `static` holds the remaining hashable arguments.
    """

    op: str
    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    static: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, axis: str) -> int:
        return dict(self.dims)[axis]

    def get(self, axis: str, default: int = 0) -> int:
        return dict(self.dims).get(axis, default)

    def dtype(self, name: str) -> jnp.dtype:
        return jnp.dtype(dict(self.dtypes)[name])

    def has(self, name: str) -> bool:
        """Whether an optional array argument is given."""
        return name in dict(self.dtypes)

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.static).get(name, default)

    @property
    def key(self) -> str:
        """Readable identity, e.g. `matmul[M=1,K=2048,N=3072|x:bfloat16,w:bfloat16|out=float32]`."""
        part = lambda pairs, sep: ",".join(f"{k}{sep}{v}" for k, v in pairs)  # noqa: E731
        tail = f"|{part(self.static, '=')}" if self.static else ""
        return f"{self.op}[{part(self.dims, '=')}|{part(self.dtypes, ':')}{tail}]"

    def resized(self, **sizes: int) -> Workload:
        """The same workload with some axes at other sizes (conformance tests shrink this way)."""
        dims = tuple((k, sizes.get(k, v)) for k, v in self.dims)
        return dataclasses.replace(self, dims=dims)


@dataclasses.dataclass(frozen=True)
class Op:
    """A mathematical function and its truth.

    `inputs` names each array argument and its axes in call order, e.g. ("x[M,K]", "w[N,K]",
    "residual?[M,N]"; `?` marks an argument that may be None, `*` a tuple of L equal arrays, one per
    layer). Axis sizes must agree between arguments. `reference(ops, *arrays, **static)` is plain
    jnp; a composite op calls simpler ops through `ops`, so that a plan may fuse it or leave it in
    pieces. `flops` and `bytes_moved` give
    the least work a workload needs (each input read once, each output written once).
    """

    name: str
    inputs: tuple[str, ...]
    reference: Callable[..., Any]
    flops: Callable[[Workload], float] | None = None
    bytes_moved: Callable[[Workload], float] | None = None
    unkeyed: tuple[str, ...] = ("P",)  # the pool's size must not change which kernel is chosen

    def workload(self, *args: Any, **static: Any) -> Workload:
        """Returns the workload of a call. Raises TypeError where shapes disagree with `inputs`."""
        dims: dict[str, int] = {}
        dtypes: list[tuple[str, str]] = []
        for spec, arg in zip(self.inputs, args, strict=False):
            match = _SPEC.match(spec)
            assert match, f"{self.name}: malformed input spec {spec!r}"
            name, mark, axes = match[1], match[2], [a for a in match[3].split(",") if a]
            if arg is None:
                if mark != "?":
                    raise TypeError(f"{self.name}: {name} is required")
                continue
            if mark == "*":
                arg = _one_of_equal_layers(self.name, name, arg, dims)
            if len(axes) != arg.ndim:
                raise TypeError(f"{self.name}: {name} has shape {arg.shape}, wanted axes {axes}")
            for axis, size in zip(axes, arg.shape, strict=True):
                wanted = int(axis) if axis.isdigit() else dims.setdefault(axis, size)
                if wanted != size:
                    raise TypeError(f"{self.name}: axis {axis} of {name} is {size}, not {wanted}")
            dtypes.append((name, jnp.dtype(arg.dtype).name))
        kept = tuple((axis, size) for axis, size in dims.items() if axis not in self.unkeyed)
        return Workload(self.name, kept, tuple(dtypes), tuple(sorted(static.items())))


def _one_of_equal_layers(op: str, name: str, arrays: Any, dims: dict[str, int]) -> Any:
    """Returns the first of a per-layer tuple; records axis L. Raises TypeError if they differ."""
    if not isinstance(arrays, (tuple, list)) or not arrays:
        raise TypeError(f"{op}: {name} must be a tuple with one array per layer")
    if dims.setdefault("L", len(arrays)) != len(arrays):
        raise TypeError(f"{op}: {name} has {len(arrays)} layers, not {dims['L']}")
    kinds = {(a.shape, jnp.dtype(a.dtype).name) for a in arrays}
    if len(kinds) != 1:
        raise TypeError(f"{op}: the layers of {name} differ: {sorted(kinds, key=str)}")
    return arrays[0]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base of every kernel's knobs. Subclasses are frozen dataclasses of int, bool, str fields."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        names = {f.name for f in dataclasses.fields(cls)}
        if set(data) - names:
            raise ScheduleError(f"{cls.__name__} has no field {sorted(set(data) - names)}")
        return cls(**data)

    def __str__(self) -> str:
        return json.dumps(self.to_json(), sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Writes:
    """A kernel's declared stores: output index -> per-block (start, size) slices along each axis.

    `Kernel.writes` yields these; the body stores through the same function, so that coverage (every
    output element exactly once, nothing out of bounds) can be checked without running it.
    """

    output: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class Kernel(Protocol):
    """One Pallas implementation of an op for one accelerator family (a module-level object).

    `name` is unique in the catalogue, e.g. "mosaic_gpu.matmul". `requires` names chip features
    ("wgmma", "tma", "tcgen05", ...). All methods are pure.
    """

    name: str
    op: Op
    platform: str  # "gpu" | "tpu"
    requires: frozenset[str]
    schedule_type: ClassVar[type[Schedule]]

    def supports(self, workload: Workload) -> str | None:
        """None, or why this kernel cannot compute the workload at all."""

    def preferred(self, workload: Workload) -> bool:
        """Whether plans take it without a measurement: it beat XLA nearby, on a device."""

    def space(self, workload: Workload, chip: ChipSpec) -> Iterator[Schedule]:
        """Every schedule of the grid of knobs, legal or not; order is stable."""

    def default(self, workload: Workload, chip: ChipSpec) -> Schedule:
        """The schedule the analytical model chooses; always legal where `supports` is None."""

    def check(self, workload: Workload, schedule: Schedule, chip: ChipSpec) -> None:
        """Raises ScheduleError with the reason if the schedule is illegal (cheap, no lowering)."""

    def shared_memory_bytes(self, workload: Workload, schedule: Schedule) -> int:
        """Shared memory (VMEM on a TPU) per block, in bytes."""

    def launch_shape(self, workload: Workload, schedule: Schedule) -> LaunchShape:
        """How a legal schedule divides the work; cost models read it, nothing is checked."""

    def writes(self, workload: Workload, schedule: Schedule) -> Iterator[Writes]:
        """The write map; its union covers each output exactly once (split-K: per partial)."""

    def build(self, workload: Workload, schedule: Schedule) -> Callable[..., Any]:
        """A traceable function with the op's arguments and results."""


REFERENCE_NAME = "reference"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which kernel and schedule a plan picks for one workload; kernel "reference": none of them."""

    kernel: str
    schedule: tuple[tuple[str, Any], ...] = ()


@functools.lru_cache(maxsize=4096)
def _compiled_once(kernel: Any, workload: Workload, schedule: Schedule) -> Callable[..., Any]:
    """The kernel's function under an inner jit: lowered once a program, not once a layer."""
    return jax.jit(kernel.build(workload, schedule))


class Ops:
    """Calls ops as the plan says. Made fresh for every trace; holds no arrays.

    `used` records (workload, kernel name or "reference") of every call, so that a caller can prove
    that a candidate really is in the program and can list what a model's step is made of.
    """

    def __init__(self, choices: Mapping[str, Choice], catalogue: Mapping[str, Kernel]):
        self._choices = choices
        self._catalogue = catalogue
        self.used: list[tuple[Workload, str]] = []

    def __call__(
        self, op: Op, *args: Any, reference: Callable[..., Any] | None = None, **static: Any
    ) -> Any:
        """Computes `op`. `reference` replaces the op's own where it is a method of the model."""
        workload = op.workload(*args, **static)
        choice = self.choice(workload)
        if choice is None:
            self.used.append((workload, REFERENCE_NAME))
            with jax.named_scope(op.name):
                return (reference or op.reference)(self, *args, **static)
        kernel = self._catalogue[choice.kernel]
        self.used.append((workload, kernel.name))
        schedule = kernel.schedule_type.from_json(dict(choice.schedule))
        with jax.named_scope(kernel.name):
            return _compiled_once(cast(Any, kernel), workload, schedule)(*args)

    def chosen(self, op: Op, *args: Any, **static: Any) -> bool:
        """Whether a kernel computes this call."""
        return self.choice(op.workload(*args, **static)) is not None

    def choice(self, workload: Workload) -> Choice | None:
        """The kernel of a workload; None where its reference computes it."""
        choice = self._choices.get(workload.key)
        return None if choice is None or choice.kernel == REFERENCE_NAME else choice


REFERENCE = Ops({}, {})
"""Every op by its reference; for tests and truth computations."""
