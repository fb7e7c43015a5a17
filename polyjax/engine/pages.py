"""The pages of the KV cache: who owns which, and which hold a prefix that can be used again.

Every KV group has a pool of its own; one allocator serves them all, so that a sequence gets its
pages of every group or of none. A page's number in a pool is the same for all layers of the group.
Page 0 is where inactive rows write, the last `scratch_pages` belong to shadow steps; the allocator
hands out neither.

Prefix cache: a page that is full is named by a digest of all tokens up to its end. Digests are
cryptographic, so equal digests mean equal prefixes, also between tenants who choose their prompts.
Only full pages are shared, and nobody writes to a full page: there is no copy on write. A full page
that nobody owns any more keeps its content until the pool needs it, the one unused longest first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from polyjax.core.errors import ConfigError
from polyjax.core.kv import KVGroup

SINK_PAGE = 0
NO_LIMIT = 2**31 - 1
_DIGEST_BYTES = 32


class PagePool:
    """The pages of one KV group. A page is owned (count > 0), free, or idle: unowned but cached."""

    __slots__ = ("_digests", "_free", "_idle", "_owners", "_pages", "num_usable", "window")

    def __init__(self, num_pages: int, scratch_pages: int, window: int):
        last = num_pages - scratch_pages
        self.window = window
        self.num_usable = max(last - 1, 0)
        self._free = list(range(last - 1, SINK_PAGE, -1))  # a stack: the lowest is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_owned(self) -> int:
        return self.num_usable - self.num_available

    def owners(self, page: int) -> int:
        return self._owners[page]

    def find(self, digest: bytes) -> int | None:
        """The page that holds the prefix with this digest."""
        return self._pages.get(digest)

    def take(self) -> int:
        """A page for one owner, evicting the cached prefix unused longest if none is free.

        The caller has checked `num_available`."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner to a cached page."""
        if not self._owners[page]:
            del self._idle[page]
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Takes one owner away; without owners a cached page stays found until evicted."""
        owners = self._owners[page] - 1
        if owners < 0:
            raise AssertionError(f"page {page} released by someone who does not own it")
        self._owners[page] = owners
        if owners:
            return
        if self._digests[page] is None:
            self._free.append(page)
        else:
            self._idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Makes an owned full page findable, unless another page has that content already."""
        if digest not in self._pages and self._digests[page] is None:
            self._pages[digest] = page
            self._digests[page] = digest

    def forget_all(self) -> None:
        """Empties the prefix cache; owned pages stay owned."""
        for page in self._pages.values():
            self._digests[page] = None
        self._pages.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, page: int) -> None:
        digest = self._digests[page]
        assert digest is not None
        self._digests[page] = None
        del self._pages[digest]


class SequencePages:
    """The pages of one sequence, per KV group in order of position.

    `tables[g][i]` holds the tokens of logical page `first[g] + i`. Pages reach up to position
    `end_tokens` (exclusive). `synced[g]` counts the leading entries of `tables[g]` that the host's
    page table already shows; whoever mirrors the table advances it.
    """

    __slots__ = ("digests", "end_tokens", "first", "num_registered", "synced", "tables")

    def __init__(self, num_groups: int):
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first = [0] * num_groups
        self.synced = [0] * num_groups
        self.end_tokens = 0
        self.digests: list[bytes] = []  # of the full pages, as far as anyone asked
        self.num_registered = 0  # leading full pages offered to the prefix cache


