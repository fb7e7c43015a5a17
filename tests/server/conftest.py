"""One scripted server per test module, as starting one costs more than most tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Server, running, write_model

KEYS = ("--admin_key=admin-secret", "--max_queued_requests=64", "--log_interval_s=0.5")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with running(model_dir, KEYS, {}) as ready:
        yield ready
