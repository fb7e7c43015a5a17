"""The real models that packages carry continue as the oracle does, past their windows, too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.goldens import RealGolden, real_golden
from tests.models.paged import PAGE_SIZE, PagedModel, load

pytestmark = pytest.mark.slow  # half a billion bytes of weights each
CHUNK = 128


def prefill(model: PagedModel, expected: RealGolden) -> np.ndarray:
    """The logits at each prompt's last position, [rows, V]; rows end in different chunks."""
    rows = [expected.prompt(row) for row in range(len(expected.lens))]
    last: list[np.ndarray] = [np.empty(0)] * len(rows)
    for start in range(0, max(map(len, rows)), CHUNK):
        for row, logits in enumerate(model.step([r[start : start + CHUNK] for r in rows], CHUNK)):
            if len(logits):
                last[row] = logits[-1]
    return np.stack(last)


@pytest.mark.parametrize(
    "golden, name", [("smollm2", "smollm2-135m-instruct"), ("gemma3", "gemma-3-270m")]
)
def test_golden_real_model(golden: str, name: str) -> None:
    expected = real_golden(golden)
    pages = -(-int(expected.lens.max()) // PAGE_SIZE)
    model = load(name, len(expected.lens), pages_per_row=pages, only_last=True, effort=3)
    logits = prefill(model, expected)
    # The oracle's own float32 error is not recorded here; half of its smallest lead is the bound
    # within which greedy choices must agree.
    bound = float(expected.margins.min()) / 2
    np.testing.assert_allclose(
        np.take_along_axis(logits, expected.top_ids, axis=-1),
        expected.top_logits,
        rtol=0,
        atol=bound,
    )
    np.testing.assert_allclose(logits.mean(-1, dtype=np.float64), expected.logit_means, atol=bound)
    np.testing.assert_allclose(logits.std(-1, dtype=np.float64), expected.logit_stds, atol=bound)
    wanted = [expected.continuation(row) for row in range(len(expected.lens))]
    assert model.greedy([int(row.argmax()) for row in logits], len(wanted[0])) == wanted
