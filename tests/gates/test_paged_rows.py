"""Page tables are hostile where they should be and consistent everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyjax.gates.paged_rows import LAYOUTS, paged_rows

sizes = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from(LAYOUTS),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([0, 3, 9]),
    st.integers(0, 2),
)


def made(seed, layout, batch, tokens, columns, page, window=0, spare=0):
    rng = np.random.default_rng(seed)
    return paged_rows(rng, layout, batch, tokens, columns, page, window, spare)


@given(sizes)
def test_rows_own_exactly_the_slots_of_their_tokens(drawn):
    rows, page = made(*drawn), drawn[5]
    owned = np.zeros_like(rows.owned)
    for row, context in enumerate(rows.context_lens - rows.first_pages * page):
        for position in range(context):
            owned[rows.page_table[row, position // page], position % page] = True
    assert (owned == rows.owned).all()
    assert not rows.owned[0].any(), "the sink belongs to nobody"
    assert rows.page_table.min() >= 0 and rows.page_table.max() < rows.num_pages


@given(sizes)
def test_new_tokens_have_slots_of_their_own(drawn):
    rows = made(*drawn)
    new = rows.new_slots[rows.new_slots > 0]
    assert len(set(new.tolist())) == len(new) == rows.query_lens.sum()
    assert rows.earlier().sum() == rows.owned.sum() - len(new)
    assert (rows.query_lens <= rows.context_lens).all()


def test_layouts_are_what_they_are_called():
    assert (made(0, "one_token", 3, 2, 4, 4).context_lens == 1).all()
    full = made(0, "full_pool", 3, 2, 4, 4)
    assert full.owned[1:].all()
    shared = [made(seed, "shared_prefix", 3, 2, 4, 4) for seed in range(20)]
    assert any(len(set(rows.page_table[:, 0])) == 1 for rows in shared)
    assert (made(0, "inactive_rows", 4, 2, 4, 4).query_lens == 0).any()
    assert made(0, "page_edges", 3, 2, 4, 4).context_lens[0] % 4 == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_page_is_in_use(layout):
    assert made(3, layout, 3, 2, 4, 4, spare=2).owned[-1].any()
