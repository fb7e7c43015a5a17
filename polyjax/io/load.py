"""Fills a model's parameters from a checkpoint, or with random numbers. The only jax user in io.

All names and shapes are compared first; nothing is allocated while a single one is wrong. Then each
parameter is read, packed, cast and put on its devices, with a few in flight, so that the host never
holds more than a few parameters.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from polyjax.core.errors import ModelError
from polyjax.core.mesh import MeshPlan
from polyjax.core.model import ParamSpec
from polyjax.io.digest import ParamsDigest
from polyjax.io.files import Progress, TensorReader, no_progress

# Tensors some checkpoints carry beside the weights; no model reads them.
HARMLESS = (
    r".*\.rotary_emb\.inv_freq",
    r"lm_head\.weight",  # stored although tied to the embedding; an untied model does use it
)
_READERS = 2  # one reads while another packs; more only costs host memory
_INIT_STD = 0.02  # the initializer_range of nearly every config.json


def check_tensors(
    specs: Mapping[str, ParamSpec], tensors: TensorReader, ignored: Sequence[str] = HARMLESS
) -> list[str]:
    """Returns a problem for every tensor that is missing, misshapen or not part of the model.

    `ignored` holds regular expressions of full names that may be there unused.
    """
    problems: list[str] = []
    stored = set(tensors.names())
    wanted: set[str] = set()
    for spec in specs.values():
        for source in spec.sources:
            if source.name in wanted:
                continue
            wanted.add(source.name)
            if source.name not in stored:
                problems.append(f"{source.name} is missing, wanted shape {list(source.shape)}")
            elif (shape := tuple(tensors.shape(source.name))) != tuple(source.shape):
                problems.append(
                    f"{source.name} has shape {list(shape)}, the config says {list(source.shape)}"
                )
    harmless = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    problems += [
        f"{name} has no place in this model"
        for name in sorted(stored - wanted)
        if not harmless.fullmatch(name)
    ]
    return problems


def load_params(
    specs: Mapping[str, ParamSpec],
    tensors: TensorReader,
    *,
    dtype: jnp.dtype | str,
    mesh: Mesh,
    plan: MeshPlan,
    where: str = "checkpoint",
    ignored: Sequence[str] = HARMLESS,
    progress: Progress = no_progress,
    digest: ParamsDigest | None = None,
) -> dict[str, jax.Array]:
    """Returns the parameters by name, in the order of `specs`, sharded as `plan` says.

    Parameters whose spec names no dtype get `dtype`. `digest` takes in each. Raises ModelError
    naming `where` and every wrong tensor before anything is allocated, and ModelError for a file
    that fails while read.
    """
    problems = [*_divisibility(specs, plan), *check_tensors(specs, tensors, ignored)]
    if problems:
        raise ModelError(where, problems)
    params: dict[str, jax.Array] = {}
    for name, packed in packed_params(specs, tensors, jnp.dtype(dtype)):
        if digest is not None:
            digest.add(name, packed)
        params[name] = place_param(packed, plan.sharding(mesh, specs[name].axes))
        progress("loading weights", len(params), len(specs))
    return params


def random_params(
    specs: Mapping[str, ParamSpec],
    *,
    seed: int,
    dtype: jnp.dtype | str,
    mesh: Mesh,
    plan: MeshPlan,
) -> dict[str, jax.Array]:
    """Returns random parameters made on their devices: the same for a seed, whatever the mesh.

    Raises ModelError where the mesh does not divide an axis.
    """
    problems = _divisibility(specs, plan)
    if problems:
        raise ModelError("random weights", problems)
    params: dict[str, jax.Array] = {}
    key = jax.random.key(seed)
    for i, (name, spec) in enumerate(specs.items()):
        resolved = jnp.dtype(spec.dtype or dtype)
        fill = _filler(tuple(spec.shape), resolved, spec.init, plan.sharding(mesh, spec.axes))
        params[name] = fill(jax.random.fold_in(key, i))
    return params


@functools.cache  # layers repeat their shapes: one compile for each, not one a parameter
def _filler(
    shape: tuple[int, ...], dtype: jnp.dtype, init: str, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    def fill(key: jax.Array) -> jax.Array:
        if init == "ones":
            return jnp.ones(shape, dtype)
        if init == "zeros":
            return jnp.zeros(shape, dtype)
        return (_INIT_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(fill, out_shardings=sharding)


def _divisibility(specs: Mapping[str, ParamSpec], plan: MeshPlan) -> list[str]:
    return [
        f"{name}: {problem}"
        for name, spec in specs.items()
        for problem in plan.divides(spec.axes, spec.shape)
    ]


def packed_params(
    specs: Mapping[str, ParamSpec], tensors: TensorReader, dtype: jnp.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array in its final dtype) in order, reading ahead by `_READERS` parameters.

    The tensors have passed `check_tensors`. Raises ModelError for a file that fails while read.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:
        ahead: collections.deque[tuple[str, Future[np.ndarray]]] = collections.deque()
        waiting = iter(specs.items())
        while True:
            while len(ahead) < _READERS and (item := next(waiting, None)):
                name, spec = item
                ahead.append((name, pool.submit(_pack, name, spec, tensors, dtype)))
            if not ahead:
                return
            name, future = ahead.popleft()
            yield name, future.result()


def _pack(name: str, spec: ParamSpec, tensors: TensorReader, dtype: jnp.dtype) -> np.ndarray:
    packed = spec.pack([tensors.read(source.name) for source in spec.sources])
    if packed.shape != tuple(spec.shape):  # a fault of the model family, not of the checkpoint
        raise AssertionError(f"{name}: packed into {packed.shape}, declared {spec.shape}")
    return np.ascontiguousarray(packed, dtype=jnp.dtype(spec.dtype or dtype))


def place_param(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts each device's shard, and only it, on that device."""
    if len(sharding.device_set) == 1:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
