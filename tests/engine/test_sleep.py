"""An engine asleep: the devices' memory is free, its requests go on after it wakes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from polyjax.core.errors import RequestError
from polyjax.engine.engine import Engine
from polyjax.engine.types import FinishReason, Request
from tests.checkpoint_variants import write_variant
from tests.engine.golden_engine import (
    PROMPTS,
    TOKENS,
    Traffic,
    answer,
    golden_engine,
    sleep,
    under_way,
    wake,
)
from tests.engine.serving import Stream, greedy


@pytest.fixture(autouse=True)
def awake_again(engine: Engine) -> Iterator[None]:
    yield
    if not engine.sleeper.is_awake:
        wake(engine, lambda: engine.step())


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("level", [1, 2])
def test_streams_survive_a_nap_and_the_memory_is_free_meanwhile(
    engine: Engine, fresh: dict[str, Engine], level: int
) -> None:
    epoch = engine.programs.epoch
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    state, before = engine.state, live_bytes()
    held = sum(a.nbytes for a in jax.tree.leaves((state.params, state.kv, state.sampling)))
    told = sleep(engine, traffic.step, level=level)
    assert (told["is_sleeping"], told["level"], engine.stats().sleep_level) == (True, level, level)
    assert before - live_bytes() >= held > 0
    said = [list(stream.tokens) for stream in traffic.streams]
    assert not engine.has_work  # nobody spins while it sleeps ...
    traffic.step()  # ... and a step does no harm
    assert [stream.tokens for stream in traffic.streams] == said
    assert wake(engine, traffic.step)["level"] == 0
    traffic.finish()  # compiling nothing: every step is watched
    for prompt, stream in zip(PROMPTS, traffic.streams, strict=True):
        assert stream.tokens == answer(fresh["base"], prompt)
    assert engine.programs.epoch == epoch  # they are the same weights
    assert engine.scheduler.allocator.usage == 0


def test_repeating_and_deepening(engine: Engine, fresh: dict[str, Engine]) -> None:
    step = engine.step
    for level, reached in ((1, 1), (1, 1), (2, 2), (1, 2)):
        assert sleep(engine, step, level=level)["level"] == reached
    for _ in range(2):
        assert not wake(engine, step)["is_sleeping"]
    assert answer(engine, PROMPTS[0]) == answer(fresh["base"], PROMPTS[0])


def test_dropped_streams_end(engine: Engine) -> None:
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    sleep(engine, traffic.step, running="drop")
    for stream in traffic.streams:
        assert stream.finish_reason is FinishReason.ERROR
        assert stream.outputs[-1].error_status == 503
    wake(engine, traffic.step)
    assert not engine.has_work


def test_requests_come_and_go_while_it_sleeps(engine: Engine, fresh: dict[str, Engine]) -> None:
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    sleep(engine, traffic.step)
    engine.add(Request("s3", PROMPTS[0], greedy(TOKENS)))
    traffic.streams.append(Stream())
    engine.abort("s1")
    wake(engine, traffic.step)
    while engine.has_work:
        traffic.step()
    for index in (0, 2, 3):
        wanted = answer(fresh["base"], (PROMPTS + PROMPTS)[index])
        assert traffic.streams[index].tokens == wanted
    assert traffic.streams[1].finish_reason is None


def test_what_needs_the_weights_is_refused_meanwhile(engine: Engine, other: Path) -> None:
    sleep(engine, engine.step)
    for command, payload in (
        ("weights/load", {"path": str(other)}),
        ("plan/install", {"compiler_options": {}}),
    ):
        with pytest.raises(RequestError, match="asleep") as refused:
            engine.admin(command, payload)
        assert refused.value.status == 409


def test_sleep_waits_for_nothing_that_is_on_its_way(engine: Engine, base: Path) -> None:
    engine.admin("weights/load", {"path": str(base)})
    with pytest.raises(RequestError, match="being loaded") as refused:
        engine.admin("sleep/begin", {})
    assert refused.value.status == 409
    while engine.weights.active:
        if engine.has_work:
            engine.step()
        time.sleep(0.002)


@pytest.mark.parametrize("payload", [{"level": 3}, {"level": True}, {"level": "1"}, {"why": 1}])
def test_malformed_requests_name_the_field(engine: Engine, payload: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        engine.admin("sleep/begin", payload)
    assert (refused.value.param, refused.value.status) == (next(iter(payload)), 400)
    assert engine.sleeper.is_awake


def test_an_engine_whose_weights_are_gone_sleeps_on(
    golden_folder: Path, base: Path, other: Path, fresh: dict[str, Engine], tmp_path: Path
) -> None:
    """At level 2 the files are needed again; they may be missing, and come back as others."""
    model = write_variant(base, tmp_path / "model")
    engine = golden_engine(model, golden_folder)
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    sleep(engine, traffic.step, level=2)
    hidden = model.rename(tmp_path / "hidden")
    told = wake(engine, traffic.step)
    assert told["is_sleeping"] and "no such file" in told["error"]
    (hidden / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    hidden.rename(model)
    told = wake(engine, traffic.step)
    assert not told["is_sleeping"] and not told["error"]
    traffic.finish()
    stream = traffic.streams[0]
    assert stream.outputs[0].epoch == 0 and stream.outputs[-1].epoch == 1  # the change shows
    old = [output.epoch for output in stream.outputs].count(0)
    rest = answer(fresh["other"], PROMPTS[0] + stream.tokens[:old], TOKENS - old)
    assert stream.tokens[old:] == rest
    engine.close()


def test_memory_that_runs_out_leaves_it_asleep(
    engine: Engine, fresh: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(engine, engine.step)

    def fail(array: np.ndarray, sharding: Any) -> jax.Array:
        raise MemoryError("RESOURCE_EXHAUSTED: injected")

    with monkeypatch.context() as patch:
        patch.setattr("polyjax.engine.checkpoint.place_param", fail)
        told = wake(engine, engine.step)
    assert told["is_sleeping"] and "RESOURCE_EXHAUSTED" in told["error"]
    assert not wake(engine, engine.step)["error"]
    assert answer(engine, PROMPTS[0]) == answer(fresh["base"], PROMPTS[0])
