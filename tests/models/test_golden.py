"""Parity with `transformers` on tiny checkpoints of every family."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.goldens import Golden, golden, golden_cases
from tests.models.paged import PAGE_SIZE, PAGES_PER_ROW, PagedModel, load

CHUNK = 16  # divides no prompt: chunks end inside pages and inside windows
ALL = golden_cases()
FAMILIES = sorted({family for family, _ in ALL})
ONE_EACH = [next(case for case in ALL if case[0] == family) for family in FAMILIES]
ONE_EACH += [case for case in ALL if case == ("mistral", "window")]  # pages are given up on the way


@functools.lru_cache(maxsize=1)  # tests of a case follow each other and share its programs
def opened(family: str, case: str) -> tuple[Golden, PagedModel]:
    expected = golden(family, case)
    return expected, load(expected.path, expected.num_rows)


@pytest.fixture
def expected(family: str, case: str) -> Golden:
    return opened(family, case)[0]


@pytest.fixture
def model(family: str, case: str) -> PagedModel:
    """The case's model with nothing in its caches."""
    model = opened(family, case)[1]
    model.forget()
    return model


def bound(expected: Golden) -> float:
    """How far two float32 programs may be apart: each errs about as much as the oracle does.

    `oracle_error` is a maximum over the logits of one program; ours sums in another order, whose
    maximum may be a few times that. Half of the smallest margin keeps every greedy choice.
    """
    return min(8 * expected.oracle_error, float(expected.margins.min()) / 2)


def assert_close(logits: np.ndarray, wanted: np.ndarray, expected: Golden) -> None:
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=bound(expected))


def sequences(expected: Golden) -> list[list[int]]:
    return [expected.sequence(row) for row in range(expected.num_rows)]


@pytest.mark.parametrize("family, case", ALL, scope="module")
class TestEveryCase:
    def test_golden_chunked_prefill(self, model: PagedModel, expected: Golden) -> None:
        logits = model.feed(sequences(expected), CHUNK)
        assert_close(logits[0][expected.logit_positions], expected.logits, expected)
        last = np.stack([logits[row][n - 1] for row, n in enumerate(expected.prompt_lens)])
        assert_close(last, expected.prompt_logits, expected)

    def test_golden_greedy_continuation(
        self, model: PagedModel, expected: Golden, family: str, case: str
    ) -> None:
        prompts = [expected.prompt(row) for row in range(expected.num_rows)]
        first = [int(logits[-1].argmax()) for logits in model.feed(prompts, CHUNK)]
        wanted = [expected.continuation(row) for row in range(expected.num_rows)]
        # Most cases decode in the program they already have: one compilation less.
        width = 1 if (family, case) in ONE_EACH else CHUNK
        assert model.greedy(first, len(wanted[0]), width) == wanted


@pytest.mark.parametrize("family, case", ONE_EACH, scope="module")
class TestOneCaseOfEachFamily:
    def test_golden_chunks_and_decode_equal_full_forward(
        self, model: PagedModel, expected: Golden
    ) -> None:
        rows = sequences(expected)
        full = model.step(rows, PAGES_PER_ROW * PAGE_SIZE)
        assert_close(full[0][expected.logit_positions], expected.logits, expected)
        model.forget()
        head = [ids[: n - 3] for ids, n in zip(rows, map(len, rows), strict=True)]
        pieces = model.feed(head, CHUNK)
        for offset in (3, 2, 1):
            step = model.step([ids[len(ids) - offset :][:1] for ids in rows], 1)
            pieces = [np.concatenate(pair) for pair in zip(pieces, step, strict=True)]
        for whole, parts in zip(full, pieces, strict=True):
            assert_close(parts, whole, expected)

    def test_golden_batched_equals_alone(self, model: PagedModel, expected: Golden) -> None:
        rows = sequences(expected)
        together = model.feed(rows, CHUNK)
        for row, ids in enumerate(rows):
            model.forget()
            alone = model.feed([ids if r == row else [] for r in range(len(rows))], CHUNK)
            assert_close(together[row], alone[row], expected)
