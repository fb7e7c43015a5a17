"""The last good plan on disk: found again, whole or not at all, for its own model only."""

import json
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.engine.last_good import FILE_NAME, LastGoodPlan

PLAN = Plan(compiler_options=(("a", "1"),))


def test_a_plan_comes_back(tmp_path: Path) -> None:
    kept = LastGoodPlan(tmp_path / "state", "tiny", "cpu")
    assert kept.read(MeshPlan()) is None
    kept.write(Plan())
    kept.write(PLAN)
    assert LastGoodPlan(tmp_path / "state", "tiny", "cpu").read(MeshPlan()) == PLAN
    assert json.loads(kept.path.read_text())["digest"] == PLAN.digest
    assert [path.name for path in kept.path.parent.iterdir()] == [FILE_NAME]  # no draft stays


def test_one_for_something_else_is_passed_over(tmp_path: Path) -> None:
    LastGoodPlan(tmp_path, "tiny", "cpu").write(PLAN)
    assert LastGoodPlan(tmp_path, "other", "cpu").read(MeshPlan()) is None
    assert LastGoodPlan(tmp_path, "tiny", "gpu").read(MeshPlan()) is None
    assert LastGoodPlan(tmp_path, "tiny", "cpu").read(MeshPlan(model=2)) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"plan": 3}', b'{"plan": {"no": 1}}', b"\xff"]
)
def test_a_damaged_file_is_passed_over(tmp_path: Path, content: bytes) -> None:
    kept = LastGoodPlan(tmp_path, "tiny", "cpu")
    kept.path.write_bytes(content)
    assert kept.read(MeshPlan()) is None


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--state_dir="):
        LastGoodPlan(tmp_path / "file" / "state", "tiny", "cpu")
