"""An engine on the tiny Llama, and what its outputs are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyjax.core.arrays import reduction_bound
from polyjax.engine.engine import Engine
from polyjax.engine.types import EngineConfig, FinishReason, Request, RequestOutput, SamplingParams
from polyjax.gates.equivalence import forward_bound
from tests import tiny_llama

NUM_KV_PAGES = 36  # of 8 tokens: four long sequences do not fit, so some are preempted


def make_engine(folder: Path, **changes: Any) -> Engine:
    config = EngineConfig(
        model=str(tiny_llama.write_model(folder / "model")),
        load_format="dummy",
        block_size=tiny_llama.PAGE_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_kv_pages=NUM_KV_PAGES,
        plan=str(tiny_llama.write_plan(folder / "plan.json")),
        compile_cache_dir=str(folder / "programs"),
    )
    engine = Engine(dataclasses.replace(config, **changes))
    give_clear_weights(engine)
    return engine


def give_clear_weights(engine: Engine) -> None:
    """Replaces the random parameters by ones whose logits differ clearly."""
    state = engine.state
    new = tiny_llama.small_weights()
    placed = [jax.device_put(a, b.sharding) for a, b in zip(new, state.params, strict=True)]
    heads = [next(i for i, p in enumerate(state.params) if p is head) for head in state.head]
    state.params = tuple(placed)
    state.head = tuple(placed[index] for index in heads)


@dataclasses.dataclass
class Stream:
    """Everything one request got."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output came after the last"
        self.tokens += output.token_ids
        self.outputs.append(output)


def run(
    engine: Engine,
    requests: Iterable[Request],
    each_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Stream]:
    """Runs requests to their end; `each_step` is called before every step with its number here."""
    streams = {}
    for request in requests:
        engine.add(request)
        streams[request.id] = Stream()
    step = 0
    while engine.has_work:
        each_step(step)
        for output in step_without_compiling(engine):
            streams[output.request_id].take(output)
        step += 1
    return streams


def step_without_compiling(engine: Engine) -> list[RequestOutput]:
    """A step; whatever it serves, nothing may be compiled or traced for it."""
    before = engine.stats()
    outputs = engine.step()
    after = engine.stats()
    assert after.compiles_after_ready == before.compiles_after_ready
    assert after.retraces_after_ready == before.retraces_after_ready
    return outputs


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them the end of sequence."""
    return (
        np.random.default_rng(seed + 1000 * length).integers(3, tiny_llama.VOCAB, length).tolist()
    )


def greedy(max_tokens: int = 16, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)


def logit_bound(logits: np.ndarray) -> float:
    """How far two correct computations of these logits may lie apart."""
    spec = tiny_llama.spec()
    relative = forward_bound(spec) + 2 * reduction_bound("float32", spec.config.embed_dim)
    return relative * float(np.abs(logits).max())


def assert_greedy(engine: Engine, request: Request, tokens: list[int]) -> None:
    """Every token is, given its own prefix, the plain model's choice within the numeric bound."""
    ids = request.prompt_token_ids + tokens
    params = tuple(jax.device_put(p, jax.devices()[0]) for p in engine.state.params)
    logits = tiny_llama.plain_logits(params, ids)
    first = len(request.prompt_token_ids) - 1
    for index, token in enumerate(tokens):
        row = logits[first + index]
        assert row[token] >= row.max() - 2 * logit_bound(row), (request.id, index)
