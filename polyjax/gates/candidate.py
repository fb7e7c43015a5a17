"""What the op-level gates judge: a function that claims to compute an op, and how to call it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import PolyjaxError
from polyjax.core.op import Kernel, Op, Schedule, Workload
from polyjax.core.ops import OPS


class GateFailure(PolyjaxError):
    """A candidate is wrong; the message says how, with numbers."""


class Builder(Protocol):
    """Makes the function of one workload; returns None for a workload it does not support."""

    def __call__(self, workload: Workload, /) -> Callable[..., Any] | None: ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """`build(workload)` gives a traceable function with the op's arguments and results.

    `kernel` is the catalogue's object where there is one. A `pallas` candidate claims to be a
    Pallas kernel. `interpreted` ones run in interpret mode: slowly, so they get fewer cases.
    """

    name: str
    workload: Workload
    build: Builder
    kernel: Kernel | None = None
    schedule: Schedule | None = None
    pallas: bool = False
    interpreted: bool = False

    @property
    def op(self) -> Op:
        return OPS[self.workload.op]

    def traceable(self, workload: Workload) -> Callable[..., Any] | None:
        """The function of a workload, to be traced; in interpret mode where that is asked for."""
        try:
            built = self.build(workload)
        except Exception as error:
            raise GateFailure(f"{workload.key}: build raised {first_line(error)}") from error
        if built is None or not self.interpreted:
            return built

        def interpreted(*args: Any) -> Any:
            with interpreting():
                return built(*args)

        return interpreted

    def function(self, workload: Workload) -> Callable[..., Any] | None:
        """The jitted function for a workload; compiled once per shape, then called many times."""
        built = self.traceable(workload)
        if built is None:
            return None
        return jax.jit(lambda *args: built(*args), compiler_options=quick_compile())


def of_kernel(
    kernel: Kernel, schedule: Schedule, workload: Workload, chip: ChipSpec, interpreted: bool
) -> Candidate:
    """The candidate for a kernel of the catalogue with one schedule."""

    def build(resized: Workload) -> Callable[..., Any] | None:
        if kernel.supports(resized) is not None:
            return None
        try:
            kernel.check(resized, schedule, chip)
        except PolyjaxError:
            return None
        return kernel.build(resized, schedule)

    name = f"{kernel.name} {schedule}"
    return Candidate(name, workload, build, kernel, schedule, True, interpreted)


def quick_compile() -> dict[str, Any] | None:
    """Compiler options: on a CPU, where nothing is timed, LLVM optimises little; half the time."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def interpreting(detect_races: bool = False) -> AbstractContextManager[None]:
    """Inside, Mosaic GPU kernels that are traced run in the interpreter; fresh memory is NaN."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    return plgpu.force_gpu_interpret_mode(params)


def called(function: Callable[..., Any], args: Any) -> Any:
    """Results of the candidate on the host. Raises GateFailure with what the candidate raised."""
    return on_host(called_on_device(function, args))


def called_on_device(function: Callable[..., Any], args: Any) -> Any:
    """Results of the candidate as device arrays, finished."""
    try:
        return jax.block_until_ready(function(*args))
    except Exception as error:
        raise GateFailure(f"raised {first_line(error)}") from error


def on_host(results: Any) -> Any:
    return jax.tree.map(np.asarray, results)


def on_device(args: Any) -> tuple[Any, ...]:
    """Device copies of host arguments; never views of the host's memory."""
    return tuple(jax.tree.map(functools.partial(jax.numpy.array, copy=True), args))


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}"


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise: equal bits, or NaN in both (a NaN's payload may change in a conversion)."""
    equal = _bits(a) == _bits(b)
    if a.dtype.kind in "iub":
        return equal
    return equal | (np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))


def _bits(a: np.ndarray) -> np.ndarray:
    if a.dtype == bool:
        return a
    return np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")
