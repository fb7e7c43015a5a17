"""Which checkpoints fit an engine that already runs, and how their parameters are read for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from polyjax.compiler.state import StateSpec, abstract_model
from polyjax.core.errors import ModelError
from polyjax.core.mesh import MeshPlan, Placement
from polyjax.engine.build import OpenedModel, open_served_model
from polyjax.engine.types import EngineConfig
from polyjax.io.digest import ParamsDigest
from polyjax.io.files import ModelFiles, Progress, open_model
from polyjax.io.load import check_tensors, packed_params, place_param, random_params

DeviceParams = tuple[jax.Array, ...]
HostParams = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Weights:
    """What an engine serves with, from `epoch` on. Random numbers have no path."""

    name: str
    path: str
    digest: str
    epoch: int

    @classmethod
    def of(cls, files: ModelFiles | None, digest: str, epoch: int) -> Weights:
        """Those of a checkpoint, or random ones."""
        if files is None:
            return cls("random weights", "", digest, epoch)
        return cls(files.name, str(files.path), digest, epoch)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class CheckpointReader:
    """Opens, checks and reads checkpoints for one engine, whose programs stay as they are.

    Nothing here traces or compiles, and every method may run in a thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: OpenedModel,
        spec: StateSpec,
        mesh_plan: MeshPlan,
        mesh: Mesh,
    ):
        self._config = config
        self._model = model
        self._spec = spec
        self._mesh = mesh
        self._mesh_plan = mesh_plan
        self._platform = mesh.devices.flat[0].platform
        self.first_files = None if config.load_format == "dummy" else model.files
        self._specs = abstract_model(spec, Placement(mesh_plan, mesh)).specs
        self._shardings = [mesh_plan.sharding(mesh, s.axes) for s in self._specs.values()]

    def first(self, digest: ParamsDigest) -> Weights:
        """What the engine starts with. Random weights are a function of the seed."""
        if self.first_files is None:
            return Weights.of(None, f"random-{self._config.seed}", epoch=0)
        return Weights.of(self.first_files, digest.hexdigest, epoch=0)

    def open(self, path: str, progress: Progress) -> ModelFiles:
        """Opens what `path` names: a directory, a GGUF file, a packaged model or a hub id.

        Raises ConfigError where it names nothing, ModelError listing everything in which its
        contents are not what the engine runs.
        """
        files = open_model(path, progress)
        if problems := [*self._config_problems(files), *self._tensor_problems(files)]:
            raise ModelError(str(files.path), problems)
        return files

    def read(self, files: ModelFiles, progress: Progress) -> tuple[HostParams, str]:
        """The parameters in host memory, in the layout the programs take, and their digest."""
        digest, params = ParamsDigest(), []
        for name, packed in self._packed(files, progress):
            digest.add(name, packed)
            params.append(packed)
        return tuple(params), digest.hexdigest

    def read_to_devices(
        self, files: ModelFiles | None, progress: Progress
    ) -> tuple[DeviceParams, str]:
        """The parameters on their devices, one on its way at a time, and their digest."""
        if files is None:
            return self._random()
        digest, params = ParamsDigest(), []
        for (name, packed), sharding in zip(
            self._packed(files, progress), self._shardings, strict=True
        ):
            digest.add(name, packed)
            params.append(jax.block_until_ready(place_param(packed, sharding)))
        return tuple(params), digest.hexdigest

    def place(self, params: HostParams, progress: Progress) -> DeviceParams:
        """Puts parameters from host memory on their devices, one on its way at a time."""
        placed: list[jax.Array] = []
        for array, sharding in zip(params, self._shardings, strict=True):
            progress("placing weights", len(placed), len(params))
            placed.append(jax.block_until_ready(place_param(array, sharding)))
        return tuple(placed)

    # -- inside ------------------------------------------------------------------------------

    def _packed(self, files: ModelFiles, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
        dtype = jnp.dtype(self._spec.dtype)
        for number, item in enumerate(packed_params(self._specs, files.tensors, dtype)):
            progress("loading weights", number, len(self._specs))
            yield item

    def _random(self) -> tuple[DeviceParams, str]:
        params = random_params(
            self._specs,
            seed=self._config.seed,
            dtype=self._spec.dtype,
            mesh=self._mesh,
            plan=self._mesh_plan,
        )
        return tuple(params.values()), f"random-{self._config.seed}"

    def _config_problems(self, files: ModelFiles) -> list[str]:
        """In what the programs, made for the engine's config, would compute another model."""
        try:
            other = open_served_model(self._config, files, self._platform)
        except ModelError as error:
            return list(error.problems)
        ours, theirs = self._model.config, other.config
        if type(ours) is not type(theirs):
            (mine,), (its,) = (
                opened.files.config["architectures"][:1] for opened in (self._model, other)
            )
            return [f"architecture: the engine runs {mine}, this is {its}"]
        # The dtype weights are stored in is no part of the programs, and the stop tokens compared
        # are those in force, which generation_config.json may name.
        problems = list(_differences("", _compared(ours), _compared(theirs)))
        problems += _differences("dtype", self._model.dtype, other.dtype)
        problems += _differences(
            "eos_token_id", sorted(self._model.eos_token_ids), sorted(other.eos_token_ids)
        )
        return problems

    def _tensor_problems(self, files: ModelFiles) -> list[str]:
        try:
            tensors = files.tensors
        except ModelError as error:
            return list(error.problems)
        problems = check_tensors(self._specs, tensors)
        problems += [
            f"{name} is stored as {tensors.dtype(name)}, weights are floating-point numbers"
            for name in tensors.names()
            if not jnp.issubdtype(tensors.dtype(name), jnp.floating)
        ]
        return problems


def _compared(config: Any) -> dict[str, Any]:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {k: v for k, v in fields.items() if k not in ("dtype", "eos_token_ids")}


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """A sentence for each number in which two configs differ.

    Floating-point numbers differ where they do in float32, which is what programs compute in and
    what some formats store.
    """
    if isinstance(ours, float) and isinstance(theirs, float):
        if np.float32(ours) != np.float32(theirs):
            yield f"{name}: the engine runs {ours}, this is {theirs}"
    elif dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        for field in dataclasses.fields(ours):
            yield from _differences(
                f"{name}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name)
            )
    elif isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key in ours:
            yield from _differences(f"{name}.{key}" if name else key, ours[key], theirs[key])
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{name}[{index}]", mine, its)
    elif ours != theirs:
        yield f"{name}: the engine runs {ours}, this is {theirs}"
