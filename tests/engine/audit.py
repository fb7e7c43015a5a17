"""Checks a page allocator's books against the sequences that are alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from polyjax.engine.pages import SINK_PAGE, PageAllocator, SequencePages


def audit(allocator: PageAllocator, alive: Iterable[SequencePages]) -> None:
    """Every page is owned, idle or free, never two of them; counts are those of the tables."""
    alive = list(alive)
    for group, pool in enumerate(allocator.pools):
        owned = Counter(page for pages in alive for page in pages.tables[group])
        free, idle = list(pool._free), list(pool._idle)
        usable = set(range(1, pool.num_usable + 1))
        assert SINK_PAGE not in usable
        assert len(free) == len(set(free))
        assert len(free) + len(idle) + len(owned) == pool.num_usable, "a page is lost or doubled"
        assert set(free) | set(idle) | set(owned) == usable
        for page in usable:
            assert pool.owners(page) == owned[page]
        assert {page: digest for digest, page in pool._pages.items()} == {
            page: digest for page, digest in enumerate(pool._digests) if digest is not None
        }
        assert all(pool._digests[page] is not None for page in idle)
        assert all(pool._digests[page] is None for page in free)
        for pages in alive:
            table, first = pages.tables[group], pages.first[group]
            assert len(table) == len(set(table)), "a sequence has a page twice"
            assert pool.window or first == 0
            shared = [index for index, page in enumerate(table, first) if owned[page] > 1]
            assert all(index < pages.num_registered for index in shared), "shares a page in writing"
