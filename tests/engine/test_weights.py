"""Other weights under running streams: swapped whole, or refused with nothing changed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from polyjax.core.errors import RequestError
from polyjax.engine.engine import Engine
from polyjax.engine.memory import Room
from polyjax.engine.types import FinishReason, Request, SamplingParams
from polyjax.engine.weights import LoadState, Staging, choose_staging
from tests.checkpoint_variants import read_tensors, truncate, write_variant
from tests.engine.golden_engine import (
    PROMPTS,
    TOKENS,
    Traffic,
    answer,
    under_way,
)
from tests.engine.serving import Stream, greedy, step_without_compiling
from tests.goldens import golden


@pytest.fixture(autouse=True)
def back_to_base(engine: Engine, base: Path) -> Iterator[None]:
    """Every test starts with the weights the engine started with."""
    yield
    if engine.weights.current.path != str(base):
        load(engine, base)


def load(engine: Engine, path: Path, **fields: Any) -> dict[str, Any]:
    """Loads weights into an engine, idle or not, to the end; returns what became of it."""
    number = engine.admin("weights/load", {"path": str(path), **fields})["load"]
    while engine.weights.active:
        if engine.has_work:
            assert not step_without_compiling(engine)
        time.sleep(0.01)
    return told(engine, number)


def told(engine: Engine, number: int) -> dict[str, Any]:
    [found] = [load for load in engine.admin("weights", {})["loads"] if load["number"] == number]
    return found


def swap_under_traffic(engine: Engine, path: Path, **fields: Any) -> tuple[Traffic, dict[str, Any]]:
    """Starts streams, loads while they run, and steps them until the load has ended.

    The streams are held where they are while the thread reads, so that none ends before the swap.
    """
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    number = engine.admin("weights/load", {"path": str(path), **fields})["load"]
    while engine.weights.active:
        if engine.weights.has_work:
            traffic.step()
        time.sleep(0.005)
    return traffic, told(engine, number)


@pytest.mark.parametrize("staging", ["device", "host"])
def test_kept_streams_go_on_exactly_as_the_new_weights_would(
    engine: Engine, fresh: dict[str, Engine], other: Path, staging: str
) -> None:
    epoch, before = engine.programs.epoch, engine.weights.current
    traffic, ended = swap_under_traffic(engine, other, running="keep", staging=staging)
    assert (ended["state"], ended["staging"]) == ("current", staging)
    traffic.finish()
    for prompt, stream in zip(PROMPTS, traffic.streams, strict=True):
        epochs = [output.epoch for output in stream.outputs]
        old = epochs.count(epoch)
        assert epochs == [epoch] * old + [epoch + 1] * (TOKENS - old) and 4 <= old < TOKENS
        assert stream.tokens[:old] == answer(fresh["base"], prompt, old)
        rest = answer(fresh["other"], prompt + stream.tokens[:old], TOKENS - old)
        assert stream.tokens[old:] == rest
    current = engine.admin("weights", {})["current"]
    assert current["path"] == str(other) and current["epoch"] == epoch + 1
    assert current["digest"] == fresh["other"].weights.current.digest != before.digest
    assert engine.admin("plan", {})["weights"] == current
    event = engine.events.answer(after=engine.events.last - 1)["events"][0]
    assert (event["kind"], event["digest"]) == ("weights_current", current["digest"])


def test_answers_and_prefixes_are_the_new_weights_alone(
    engine: Engine, fresh: dict[str, Engine], other: Path
) -> None:
    prompt = PROMPTS[1] * 4
    assert answer(engine, prompt) == answer(fresh["base"], prompt)  # its prefix is cached now
    assert load(engine, other)["state"] == "current"
    assert answer(engine, prompt) == answer(fresh["other"], prompt) != answer(fresh["base"], prompt)


def test_dropped_streams_end_and_waiting_requests_do_not(
    engine: Engine, fresh: dict[str, Engine], other: Path
) -> None:
    traffic = Traffic(engine)
    traffic.run_until(lambda: under_way(traffic))
    engine.add(Request("s3", PROMPTS[0], greedy(TOKENS)))  # no slot is free: it waits
    traffic.streams.append(Stream())
    engine.admin("weights/load", {"path": str(other), "running": "drop"})
    while engine.has_work or engine.weights.active:
        if engine.weights.has_work or not engine.weights.active:
            traffic.step()
        time.sleep(0.005)
    *dropped, waited = traffic.streams
    for stream in dropped:
        assert stream.finish_reason is FinishReason.ERROR
        assert stream.outputs[-1].error_status == 503 and "weights" in (
            stream.outputs[-1].error or ""
        )
    assert waited.tokens == answer(fresh["other"], PROMPTS[0])
    assert engine.scheduler.allocator.usage == 0


def test_loading_the_weights_in_force_again_changes_nothing(engine: Engine, base: Path) -> None:
    traffic, ended = swap_under_traffic(engine, base, running="drop")
    assert (ended["state"], ended["changed"]) == ("current", False)
    traffic.finish()
    assert len({output.epoch for stream in traffic.streams for output in stream.outputs}) == 1


def test_prompt_scores_are_of_one_set_of_weights(
    engine: Engine, fresh: dict[str, Engine], other: Path
) -> None:
    """A prompt of several chunks, the weights swapped after the first."""
    prompt = [(7 * i) % 250 for i in range(70)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def scores(of: Engine, between: Callable[[], None]) -> np.ndarray:
        of.add(Request("scored", prompt, params))
        outputs = [*of.step(), *of.step()]
        assert not outputs
        between()
        while of.has_work:
            outputs += of.step()
        [_, *rest] = outputs[0].prompt_logprobs or []
        return np.array([score.logprob for score in rest])

    def swap() -> None:
        engine.admin("weights/load", {"path": str(other)})
        while not engine.weights.has_work:
            time.sleep(0.005)

    wanted = scores(fresh["other"], lambda: None)
    np.testing.assert_allclose(scores(engine, swap), wanted, rtol=0, atol=1e-4)


# -- what is refused ---------------------------------------------------------------------------


def missing_and_misshapen(base: Path, folder: Path) -> tuple[Path, list[str]]:
    tensors = read_tensors(base)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    tensors["stray.weight"] = np.ones(3, np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors[
        "model.layers.1.mlp.down_proj.weight"
    ].astype(np.int32)
    return write_variant(base, folder, tensors), [
        "model.layers.0.mlp.up_proj.weight is missing",
        "model.norm.weight has shape [7]",
        "stray.weight has no place",
        "model.layers.1.mlp.down_proj.weight is stored as int32",
    ]


def truncated(base: Path, folder: Path) -> tuple[Path, list[str]]:
    return truncate(write_variant(base, folder), 0.5), ["past the end of the file"]


def other_architecture(base: Path, folder: Path) -> tuple[Path, list[str]]:
    qwen = golden("qwen3", "untied").path
    return write_variant(qwen, folder), [
        "architecture: the engine runs LlamaForCausalLM, this is Qwen3ForCausalLM",
        "has no place in this model",
    ]


def other_config(base: Path, folder: Path) -> tuple[Path, list[str]]:
    changes = {"rms_norm_eps": 1e-3, "num_hidden_layers": 1, "eos_token_id": 3}
    rope = {"rope_theta": 777.0, "rope_type": "default"}
    variant = write_variant(base, folder, rope_parameters=rope, **changes)
    (variant / "generation_config.json").unlink()
    return variant, ["norm_eps: the engine runs 1e-06", "num_layers", "eos_token_id"]


def quantized(base: Path, folder: Path) -> tuple[Path, list[str]]:
    settings = {"quant_method": "gptq", "bits": 4}
    return write_variant(base, folder, quantization_config=settings), ["gptq"]


@pytest.mark.parametrize(
    "make", [missing_and_misshapen, truncated, other_architecture, other_config, quantized]
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_every_reason(
    engine: Engine,
    fresh: dict[str, Engine],
    base: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], tuple[Path, list[str]]],
) -> None:
    path, reasons = make(base, tmp_path / "variant")
    before = engine.admin("weights", {})["current"]
    traffic, ended = swap_under_traffic(engine, path)
    assert ended["state"] == "refused"
    for reason in reasons:
        assert any(reason in problem for problem in ended["problems"]), (reason, ended["problems"])
    traffic.finish()
    for prompt, stream in zip(PROMPTS, traffic.streams, strict=True):
        assert stream.tokens == answer(fresh["base"], prompt)
    assert engine.admin("weights", {})["current"] == before


def test_a_file_cut_off_while_it_is_read_changes_nothing(
    engine: Engine,
    fresh: dict[str, Engine],
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, opened = write_variant(other, tmp_path / "variant"), engine.weights.reader.open

    def open_then_cut(path: str, progress: Any) -> Any:
        files = opened(path, progress)
        truncate(Path(path), 0.5)
        return files

    monkeypatch.setattr(engine.weights.reader, "open", open_then_cut)
    params = engine.state.params
    traffic, ended = swap_under_traffic(engine, path)
    assert ended["state"] == "refused" and "early" in ended["problems"][0]
    traffic.finish()
    assert engine.state.params is params
    assert traffic.streams[0].tokens == answer(fresh["base"], PROMPTS[0])


@pytest.mark.parametrize("staging", ["device", "host"])
def test_memory_that_runs_out_after_all_changes_nothing(
    engine: Engine,
    fresh: dict[str, Engine],
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    staging: str,
) -> None:
    count = 0

    def place(array: np.ndarray, sharding: Any) -> jax.Array:
        nonlocal count
        count += 1
        if count == 5:
            raise MemoryError("RESOURCE_EXHAUSTED: injected")
        return jax.device_put(array, sharding)

    monkeypatch.setattr("polyjax.engine.checkpoint.place_param", place)
    traffic, ended = swap_under_traffic(engine, other, running="drop", staging=staging)
    assert ended["state"] == "refused" and "RESOURCE_EXHAUSTED" in ended["problems"][0]
    traffic.finish()
    for prompt, stream in zip(PROMPTS, traffic.streams, strict=True):
        assert stream.tokens == answer(fresh["base"], prompt)
        assert len({output.epoch for output in stream.outputs}) == 1


def test_one_load_at_a_time(engine: Engine, base: Path, other: Path) -> None:
    first = engine.admin("weights/load", {"path": str(other)})["load"]
    assert engine.admin("weights/load", {"path": str(other)})["load"] == first
    with pytest.raises(RequestError, match="are being loaded") as refused:
        engine.admin("weights/load", {"path": str(base)})
    assert refused.value.status == 409
    while engine.weights.active:
        if engine.has_work:
            engine.step()
        time.sleep(0.005)
    assert told(engine, first)["state"] == LoadState.CURRENT


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({}, "path"),
        ({"path": 7}, "path"),
        ({"path": "x", "running": "later"}, "running"),
        ({"path": "x", "staging": "disk"}, "staging"),
        ({"path": "x", "colour": 1}, "colour"),
    ],
)
def test_malformed_requests_name_the_field(
    engine: Engine, payload: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.admin("weights/load", payload)
    assert (refused.value.param, refused.value.status) == (param, 400)


def test_where_a_second_copy_waits() -> None:
    room = Room(
        weight_bytes=10,
        host_weight_bytes=20,
        pool_bytes=8,
        free_device_bytes=12,
        free_host_bytes=30,
    )
    assert choose_staging(Staging.AUTO, room) is Staging.DEVICE
    assert choose_staging(Staging.HOST, room) is Staging.HOST
    tight = dataclasses.replace(room, free_device_bytes=2)
    assert choose_staging(Staging.AUTO, tight) is Staging.HOST  # 2 free + 8 of pools hold 10
    for short in (
        dataclasses.replace(tight, pool_bytes=7),
        dataclasses.replace(tight, free_host_bytes=19),
    ):
        with pytest.raises(RequestError, match="second copy") as refused:
            choose_staging(Staging.AUTO, short)
        assert refused.value.status == 409
    with pytest.raises(RequestError, match="second copy"):
        choose_staging(Staging.DEVICE, tight)
