"""Hostile page tables: who owns which slot of a paged pool, at every edge there is."""

from __future__ import annotations

import dataclasses

import numpy as np

LAYOUTS = (
    "page_edges",
    "one_token",
    "full_pool",
    "shared_prefix",
    "inactive_rows",
    "random_lengths",
)


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """B rows of T new tokens over a pool of `num_pages` pages of Z slots; page 0 is the sink.

    page_table [B,C], context_lens, query_lens, first_pages [B] int32 as in `paged_attention`.
    owned [P,Z] bool: the slots that hold a token of some row, the new ones included. new_slots
    [B,T] flat slots of the new tokens, 0 where a row has none.
    """

    page_table: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    first_pages: np.ndarray
    owned: np.ndarray
    new_slots: np.ndarray

    @property
    def num_pages(self) -> int:
        return self.owned.shape[0]

    def earlier(self) -> np.ndarray:
        """[P,Z] bool: the slots that hold a token before this step's are written."""
        before = self.owned.copy()
        before.reshape(-1)[self.new_slots[self.new_slots > 0]] = False
        return before


def paged_rows(
    rng: np.random.Generator,
    layout: str,
    batch: int,
    tokens: int,
    columns: int,
    page: int,
    window: int = 0,
    spare: int = 0,
) -> PagedRows:
    """Returns rows of one of LAYOUTS for axes B, T, C, Z. Pages are dealt in random order.

    The pool has one page for each entry of the page table, the sink and `spare` more.
    """
    capacity = columns * page
    local = _lengths(rng, layout, batch, capacity, page)
    queries = np.minimum(rng.integers(1, tokens + 1, batch), local)
    if layout == "shared_prefix":  # at least one whole page comes before the new tokens
        queries = np.minimum(queries, np.maximum(local - page, 1))
    if layout == "inactive_rows":
        idle = rng.permutation(batch)[: max(1, batch // 2)]
        local[idle] = queries[idle] = 0
    shared = _shared_pages(layout, local, queries, page)
    needed = -(-local // page)
    total = 1 + batch * columns + spare
    table = _deal_pages(rng, total, needed, columns, shared)
    first = np.zeros(batch, np.int64)
    if window:  # pages wholly before the window are gone already
        can_shift = (local > 0) & (local - queries - window + 1 >= 0)
        first = np.where(can_shift, rng.integers(0, 5, batch), 0)
    owned = np.zeros((total, page), bool)
    new_slots = np.zeros((batch, tokens), np.int64)
    for row in range(batch):
        positions = np.arange(local[row])
        owned[table[row, positions // page], positions % page] = True
        new = np.arange(local[row] - queries[row], local[row])
        new_slots[row, : len(new)] = table[row, new // page] * page + new % page
    ints = lambda a: a.astype(np.int32)  # noqa: E731
    return PagedRows(
        ints(table), ints(first * page + local), ints(queries), ints(first), owned, ints(new_slots)
    )


def _lengths(
    rng: np.random.Generator, layout: str, batch: int, capacity: int, page: int
) -> np.ndarray:
    """Tokens of each row that its pages hold."""
    if layout == "one_token":
        return np.ones(batch, np.int64)
    if layout == "full_pool":
        return np.full(batch, capacity)
    if layout in ("page_edges", "inactive_rows"):
        whole = rng.integers(1, capacity // page + 1, batch) * page
        lengths = np.clip(whole + np.resize([0, 1, -1], batch), 1, capacity)
        lengths[0] = whole[0]
        return lengths
    least = min(page + 1, capacity) if layout == "shared_prefix" else 1
    return rng.integers(least, capacity + 1, batch)


def _shared_pages(layout: str, local: np.ndarray, queries: np.ndarray, page: int) -> int:
    """How many leading pages all rows share; new tokens never lie in a shared page."""
    if layout != "shared_prefix":
        return 0
    return int(np.min((local - queries) // page, initial=1 << 30))


def _deal_pages(
    rng: np.random.Generator, total: int, needed: np.ndarray, columns: int, shared: int
) -> np.ndarray:
    """Returns the page table [B,C].

    Entries past a row's pages name pages that belong to someone else or to nobody: a kernel that
    reads them reads poison. The last page of the pool is always somebody's, and the last page of
    row 0 unless rows share it.
    """
    free = [*rng.permutation(np.arange(1, total - 1)), total - 1]
    prefix = [free.pop() for _ in range(shared)]
    table = rng.integers(0, total, (len(needed), columns))
    for row, count in enumerate(needed):
        own = [free.pop() for _ in range(max(int(count) - shared, 0))][::-1]
        table[row, : int(count)] = [*prefix, *own][: int(count)]
    return table
