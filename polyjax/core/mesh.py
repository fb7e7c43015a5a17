"""How a model is laid over devices: axis sizes and the rules from logical to mesh axes.

Models name the logical axes of every parameter, KV group and activation; only this file knows how
they fall onto a mesh. One device is the mesh of size 1, so there is no second code path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyjax.core.errors import ConfigError

MESH_AXES = ("data", "model", "expert", "sequence")

DEFAULT_RULES: tuple[tuple[str, str | None], ...] = (
    ("batch", None),
    ("embed", None),
    ("heads", "model"),
    ("kv_heads", "model"),
    ("head_dim", None),
    ("ffw", "model"),
    ("vocab", "model"),
    ("experts", "expert"),
    ("latent", None),
    ("pages", None),
)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """Axis sizes and logical-to-mesh rules. Immutable, JSON-round-tripping, part of a plan."""

    data: int = 1
    model: int = 1
    expert: int = 1
    sequence: int = 1
    rules: tuple[tuple[str, str | None], ...] = DEFAULT_RULES

    @property
    def num_devices(self) -> int:
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Returns the mesh over the first `num_devices` devices. Raises ConfigError if too few."""
        devices = list(jax.devices() if devices is None else devices)
        if len(devices) < self.num_devices:
            raise ConfigError(
                f"the mesh plan wants {self.num_devices} devices, {len(devices)} are there; "
                "lower --tensor_parallel_size"
            )
        shape = tuple(getattr(self, axis) for axis in MESH_AXES)
        return Mesh(np.asarray(devices[: self.num_devices]).reshape(shape), MESH_AXES)

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes; KeyError if unknown."""
        rules = dict(self.rules)
        return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))

    def sharding(self, mesh: Mesh, axes: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(mesh, self.spec(axes))

    def ways(self, axes: Sequence[str | None]) -> int:
        """Returns into how many shards an array with these logical axes is cut."""
        rules = dict(self.rules)
        mesh_axes = {rules[axis] for axis in axes if axis is not None} - {None}
        return math.prod(getattr(self, axis) for axis in mesh_axes if axis is not None)

    def divides(self, axes: Sequence[str | None], shape: Sequence[int]) -> list[str]:
        """Returns a problem for every axis of an array whose size its mesh axis does not divide."""
        rules, problems = dict(self.rules), []
        for axis, size in zip(axes, shape, strict=True):
            mesh_axis = None if axis is None else rules[axis]
            ways = 1 if mesh_axis is None else getattr(self, mesh_axis)
            if size % ways:
                problems.append(f"{axis}={size} is not divisible by {mesh_axis}={ways}")
        return problems

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeshPlan:
        rules = tuple((k, v) for k, v in data.get("rules", DEFAULT_RULES))
        return cls(**{axis: int(data.get(axis, 1)) for axis in MESH_AXES}, rules=rules)


def constrain(
    x: jax.Array, axes: Sequence[str | None], plan: MeshPlan | None, mesh: Mesh | None
) -> jax.Array:
    """Returns `x` with its sharding fixed by logical axes; unchanged on a mesh of one device."""
    if plan is None or mesh is None or plan.num_devices == 1:
        return x
    return jax.lax.with_sharding_constraint(x, plan.sharding(mesh, axes))


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh plan on its devices; what a model fixes the sharding of its activations with.

    The default is one device, where every call returns its argument.
    """

    plan: MeshPlan | None = None
    mesh: Mesh | None = None

    def __call__(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Returns `x` laid out by its logical axes."""
        return constrain(x, axes, self.plan, self.mesh)


ONE_DEVICE = Placement()
