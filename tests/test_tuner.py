"""What the background tuner's processes are told of the engine that they tune."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.engine.types import EngineConfig, EngineInfo
from polyjax.tuner import as_served
from search.plan_bench import sized_model
from tests import tiny_llama


def test_a_measuring_process_takes_the_limits_that_the_engine_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its small share of the memory there is no room for the server's pages."""
    model = str(tiny_llama.write_model(tmp_path))
    config = EngineConfig(model=model, load_format="dummy", max_model_len=128)
    served = sized_model(config)
    limits, (pages,) = served.sizing.limits, served.sizing.usable_pages
    info = EngineInfo(
        *("m", model, "cpu", "float32", limits.max_model_len, limits.max_num_seqs),
        *(tiny_llama.VOCAB, (), served.sizing.spec.page_size, pages, 0, 0, "", 0, 0.0, 0.0),
    )
    monkeypatch.setattr("polyjax.engine.build.memory_budget_bytes", lambda *_: 0)
    with pytest.raises(ConfigError, match="its first page needs"):
        sized_model(config)
    beside = sized_model(as_served(config, info))
    assert beside.sizing == served.sizing
    assert beside.base == served.base
