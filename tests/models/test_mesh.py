"""A model spread over virtual CPU devices gives the reference's tokens."""

from __future__ import annotations

import pytest

from polyjax.core.errors import ModelError
from polyjax.core.mesh import MeshPlan
from tests.goldens import golden
from tests.models.paged import load


@pytest.mark.parametrize(
    "family, case, plan",
    [
        ("llama", "gqa_tied", MeshPlan(model=2)),
        ("llama", "mha", MeshPlan(model=8)),
        ("mistral", "window", MeshPlan(model=2)),
        ("minimax_m2", "partial_rope", MeshPlan(model=2, expert=3)),
        ("deepseek_v3", "grouped", MeshPlan(expert=8)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemma3", "local_global", MeshPlan(model=2)),
                ("kimi_k2", "k2", MeshPlan(model=2, expert=4)),
                ("mixtral", "full", MeshPlan(model=2, expert=2)),
                ("qwen3_moe", "sparse_step", MeshPlan(model=2, expert=4)),
            )
        ),
    ],
)
def test_golden_spread_over_devices(family: str, case: str, plan: MeshPlan) -> None:
    expected = golden(family, case)
    model = load(expected.path, expected.num_rows, plan)
    assert len(model.params[-1].sharding.device_set) == plan.num_devices
    prompts = [expected.prompt(row) for row in range(expected.num_rows)]
    first = [int(logits[-1].argmax()) for logits in model.feed(prompts, 16)]
    wanted = [expected.continuation(row) for row in range(expected.num_rows)]
    assert model.greedy(first, len(wanted[0])) == wanted


def test_weights_stay_where_they_are() -> None:
    """Only activations travel: no device ever gathers a weight."""
    model = load(golden("llama", "gqa_tied").path, 1, MeshPlan(model=2))
    text = model.compiled(tokens=1).as_text() or ""
    assert "all-reduce(" in text
    assert "all-gather(" not in text


def test_mesh_that_does_not_divide_names_every_axis() -> None:
    with pytest.raises(ModelError, match=r"kv_heads=2 is not divisible by model=4") as error:
        load(golden("llama", "gqa").path, 1, MeshPlan(model=4))
    assert len(error.value.problems) >= 2
