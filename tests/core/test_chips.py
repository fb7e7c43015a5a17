"""Which accelerator a device kind names, and what an engine does on one that is not described."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyjax.core.chips import chip, find_chip
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.engine.build import initial_plan


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v5 lite", "TPU v5e"), ("TPU v5", "TPU v5p"), ("NVIDIA H200 141GB", "NVIDIA H200")],
)
def test_device_kinds_name_their_chip(kind: str, name: str) -> None:
    assert chip(kind).name == name


def test_an_undescribed_chip_is_an_error_only_for_who_needs_it() -> None:
    assert find_chip("TPU v4") is None
    with pytest.raises(ConfigError, match="unknown chip 'TPU v4'; known: NVIDIA H100"):
        chip("TPU v4")


@pytest.mark.parametrize("kind", ["TPU v4", "NVIDIA A100-SXM4-80GB"])
def test_references_serve_an_undescribed_chip(kind: str) -> None:
    config = cast(Any, SimpleNamespace(plan="default"))
    device = SimpleNamespace(platform=kind[:3].lower(), device_kind=kind)
    assert initial_plan(config, cast(Any, None), MeshPlan(), device, cast(Any, None)) == Plan(
        mesh=MeshPlan()
    )
