"""An engine for four sequences with as few programs as there can be, shared by test files."""

from collections.abc import Iterator

import pytest

from polyjax.engine.engine import Engine
from tests.engine.serving import make_engine


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """It keeps its last good plan and an audit log; whoever uses it leaves it without work."""
    folder = tmp_path_factory.mktemp("small")
    made = make_engine(
        folder,
        plan="default",
        max_programs=3,
        max_model_len=128,
        state_dir=str(folder / "state"),
        audit_log=str(folder / "audit.jsonl"),
        watch_steps=60,
    )
    yield made
    made.close()
