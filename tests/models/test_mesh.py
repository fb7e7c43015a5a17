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
    ],
)
def test_golden_tensor_parallel(family: str, case: str, plan: MeshPlan) -> None:
    expected = golden(family, case)
    model = load(expected.path, expected.num_rows, plan)
    assert len(model.params[-1].sharding.device_set) == plan.num_devices
    prompts = [expected.prompt(row) for row in range(expected.num_rows)]
    first = [int(logits[-1].argmax()) for logits in model.feed(prompts, 16)]
    wanted = [expected.continuation(row) for row in range(expected.num_rows)]
    assert model.greedy(first, len(wanted[0])) == wanted


def test_mesh_that_does_not_divide_names_every_axis() -> None:
    with pytest.raises(ModelError, match=r"kv_heads=2 is not divisible by model=4") as error:
        load(golden("llama", "gqa").path, 1, MeshPlan(model=4))
    assert len(error.value.problems) >= 2
