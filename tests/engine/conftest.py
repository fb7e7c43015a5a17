"""Engines that several test files use: their programs are compiled once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyjax.engine.engine import Engine
from tests.checkpoint_variants import other_numbers
from tests.engine.golden_engine import golden_engine
from tests.engine.serving import make_engine
from tests.goldens import golden


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Four sequences, as few programs as there can be.

    It keeps its last good plan and an audit log; whoever uses it leaves it without work.
    """
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


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan and compiled programs of all golden engines."""
    return tmp_path_factory.mktemp("golden-engines")


@pytest.fixture(scope="session")
def base() -> Path:
    """The checkpoint that golden engines start with."""
    return golden("llama", "gqa").path


@pytest.fixture(scope="session")
def other(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same engine."""
    return other_numbers(base, tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(scope="module")
def engine(golden_folder: Path, base: Path) -> Iterator[Engine]:
    """Started with the base weights; files with another engine have a fixture of this name."""
    made = golden_engine(base, golden_folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fresh(golden_folder: Path, base: Path, other: Path) -> Iterator[dict[str, Engine]]:
    """Engines that were started with the one weights and the other; nothing changes them."""
    made = {
        "base": golden_engine(base, golden_folder),
        "other": golden_engine(other, golden_folder),
    }
    yield made
    for each in made.values():
        each.close()
