"""The state-ABI: what programs must agree on to take each other's place on live state."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from polyjax.compiler.state import StateAvals, StateSpec, head_indices, state_avals
from polyjax.core.errors import StateABIError
from polyjax.core.mesh import MeshPlan


@dataclasses.dataclass(frozen=True)
class StateABI:
    """For each array of state a program takes: its name, and what `abi_line` says of it."""

    lines: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Returns 16 hex digits; equal ABIs have equal digests."""
        return hashlib.sha256(repr(self.lines).encode()).hexdigest()[:16]

    def check(self, program: StateABI) -> None:
        """Raises StateABIError spelling out where `program` expects another state than this one."""
        if differences := differing_lines(dict(self.lines), dict(program.lines)):
            raise StateABIError(differences)


def differing_lines(engine: Mapping[str, str], program: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each line that differs."""
    differences = []
    for name in dict.fromkeys([*engine, *program]):
        held, wanted = engine.get(name), program.get(name)
        if held != wanted:
            differences.append(
                f"{name}: the engine holds {held or 'no such array'}, "
                f"the program takes {wanted or 'no such array'}"
            )
    return differences


def abi_line(aval: Any, sharding: Any, layout: Any, donated: bool) -> str:
    """The ABI line of one array, e.g. `float32[64,2,4,16,8] P(None, 'model') layout=01234 donated`.

    Shardings are compared by spec and mesh shape, so that they read well; device order is the
    mesh's.
    """
    shape = ",".join(map(str, aval.shape))
    spec = getattr(sharding, "spec", None)
    axes = [] if spec is None else list(spec)
    while axes and axes[-1] is None:  # P('model') and P('model', None) are the same
        axes.pop()
    mesh = getattr(sharding, "mesh", None)
    placed = f"P({', '.join(map(repr, axes))})" if axes else "replicated"
    over = "" if mesh is None or mesh.size == 1 else f" over {mesh.size} devices"
    order = getattr(layout, "major_to_minor", None)
    order = tuple(range(len(aval.shape))) if order is None else tuple(order)
    text = f"{jnp.dtype(aval.dtype).name}[{shape}] {placed}{over} layout={order}"
    return f"{text} {'donated' if donated else 'kept'}"


@functools.cache
def abi_of_state(
    spec: StateSpec, mesh_plan: MeshPlan, mesh: Mesh, arguments: tuple[tuple[str, bool], ...]
) -> StateABI:
    """The ABI of an engine's state for a program that takes `arguments`: (name, donated)."""
    avals = state_avals(spec, mesh_plan, mesh)
    return StateABI(
        tuple(
            (name, abi_line(aval, aval.sharding, None, donated))
            for argument, donated in arguments
            for name, aval in named_leaves(spec, avals, argument)
        )
    )


def named_leaves(spec: StateSpec, avals: StateAvals, argument: str) -> list[tuple[str, Any]]:
    """(name, aval) of the arrays in one state argument."""
    match argument:
        case "params":
            return list(zip((f"params.{n}" for n in avals.param_names), avals.params, strict=True))
        case "head":
            return [(f"params.{avals.param_names[i]}", avals.params[i]) for i in head_indices(spec)]
        case "kv":
            return [(f"kv.{layer}", aval) for layer, aval in enumerate(avals.kv)]
        case "last_tokens":
            return [("last_tokens", avals.last_tokens)]
        case _:
            fields = dataclasses.fields(avals.sampling)
            return [(f"sampling.{f.name}", getattr(avals.sampling, f.name)) for f in fields]


def executable_abi(executable: jax.stages.Compiled, names: Sequence[str]) -> StateABI:
    """The ABI that an executable really has; `names` are its leading, state arguments."""
    infos = jax.tree.leaves(executable.args_info)
    formats = jax.tree.leaves(executable.input_formats)
    lines = []
    for name, info, form in zip(names, infos, formats, strict=False):
        lines.append((name, abi_line(info, form.sharding, form.layout, info.donated)))
    return StateABI(tuple(lines))
