"""Pages and the prefix cache. Property tests keep a model of what must be cached beside them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.core.errors import ConfigError
from polyjax.core.kv import KVGroup
from polyjax.engine.pages import NO_LIMIT, SINK_PAGE, PageAllocator, SequencePages
from tests.engine.audit import audit
from tests.engine.paged_device import full_group, window_group

PAGE_SIZES = (4, 16)


def make(
    groups: tuple[KVGroup, ...] = (full_group(),),
    page_size: int = 4,
    num_pages: int = 32,
    scratch_pages: int = 2,
) -> PageAllocator:
    return PageAllocator(groups, page_size, [num_pages] * len(groups), scratch_pages)


def serve(allocator: PageAllocator, token_ids: list[int], salt: str = "") -> SequencePages:
    """A sequence whose tokens are all computed, holding its pages."""
    pages = allocator.new_pages()
    hit = allocator.match(pages, token_ids, salt)
    assert allocator.admit(pages, hit, len(token_ids), len(token_ids), watermark=0.0)
    allocator.register(pages, token_ids, len(token_ids), salt)
    return pages


def match(allocator: PageAllocator, token_ids: list[int], salt: str = "") -> int:
    return allocator.match(allocator.new_pages(), token_ids, salt)


def test_sink_and_scratch_pages_are_never_handed_out() -> None:
    allocator = make(num_pages=8, scratch_pages=3)
    pages = serve(allocator, list(range(16)))
    assert sorted(pages.tables[0]) == [1, 2, 3, 4]
    assert SINK_PAGE not in pages.tables[0]
    assert not allocator.admit(allocator.new_pages(), 0, 1, 1, watermark=0.0)
    assert allocator.usage == 1.0


def test_without_usable_page_refused() -> None:
    with pytest.raises(ConfigError, match="num_kv_pages"):
        make(num_pages=3, scratch_pages=2)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefix_hit_at_every_length_around_page_boundaries(page_size: int) -> None:
    longest = 2 * page_size + 2
    for cached in range(1, longest + 1):
        for shared in range(cached + 1):
            for length in range(max(shared, 1), longest + 1):
                allocator = make(page_size=page_size, num_pages=16)
                allocator.release(serve(allocator, list(range(cached))))
                prompt = list(range(shared)) + [1000 + i for i in range(length - shared)]
                expected = min(shared // page_size, (length - 1) // page_size)
                assert match(allocator, prompt) == expected, (cached, shared, length)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_hit_gives_the_very_pages_and_leaves_a_token_to_compute(page_size: int) -> None:
    allocator = make(page_size=page_size)
    tokens = list(range(2 * page_size))
    owner = serve(allocator, tokens)
    second = serve(allocator, tokens)
    assert second.tables[0][0] == owner.tables[0][0]
    assert second.tables[0][1] != owner.tables[0][1], "the last page has a token to compute"
    audit(allocator, [owner, second])


def test_the_same_tokens_elsewhere_or_under_another_salt_are_no_hit() -> None:
    allocator = make()
    allocator.release(serve(allocator, [1, 2, 3, 4, 5, 6, 7, 8], salt="a"))
    assert match(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt="a") == 2
    assert match(allocator, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt="b") == 0
    assert match(allocator, [5, 6, 7, 8, 9], salt="a") == 0
    assert match(allocator, [9, 9, 9, 9, 5, 6, 7, 8, 9], salt="a") == 0


def test_disabled_prefix_cache_never_hits() -> None:
    allocator = PageAllocator((full_group(),), 4, [16], enable_prefix_caching=False)
    allocator.release(serve(allocator, list(range(9))))
    assert match(allocator, list(range(9))) == 0
    audit(allocator, [])


def test_eviction_takes_the_prefix_unused_longest_and_its_end_first() -> None:
    allocator = make(num_pages=9, scratch_pages=2)  # six usable
    first, second = list(range(100, 109)), list(range(200, 209))  # two full pages and a bit each
    allocator.release(serve(allocator, first))
    allocator.release(serve(allocator, second))
    assert match(allocator, first) == match(allocator, second) == 2
    hog = allocator.new_pages()
    assert allocator.admit(hog, 0, 12, 12, watermark=0.0)  # two free pages, one evicted
    assert (match(allocator, first), match(allocator, second)) == (1, 2)
    assert allocator.extend(hog, 12, 16)
    assert (match(allocator, first), match(allocator, second)) == (0, 2)
    audit(allocator, [hog])


def test_admission_counts_idle_hits_and_leaves_the_watermark() -> None:
    allocator = make(num_pages=11, scratch_pages=0)  # ten usable
    tokens = list(range(16))
    allocator.release(serve(allocator, tokens))
    pages = allocator.new_pages()
    prompt = [*tokens, *range(100, 120)]  # nine pages, four of them cached and idle
    hit = allocator.match(pages, prompt, "")
    assert hit == 4
    assert not allocator.admit(pages, hit, 36, 36, watermark=0.2)
    audit(allocator, [])
    assert allocator.admit(pages, hit, 36, 36, watermark=0.1)
    audit(allocator, [pages])


def test_extend_is_all_or_nothing_over_groups() -> None:
    groups = (full_group(), full_group("other"))
    allocator = PageAllocator(groups, 4, [8, 4])
    pages = serve(allocator, list(range(8)))
    assert not allocator.extend(pages, 8, 20)
    assert [len(table) for table in pages.tables] == [2, 2]
    assert pages.end_tokens == 8
    assert allocator.extend(pages, 8, 9)
    assert [len(table) for table in pages.tables] == [3, 3]
    audit(allocator, [pages])


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11])
def test_window_group_keeps_exactly_the_pages_a_step_reads(window: int) -> None:
    allocator = make((full_group(), window_group(window)), num_pages=64)
    pages = allocator.new_pages()
    assert allocator.admit(pages, 0, 1, 1, watermark=0.0)
    for start in range(1, 60):
        assert allocator.extend(pages, start, start + 1)
        first = max(0, start - window + 1) // 4
        assert pages.first == [0, first]
        assert len(pages.tables[1]) == start // 4 + 1 - first
        assert allocator.columns(start, start + 1) == start // 4 + 1
    audit(allocator, [pages])


def test_window_group_alone_reads_few_columns() -> None:
    allocator = make((window_group(4),))
    assert allocator.columns(100, 101) == 2
    assert allocator.columns(99, 100) == 1


@pytest.mark.parametrize("window", [3, 4, 6])
def test_a_hit_needs_only_the_window_of_windowed_groups(window: int) -> None:
    allocator = make((full_group(), window_group(window)))
    tokens = list(range(17))  # four full pages
    pages = serve(allocator, tokens)
    table = pages.tables[1]
    allocator.extend(pages, 16, 17)  # frees what lies before the window of position 16
    needed = 4 - (16 - window + 1) // 4
    assert len(table) == needed + 1
    allocator.release(pages)
    second = allocator.new_pages()
    assert allocator.match(second, tokens, "") == 4
    assert allocator.admit(second, 4, 17, 17, watermark=0.0)
    assert [len(table) for table in second.tables] == [5, needed + 1]
    assert second.first == [0, 4 - needed]
    audit(allocator, [second])


def test_a_lost_window_page_shortens_the_hit() -> None:
    allocator = make((full_group(), window_group(4)))
    tokens = list(range(17))
    allocator.release(serve(allocator, tokens))
    pool = allocator.pools[1]
    digests = allocator.new_pages()
    allocator.match(digests, tokens, "")
    lost = pool.find(digests.digests[2])
    assert lost is not None
    pool._idle.move_to_end(lost, last=False)
    while pool._free:
        pool._free.pop()  # pages outside the books of this test
    assert pool.take() == lost
    # Four pages need page 3; three need page 2, which is gone; two need page 1.
    assert match(allocator, tokens) == 4
    assert match(allocator, tokens[:13]) == 2


def test_capacity_with_windows_that_slide_or_do_not() -> None:
    assert make(num_pages=13).capacity_tokens == 40
    sliding = make((window_group(8),), num_pages=13)  # ten usable
    assert sliding.capacity_tokens == NO_LIMIT
    assert sliding.max_chunk_tokens == 8 * 4 - 8 + 3
    too_wide = make((window_group(100),), num_pages=13)
    assert (too_wide.capacity_tokens, too_wide.max_chunk_tokens) == (40, NO_LIMIT)


@given(
    window=st.integers(1, 20),
    usable=st.integers(3, 12),
    start=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_max_chunk_fits_from_every_start(window: int, usable: int, start: int) -> None:
    allocator = make((window_group(window),), num_pages=usable + 1, scratch_pages=0)
    chunk = min(allocator.max_chunk_tokens, allocator.capacity_tokens - start)
    if chunk <= 0:
        return
    pages = allocator.new_pages()
    position = 0
    while position < start:  # a page at a time: always fits
        end = min(position + min(4, allocator.max_chunk_tokens), start)
        assert allocator.extend(pages, position, end)
        position = end
    assert allocator.extend(pages, start, start + chunk)


def test_release_of_a_page_nobody_owns_is_caught() -> None:
    pool = make().pools[0]
    page = pool.take()
    pool.release(page)
    with pytest.raises(AssertionError, match="does not own"):
        pool.release(page)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "extend", "register", "release", "forget"]),
        st.integers(0, 7),
        st.integers(1, 25),
    ),
    max_size=60,
)


@given(
    groups=st.sampled_from(
        [
            (full_group(),),
            (full_group(), window_group(5)),
            (window_group(8),),
            (full_group(), full_group("other"), window_group(2)),
        ]
    ),
    num_pages=st.integers(4, 40),
    operations=OPERATIONS,
)
@settings(max_examples=150, deadline=None)
def test_books_stay_right_under_any_operations(
    groups: tuple[KVGroup, ...], num_pages: int, operations: list[tuple[str, int, int]]
) -> None:
    """Prompts come from few tokens, so that prefixes are shared, evicted and found again."""
    allocator = PageAllocator(groups, 4, [num_pages] * len(groups), scratch_pages=2)
    alive: list[tuple[SequencePages, list[int]]] = []
    for operation, which, amount in operations:
        if operation == "admit":
            tokens = [(which * 7 + i // 6) % 3 for i in range(amount)]
            pages = allocator.new_pages()
            hit = allocator.match(pages, tokens, "")
            assert hit * 4 < amount
            if allocator.admit(pages, hit, amount, amount, watermark=0.01):
                alive.append((pages, tokens))
        elif operation == "forget":
            allocator.forget_all()
            assert not match(allocator, [0] * 40)
        elif alive:
            pages, tokens = alive[which % len(alive)]
            if operation == "extend":
                before = pages.end_tokens
                if allocator.extend(pages, len(tokens), len(tokens) + amount):
                    tokens.extend([which % 3] * amount)
                    assert pages.end_tokens >= len(tokens)
                else:
                    assert pages.end_tokens == before
            elif operation == "register":
                allocator.register(pages, tokens, len(tokens), "")
            else:
                alive.remove((pages, tokens))
                allocator.release(pages)
        audit(allocator, [pages for pages, _ in alive])
    for pages, _ in alive:
        allocator.release(pages)
    audit(allocator, [])
    assert allocator.usage == 0.0