class PageAllocator:
    """All KV pools of an engine.

    `num_pages` counts the pages of each group's pool, sink and scratch included. Raises ConfigError
    for a pool without a usable page.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        page_size: int,
        num_pages: Sequence[int],
        scratch_pages: int = 0,
        enable_prefix_caching: bool = True,
    ):
        self.groups = tuple(groups)
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pools = tuple(
            PagePool(pages, scratch_pages, group.window)
            for group, pages in zip(self.groups, num_pages, strict=True)
        )
        self.has_full_group = any(pool.window == 0 for pool in self.pools)
        for group, pool in zip(self.groups, self.pools, strict=True):
            if pool.num_usable < 1:
                raise ConfigError(
                    f"KV group {group.name!r} has no usable page: raise --num_kv_pages or "
                    "--gpu_memory_utilization"
                )

    # -- capacity ----------------------------------------------------------------------------

    @property
    def capacity_tokens(self) -> int:
        """Longest context of one sequence that is alone; NO_LIMIT if windows slide."""
        return min(
            NO_LIMIT if self._slides(pool) else pool.num_usable * self.page_size
            for pool in self.pools
        )

    @property
    def max_chunk_tokens(self) -> int:
        """Most new tokens that sliding windows leave room for in one step, sequence alone."""
        return min(
            self._spare_tokens(pool) if self._slides(pool) else NO_LIMIT for pool in self.pools
        )

    @property
    def usage(self) -> float:
        """Owned share of the fullest pool, 0 to 1."""
        return max((pool.num_owned / pool.num_usable for pool in self.pools), default=0.0)

    def columns(self, start: int, end: int) -> int:
        """Page table columns that a step over positions [start, end) reads, widest group."""
        last = -(-end // self.page_size)
        if self.has_full_group:
            return last
        return max(last - self._first_page(pool, start) for pool in self.pools)

    # -- life of a sequence's pages ----------------------------------------------------------

    def new_pages(self) -> SequencePages:
        return SequencePages(len(self.pools))

    def match(self, pages: SequencePages, token_ids: list[int], salt: str) -> int:
        """Number of leading pages whose KV is cached; at least one token is left to compute."""
        if not self.enable_prefix_caching:
            return 0
        limit = (len(token_ids) - 1) // self.page_size
        self._extend_digests(pages, token_ids, salt, limit)
        digests = pages.digests
        for pool in self.pools:
            if not pool.window:
                hit = 0
                while hit < limit and pool.find(digests[hit]) is not None:
                    hit += 1
                limit = hit
        while limit and not all(self._window_cached(pool, digests, limit) for pool in self.pools):
            limit -= 1
        return limit

    def admit(
        self, pages: SequencePages, hit_pages: int, end: int, reserve_end: int, watermark: float
    ) -> bool:
        """Gives a sequence without pages the cached ones and new ones; all or nothing.

        Windowed groups get pages up to position `end`, the others up to `reserve_end`. Refuses if
        less than the share `watermark` of a pool's pages would be left.
        """
        start = hit_pages * self.page_size
        plans = []
        for pool in self.pools:
            first = self._first_page(pool, start)
            hits = [self._cached_page(pool, pages.digests[i]) for i in range(first, hit_pages)]
            last = -(-(end if pool.window else reserve_end) // self.page_size)
            idle_hits = sum(not pool.owners(page) for page in hits)
            left = pool.num_available - idle_hits - (last - hit_pages)
            if left < watermark * pool.num_usable:
                return False
            plans.append((first, hits, last))
        for group, (pool, (first, hits, last)) in enumerate(zip(self.pools, plans, strict=True)):
            for page in hits:
                pool.share(page)
            hits.extend([pool.take() for _ in range(last - hit_pages)])
            pages.tables[group] = hits
            pages.first[group] = first
            pages.synced[group] = 0
        pages.num_registered = hit_pages
        pages.end_tokens = self.page_size * min(last for _, _, last in plans)
        return True

    def extend(self, pages: SequencePages, start: int, end: int) -> bool:
        """Makes room for positions [start, end), in every group or in none.

        Pages wholly before the window of position `start` are given back in either case.
        """
        last = -(-end // self.page_size)
        needs = []
        for group, pool in enumerate(self.pools):
            if pool.window:
                self._slide(pages, group, pool, self._first_page(pool, start))
            needs.append(last - pages.first[group] - len(pages.tables[group]))
        for pool, need in zip(self.pools, needs, strict=True):
            if need > pool.num_available:
                return False
        for pool, table, need in zip(self.pools, pages.tables, needs, strict=True):
            for _ in range(need):
                table.append(pool.take())
        pages.end_tokens = max(pages.end_tokens, last * self.page_size)
        return True

    def register(
        self, pages: SequencePages, token_ids: list[int], computed: int, salt: str
    ) -> None:
        """Offers the full pages among the first `computed` tokens, all known, to later requests."""
        full = computed // self.page_size
        if not self.enable_prefix_caching or full <= pages.num_registered:
            return
        self._extend_digests(pages, token_ids, salt, full)
        for pool, table, first in zip(self.pools, pages.tables, pages.first, strict=True):
            for index in range(max(pages.num_registered, first), full):
                pool.register(table[index - first], pages.digests[index])
        pages.num_registered = full

    def release(self, pages: SequencePages) -> None:
        """Gives all pages back. Of a cached prefix the end is evicted before the beginning."""
        for group, (pool, table) in enumerate(zip(self.pools, pages.tables, strict=True)):
            for page in reversed(table):
                pool.release(page)
            pages.tables[group] = []
            pages.first[group] = 0
            pages.synced[group] = 0
        pages.num_registered = 0
        pages.end_tokens = 0

    def forget_all(self) -> None:
        """Empties the prefix cache: the pools were rebuilt and their content is lost."""
        for pool in self.pools:
            pool.forget_all()

    # -- inside ------------------------------------------------------------------------------

    def _spare_tokens(self, pool: PagePool) -> int:
        """New tokens that fit beside a window, wherever page boundaries fall."""
        return (pool.num_usable - 2) * self.page_size - pool.window + 3

    def _slides(self, pool: PagePool) -> bool:
        """Whether a context longer than the pool can pass through it, a page of tokens a step."""
        return pool.window > 0 and self._spare_tokens(pool) >= self.page_size

    def _first_page(self, pool: PagePool, start: int) -> int:
        """First logical page that a token at position `start` sees."""
        return max(0, start - pool.window + 1) // self.page_size if pool.window else 0

    def _slide(self, pages: SequencePages, group: int, pool: PagePool, first: int) -> None:
        drop = min(first - pages.first[group], len(pages.tables[group]))
        if drop <= 0:
            return
        for page in reversed(pages.tables[group][:drop]):
            pool.release(page)
        del pages.tables[group][:drop]
        pages.first[group] += drop
        pages.synced[group] = 0

    def _extend_digests(
        self, pages: SequencePages, token_ids: list[int], salt: str, count: int
    ) -> None:
        digests, size = pages.digests, self.page_size
        while len(digests) < count:
            index = len(digests)
            parent = digests[-1] if digests else hashlib.blake2b(salt.encode()).digest()
            tokens = array("i", token_ids[index * size : (index + 1) * size]).tobytes()
            digests.append(hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest())

    def _window_cached(self, pool: PagePool, digests: list[bytes], hit: int) -> bool:
        """Whether the pages that the token after `hit` pages sees are cached."""
        first = self._first_page(pool, hit * self.page_size)
        return not pool.window or all(
            pool.find(digest) is not None for digest in digests[first:hit]
        )

    def _cached_page(self, pool: PagePool, digest: bytes) -> int:
        page = pool.find(digest)
        assert page is not None, "match() found it"
        return page
