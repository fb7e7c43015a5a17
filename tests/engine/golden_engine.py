"""Engines on a tiny golden checkpoint with real weights, and streams that run on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyjax.engine.engine import Engine
from polyjax.engine.sleep import SleepState
from polyjax.engine.types import EngineConfig, Request
from tests import tiny_llama
from tests.engine.serving import Stream, greedy, step_without_compiling

TOKENS = 48
PROMPTS = [[5, 9, 200, 31, 77], [8, 100, 3, 62, 19, 240, 11], [150, 149, 148]]


def golden_engine(model: Path, folder: Path) -> Engine:
    """Serves a golden Llama; engines of the same `folder` share their compiled programs."""
    return Engine(
        EngineConfig(
            model=str(model),
            block_size=tiny_llama.PAGE_SIZE,
            num_kv_pages=48,
            max_model_len=tiny_llama.MAX_TOKENS,
            max_num_seqs=3,
            max_num_batched_tokens=32,
            plan=str(tiny_llama.write_plan(folder / "plan.json")),
            compile_cache_dir=str(folder / "programs"),
        )
    )


def answer(engine: Engine, prompt: list[int], max_tokens: int = TOKENS) -> list[int]:
    """The greedy tokens of a prompt on its own."""
    engine.add(Request("alone", prompt, greedy(max_tokens)))
    tokens: list[int] = []
    while engine.has_work:
        for output in step_without_compiling(engine):
            assert output.error is None
            tokens += output.token_ids
    return tokens


class Traffic:
    """The prompts as running streams; `step` advances them all."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.streams = [Stream() for _ in PROMPTS]
        for index, prompt in enumerate(PROMPTS):
            engine.add(Request(f"s{index}", prompt, greedy(TOKENS)))

    def step(self) -> None:
        for output in step_without_compiling(self.engine):
            self.streams[int(output.request_id[1:])].take(output)

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.step()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert [len(stream.tokens) for stream in self.streams] == [TOKENS] * len(PROMPTS)


def under_way(traffic: Traffic) -> bool:
    return all(len(stream.tokens) >= 4 for stream in traffic.streams)


def sleep(engine: Engine, step: Callable[[], Any], **fields: Any) -> dict[str, Any]:
    """Puts it to sleep, stepping it only when it asks for that; returns what it tells then."""
    told: dict[str, Any] = engine.admin("sleep/begin", fields)
    while told["state"] != SleepState.ASLEEP or engine.has_work:
        if engine.has_work:
            step()
        time.sleep(0.002)
        told = engine.admin("sleep", {})
    return told


def wake(engine: Engine, step: Callable[[], Any]) -> dict[str, Any]:
    """Wakes it; returns what it tells when it is awake or has given up."""
    told: dict[str, Any] = engine.admin("sleep/wake", {})
    while told["state"] == SleepState.WAKING:
        if engine.has_work:
            step()
        time.sleep(0.002)
        told = engine.admin("sleep", {})
    return told
