"""One op called over and over inside one executable, each call depending on the one before.

Launches are then captured together and nothing runs side by side that a step would run in
sequence. The largest argument comes in several copies, which together exceed the caches. Copies
are equal, so the last call's results are those of a single one and can be judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.timing import MAX_LINKS

TINY = 1e-30  # makes a call depend on the one before without changing a 16-bit value


@dataclasses.dataclass(frozen=True)
class ChainSpec:
    """How calls follow each other; argument numbers are the op's.

    `varied` comes in `links` copies. `nudged` takes an addend from the result before, too small to
    change it. `carried` are pools written in place: (result leaf, argument, layer or -1).
    """

    links: int
    varied: int
    nudged: int | None
    carried: tuple[tuple[int, int, int], ...]


def plan_chain(args: Sequence[Any], results: Sequence[Any], cold_bytes: int) -> ChainSpec:
    """Returns how to chain an op with these argument and flat result avals.

    A result with shape and dtype of a pool argument is that pool, written in place.
    """
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(a)) for a in args]
    pool_of = {
        (index, layer): leaf for index, arg in enumerate(args) for layer, leaf in _pools(arg)
    }
    carried = []
    for leaf, result in enumerate(results):
        for place, pool in pool_of.items():
            if (pool.shape, pool.dtype) == (result.shape, result.dtype):
                carried.append((leaf, *place))
                del pool_of[place]
                break
    pools = {index for _, index, _ in carried}
    free = [i for i, a in enumerate(args) if a is not None and i not in pools]
    varied = max(free, key=sizes.__getitem__)
    links = max(2, min(MAX_LINKS, -(-cold_bytes // max(sizes[varied], 1))))
    single = [i for i in free if i != varied and hasattr(args[i], "dtype")]
    nudged = min(single, key=sizes.__getitem__) if single and not carried else None
    return ChainSpec(links, varied, nudged, tuple(carried))


def _pools(arg: Any) -> list[tuple[int, Any]]:
    """The pools among an argument's arrays, with their layers; no other array has five axes."""
    leaves = list(enumerate(arg)) if isinstance(arg, tuple) else [(-1, arg)]
    return [(layer, leaf) for layer, leaf in leaves if len(getattr(leaf, "shape", ())) == 5]


def _with_layer(argument: Any, layer: int, pool: Any) -> Any:
    return pool if layer < 0 else (*argument[:layer], pool, *argument[layer + 1 :])


def chained(call: Callable[..., Any], spec: ChainSpec) -> Callable[..., Any]:
    """Returns f(copies, *arguments) with the results of the last call of the chain."""
    one = jax.jit(call)  # one trace and one lowering for all links

    def chain(copies: Sequence[Any], *arguments: Any) -> Any:
        values = list(arguments)
        results: Any = None
        for copy in copies:
            values[spec.varied] = copy
            results = one(*values)
            leaves = jax.tree.leaves(results)
            for leaf, argument, layer in spec.carried:
                values[argument] = _with_layer(values[argument], layer, leaves[leaf])
            if spec.nudged is not None:
                value = values[spec.nudged]
                nudge = leaves[0].reshape(-1)[:1].astype(jnp.float32) * TINY
                nudge = nudge.reshape((1,) * value.ndim).astype(value.dtype)
                values[spec.nudged] = jax.lax.optimization_barrier(value + nudge)
        return results

    return chain


def chain_arguments(args: Sequence[Any], spec: ChainSpec) -> tuple[Any, ...]:
    """Returns a chain's arguments on the device: distinct copies of one, then all of them."""
    device = [None if a is None else jax.tree.map(jnp.asarray, a) for a in args]
    copies = [
        jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), device[spec.varied])
        for _ in range(spec.links)
    ]
    return (copies, *device)
