"""Runs a model over paged caches the way the engine does, in its simplest form.

Pages are scattered, every slot starts as NaN, and pages that a window has left behind become NaN
again: a model that reads a slot it does not own cannot pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from polyjax.core.mesh import ONE_DEVICE, MeshPlan, Placement
from polyjax.core.model import KVGroup, KVState, ModelConfig, StepBatch
from polyjax.core.op import Ops
from polyjax.core.ops import LM_HEAD
from polyjax.io.files import open_model
from polyjax.io.load import load_params

PAGE_SIZE = 8
PAGES_PER_ROW = 14  # 112 tokens, more than any golden has


@dataclasses.dataclass
class PagedModel:
    """A loaded model with pools for `rows` sequences. `lens` holds what each has in its cache.

    `only_last` gives each row's last logits alone, for vocabularies too large for all of them.
    `effort` is XLA's: 0 halves the time to compile tiny models and leaves what they compute alone.
    """

    config: ModelConfig
    params: tuple[jax.Array, ...]
    rows: int
    place: Placement = ONE_DEVICE
    pages_per_row: int = PAGES_PER_ROW
    only_last: bool = False
    effort: int = 0

    def __post_init__(self) -> None:
        dtype = "float32"
        self.abstract = models.abstract(self.config, dtype, self.place)
        self.groups = self.config.kv_groups()
        pages = 1 + self.rows * self.pages_per_row
        order = np.random.default_rng(7).permutation(np.arange(1, pages))
        self.pages = order.reshape(self.rows, self.pages_per_row)
        shapes = {i: (pages, *g.page_shape(PAGE_SIZE)) for g in self.groups for i in g.layers}
        self._pools = [(shapes[i], self._group(i).axes) for i in sorted(shapes)]
        self._step = jax.jit(
            self._forward,
            donate_argnums=(2,),
            compiler_options={"xla_backend_optimization_level": self.effort},
        )
        self.forget()

    def forget(self) -> None:
        """Empties every cache."""
        self.lens = [0] * self.rows
        self._left: set[tuple[str, int]] = set()  # (group, page) that a window has left behind
        self.kv: KVState = tuple(
            self._placed(np.full(shape, np.nan, np.float32), axes) for shape, axes in self._pools
        )

    def _group(self, layer: int) -> KVGroup:
        return next(group for group in self.groups if layer in group.layers)

    def _placed(self, array: np.ndarray, axes: Sequence[str | None]) -> jax.Array:
        if self.place.plan is None or self.place.mesh is None:
            return jnp.asarray(array)
        return jax.device_put(array, self.place.plan.sharding(self.place.mesh, axes))

    def _forward(
        self, params: tuple[jax.Array, ...], batch: StepBatch, kv: KVState
    ) -> tuple[jax.Array, KVState]:
        ops = Ops({}, {})
        model = self.abstract.merge(params)
        x, kv = model(ops, batch, kv)
        norm, head, static = model.head()
        if self.only_last:
            last = jnp.maximum(batch.query_lens - 1, 0)[:, None, None]
            x = jnp.take_along_axis(x, last, axis=1)
        logits = ops(LM_HEAD, x.reshape(-1, x.shape[-1]), norm, head, **static)
        return logits.reshape(*x.shape[:2], -1), kv

    def step(self, new: Sequence[Sequence[int]], tokens: int) -> list[np.ndarray]:
        """Feeds each row's new tokens, padded to `tokens`; returns each row's logits [len, V]."""
        padded = np.zeros((self.rows, tokens), np.int32)
        for row, ids in enumerate(new):
            padded[row, : len(ids)] = ids
        starts, counts = np.asarray(self.lens), np.asarray([len(ids) for ids in new])
        tables, firsts = zip(*(self._table(g, starts) for g in self.groups), strict=True)
        batch = StepBatch(
            tokens=jnp.asarray(padded),
            query_lens=jnp.asarray(counts, jnp.int32),
            context_lens=jnp.asarray(np.where(counts > 0, starts + counts, 0), jnp.int32),
            page_tables=tuple(map(jnp.asarray, tables)),
            first_pages=tuple(map(jnp.asarray, firsts)),
        )
        logits, self.kv = self._step(self.params, batch, self.kv)
        self.lens = [int(n) for n in starts + counts]
        host = np.asarray(logits)
        return [host[row, : len(ids)] for row, ids in enumerate(new)]

    def _table(self, group: KVGroup, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The group's page table and first pages; pages before a window are not in it."""
        firsts = (
            np.maximum(starts - group.window + 1, 0) // PAGE_SIZE if group.window else 0 * starts
        )
        table = np.zeros((self.rows, self.pages_per_row), np.int32)
        for row, first in enumerate(firsts):
            left = self.pages[row, first:]
            table[row, : len(left)] = left
            self._poison(group, self.pages[row, :first])
        return table, firsts.astype(np.int32)

    def _poison(self, group: KVGroup, left: np.ndarray) -> None:
        pages = [page for page in left.tolist() if (group.name, page) not in self._left]
        self._left.update((group.name, page) for page in pages)
        if pages:
            pools = list(self.kv)
            for layer in group.layers:
                pool = np.array(pools[layer])  # on the host: nothing to compile
                pool[pages] = np.nan
                pools[layer] = self._placed(pool, group.axes)
            self.kv = tuple(pools)

    def compiled(self, tokens: int) -> jax.stages.Compiled:
        """The program of a step of `tokens` new tokens a row."""
        ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        rows = (ints(self.rows),) * len(self.groups)
        tables = (ints(self.rows, self.pages_per_row),) * len(self.groups)
        batch = StepBatch(ints(self.rows, tokens), ints(self.rows), ints(self.rows), tables, rows)
        return self._step.lower(self.params, batch, self.kv).compile()

    def feed(self, rows: Sequence[Sequence[int]], chunk: int) -> list[np.ndarray]:
        """Feeds whole sequences in chunks; returns each row's logits [len, V]."""
        done: list[list[np.ndarray]] = [[] for _ in rows]
        for start in range(0, max(map(len, rows)), chunk):
            pieces = [list(ids[start : start + chunk]) for ids in rows]
            for parts, logits in zip(done, self.step(pieces, chunk), strict=True):
                parts.append(logits)
        return [np.concatenate(parts) for parts in done]

    def greedy(self, first: Sequence[int], count: int, width: int = 1) -> list[list[int]]:
        """Decodes `count` tokens a row, the first of which are given; all rows in one batch.

        `width` is the new tokens the program has room for; one of them is used.
        """
        tokens = [[token] for token in first]
        for _ in range(count - 1):
            logits = self.step([row[-1:] for row in tokens], width)
            for row, scores in zip(tokens, logits, strict=True):
                row.append(int(scores[-1].argmax()))
        return tokens


def load(path: Any, rows: int, plan: MeshPlan | None = None, **more: Any) -> PagedModel:
    """Opens a model in float32, over a mesh plan's devices; `more` are fields of PagedModel."""
    files = open_model(path)
    config = models.family(files.config["architectures"][0]).Config.from_hf(files.config)
    plan = plan or MeshPlan()
    mesh = plan.mesh()
    place = ONE_DEVICE if plan.num_devices == 1 else Placement(plan, mesh)
    specs = models.abstract(config, "float32", place).specs
    params = load_params(specs, files.tensors, dtype="float32", mesh=mesh, plan=plan)
    return PagedModel(config, tuple(params.values()), rows, place, **more)
