"""The bare loop runs what the engine launched, and leaves the engine fit to serve."""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyjax.core.errors import ConfigError
from polyjax.engine.types import Request
from tests.engine.serving import assert_greedy, greedy, make_engine, prompt, run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    request.addfinalizer(lambda: sys.path.remove(str(SCRIPTS)))
    return importlib.import_module("_device_loop")


def test_the_loop_runs_what_the_engine_launched(script: ModuleType, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, enable_prefix_caching=False)
    seconds, late, steps = script.DecodePhase(engine, 3, 8, 5, seed=1).run()
    assert seconds > 0 and 0 <= late <= 5 and not engine.has_work
    assert engine.stats().kv_usage == 0.0
    for before, after in itertools.pairwise(steps):
        starts = [call.launch.starts for call in (*before, *after)]
        assert starts[1] == [start + 1 for start in starts[0]]  # a token each, none skipped
    assert script.bare_loop(engine, steps) > 0

    found = script.measure_device_loop(engine, [1, 3], prompt_tokens=8, steps=5, repeats=3)
    by_name = {result.metric: result for result in found}
    ratio, idle = by_name["engine_vs_device_loop"], by_name["engine_device_idle_fraction"]
    assert len(ratio.samples) == len(ratio.baseline.samples) == len(idle.samples) == 3
    assert "batch 1" in ratio.note and "batch 3" in ratio.note

    request = Request("after", prompt(9), greedy(12))
    assert_greedy(engine, request, run(engine, [request])["after"].tokens)
    with pytest.raises(ConfigError, match="do not fit the engine"):
        script.measure_device_loop(engine, [64], prompt_tokens=8, steps=5, repeats=3)
    engine.close()


def test_the_worst_batch_counts(script: ModuleType) -> None:
    def samples(batch: int, engine_s: float) -> list[object]:
        return [script.Sample(batch, 10, engine_s, 1.0, 1) for _ in range(3)]

    ratio, idle = script.as_results({1: samples(1, 1.01), 64: samples(64, 1.25)}, "chip", 512)
    assert ratio.value == pytest.approx(0.8) and ratio.note.startswith("worst: batch 64;")
    assert ratio.samples == (512.0, 512.0, 512.0)
    assert idle.value == pytest.approx(0.2)
