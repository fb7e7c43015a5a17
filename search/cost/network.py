"""The learned part: an ensemble of small networks on the log of measured over analytical time.

Trained to rank: of two schedules of one workload the faster must get the smaller time (pairwise
logistic loss, as RankNet: Burges et al. 2005), pairs near the best counting most; a Huber term
keeps the level. Members differ in their initial values and in the rows drawn for them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

MEMBERS = 4
HIDDEN = 32
STEPS = 600
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 3e-2
PAIRS = 128  # of one training step and member
TEMPERATURE = 0.05  # relative difference at which a pair counts as decided
NOISE = 0.005  # relative difference of two schedules that measurement does not tell apart
NEAR_BEST = 0.3  # relative distance from the workload's best at which a pair's weight is 1/e
HUBER_DELTA = 0.1


class Residual(nnx.Module):
    """`MEMBERS` two-layer networks at once: x [E, n, features] -> log ratio [E, n].

    Starts at zero, so that an untrained model is the analytical one.
    """

    def __init__(self, features: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.inner = nnx.Param(init(rngs.params(), (MEMBERS, features, HIDDEN)))
        self.inner_bias = nnx.Param(jnp.zeros((MEMBERS, 1, HIDDEN)))
        self.middle = nnx.Param(init(rngs.params(), (MEMBERS, HIDDEN, HIDDEN)))
        self.middle_bias = nnx.Param(jnp.zeros((MEMBERS, 1, HIDDEN)))
        self.outer = nnx.Param(jnp.zeros((MEMBERS, HIDDEN, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ self.inner[...] + self.inner_bias[...])
        h = jnp.tanh(h @ self.middle[...] + self.middle_bias[...])
        return (h @ self.outer[...])[..., 0]


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Measured points: standardised features [n, features], log of analytical and measured us [n],
    and of each row's workload: index of its first row, number of rows, log of its best us. Rows of
    one workload lie together.
    """

    x: np.ndarray
    base: np.ndarray
    measured: np.ndarray
    first: np.ndarray
    count: np.ndarray
    best: np.ndarray

    @classmethod
    def of(
        cls, x: np.ndarray, base: np.ndarray, measured: np.ndarray, groups: np.ndarray
    ) -> TrainingRows:
        """Sorts rows by `groups` [n], the number of each row's workload."""
        order = np.argsort(groups, kind="stable")
        _, first, inverse, count = np.unique(
            groups[order], return_index=True, return_inverse=True, return_counts=True
        )
        y = measured[order]
        best = np.minimum.reduceat(y, first)
        return cls(x[order], base[order], y, first[inverse], count[inverse], best[inverse])


def train(rows: TrainingRows, seed: int) -> nnx.State:
    """Returns the trained parameters; the same rows and seed give the same bits on one host."""
    graph, params = nnx.split(Residual(rows.x.shape[1], nnx.Rngs(seed)))
    # Compiled for a power of two of rows; padding is never drawn.
    size = max(256, 1 << (len(rows.x) - 1).bit_length())
    padded = lambda a: np.pad(a, ((0, size - len(a)), *[(0, 0)] * (a.ndim - 1)))  # noqa: E731
    arrays = tuple(padded(a) for a in (rows.x, rows.base, rows.measured, rows.best))
    return _fit(graph, params, arrays, *_draw(rows, seed))


def _draw(rows: TrainingRows, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of rows of one workload for every step [steps, members, 2, pairs], and which
    of them both rows are a member's own [steps, members, pairs].

    Every member sees its own two thirds of the rows, drawn once (bagging without repeats).
    """
    rng, shape = np.random.default_rng(seed), (STEPS, MEMBERS, PAIRS)
    left = rng.integers(0, len(rows.x), shape)
    right = rows.first[left] + (rng.random(shape) * rows.count[left]).astype(int)
    owned = rng.random((MEMBERS, len(rows.x))) < 2 / 3
    member = np.arange(MEMBERS)[:, None]
    return np.stack([left, right], 2).astype(np.int32), owned[member, left] & owned[member, right]


@functools.partial(jax.jit, static_argnums=0)
def _fit(
    graph: nnx.GraphDef,
    params: nnx.State,
    arrays: tuple[jax.Array, ...],
    pairs: jax.Array,
    owned: jax.Array,
) -> nnx.State:
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, STEPS)
    optimizer = optax.adamw(schedule, weight_decay=WEIGHT_DECAY)

    def advance(carry: tuple, drawn: tuple) -> tuple:
        params, state = carry
        grads = jax.grad(lambda p: _loss(nnx.merge(graph, p), arrays, *drawn))(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(advance, (params, optimizer.init(params)), (pairs, owned))
    return params


def _loss(
    model: Residual, arrays: tuple[jax.Array, ...], pairs: jax.Array, owned: jax.Array
) -> jax.Array:
    """Of pairs [members, 2, pairs]; the mean of a member, times the members: they are apart."""
    x, base, measured, best = arrays
    both = pairs.reshape(MEMBERS, -1)
    predicted = (base[both] + model(x[both])).reshape(pairs.shape)
    truth = measured[pairs]
    difference = truth[:, 0] - truth[:, 1]
    near = truth.min(1) - best[pairs[:, 0]]
    weight = owned * (jnp.abs(difference) > NOISE) * (0.1 + jnp.exp(-near / NEAR_BEST))
    lead = jnp.sign(difference) * (predicted[:, 0] - predicted[:, 1])
    rank = TEMPERATURE * jnp.sum(weight * jax.nn.softplus(-lead / TEMPERATURE))
    off = optax.huber_loss(predicted[:, 0], truth[:, 0], delta=HUBER_DELTA) / HUBER_DELTA
    level = jnp.sum(owned * off) / jnp.maximum(jnp.sum(owned), 1.0)
    return MEMBERS * (rank / jnp.maximum(jnp.sum(weight), 1.0) + 0.5 * level)


def predict(params: nnx.State, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation over the members of the log ratio, each [n]."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Residual(x.shape[1], nnx.Rngs(0))))
    padded = np.pad(x, ((0, -len(x) % 256), (0, 0)))
    every = np.asarray(_forward(graph, params, jnp.asarray(padded)))[:, : len(x)]
    return every.mean(0).astype(float), every.std(0).astype(float)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: nnx.GraphDef, params: nnx.State, x: jax.Array) -> jax.Array:
    return nnx.merge(graph, params)(jnp.broadcast_to(x, (MEMBERS, *x.shape)))
