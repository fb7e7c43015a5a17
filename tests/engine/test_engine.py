"""The engine on a tiny model: every token is the one a plain, unbatched loop would choose."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyjax.core.errors import ConfigError, RequestError
from polyjax.core.noise import gumbel
from polyjax.engine.engine import Engine
from polyjax.engine.types import FinishReason, Request, SamplingParams
from tests import tiny_llama
from tests.engine.serving import (
    assert_greedy,
    greedy,
    logit_bound,
    make_engine,
    prompt,
    run,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = make_engine(tmp_path_factory.mktemp("engine"))
    yield made
    made.close()


def logits_after(engine: Engine, request: Request, tokens: list[int]) -> np.ndarray:
    ids = request.prompt_token_ids + tokens
    return tiny_llama.plain_logits(engine.state.params, ids)[len(request.prompt_token_ids) - 1 :]


def test_mixed_batches_chunked_prompts_and_preemption(engine: Engine) -> None:
    before = engine.stats()
    lengths = (1, 7, 8, 9, 30, 50, 17, 16)
    requests = [Request(f"mixed-{n}", prompt(n), greedy(60)) for n in lengths]
    streams = run(engine, requests)
    for request in requests:
        stream = streams[request.id]
        assert len(stream.tokens) == 60
        assert stream.finish_reason is FinishReason.LENGTH
        assert_greedy(engine, request, stream.tokens)
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.generation_tokens - before.generation_tokens == 60 * len(lengths)
    assert after.kv_usage == 0.0
    assert set(after.phase_us) == {"schedule", "pack", "dispatch", "readback", "commit"}
    assert set(after.phase_s) == set(after.phase_us)
    assert all(after.phase_s[phase] > before.phase_s.get(phase, 0.0) for phase in after.phase_s)


@pytest.mark.parametrize("length", [15, 16, 17, 24, 25])
def test_a_cached_prefix_gives_the_same_tokens(engine: Engine, length: int) -> None:
    ids = prompt(length, seed=1)
    first = run(engine, [Request("first", ids, greedy())])["first"]
    again = run(engine, [Request("again", ids, greedy())])["again"]
    assert again.outputs[0].cached_tokens == (length - 1) // 8 * 8
    for stream in (first, again):
        assert_greedy(engine, Request("", ids, greedy()), stream.tokens)
    other = run(engine, [Request("other", ids, greedy(), cache_salt="tenant")])["other"]
    assert other.outputs[0].cached_tokens == 0


def test_stop_tokens_and_min_tokens(engine: Engine) -> None:
    request = Request("free", prompt(5), greedy(12))
    tokens = run(engine, [request])["free"].tokens
    stop = tokens[0]
    params = greedy(12, stop_token_ids=(stop,))
    stopped = run(engine, [Request("stopped", prompt(5), params)])["stopped"]
    assert stopped.tokens == [stop]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.outputs[-1].stop_reason == stop
    params = greedy(12, stop_token_ids=(stop,), min_tokens=3)
    banned = run(engine, [Request("banned", prompt(5), params)])["banned"]
    assert len(banned.tokens) >= 4 or stop not in banned.tokens
    assert stop not in banned.tokens[:3]
    for index, row in enumerate(logits_after(engine, request, banned.tokens)[:3]):
        row[stop] = -np.inf
        assert row[banned.tokens[index]] >= row.max() - 2 * logit_bound(row[np.isfinite(row)])


def test_penalties_and_logit_bias(engine: Engine) -> None:
    """Beside greedy neighbours, whose slots must not feel them, then in the slots they used."""
    bias = ((9, 4.0), (11, -100.0))
    params = greedy(
        20,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=0.3,
        logit_bias=bias,
    )
    requests = [Request(f"p{n}", prompt(9, n), params if n % 2 else greedy(20)) for n in range(4)]
    streams = run(engine, requests)
    for request in requests[1::2]:
        tokens = streams[request.id].tokens
        for index, row in enumerate(logits_after(engine, request, tokens)[:20]):
            counts = np.bincount(tokens[:index], minlength=tiny_llama.VOCAB)
            seen = counts > 0
            seen[request.prompt_token_ids] = True
            wanted = np.where(seen, np.where(row > 0, row / 1.4, row * 1.4), row)
            wanted = wanted - 0.6 * counts - 0.3 * (counts > 0)
            for token, value in bias:
                wanted[token] += value
            assert wanted[tokens[index]] >= wanted.max() - 3 * logit_bound(row)
    for request in requests[::2]:
        assert_greedy(engine, request, streams[request.id].tokens)
    after = [Request(f"after{n}", prompt(9, n), greedy(8, logprobs=0)) for n in range(4)]
    streams = run(engine, after)  # the full sampler, in slots that were biased
    for request in after:
        assert_greedy(engine, request, streams[request.id].tokens)


def sampled(row: np.ndarray, params: SamplingParams, position: int) -> np.ndarray:
    """Noisy filtered logits [V] by plain numpy; the largest is the token to sample."""
    scaled = row / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0.0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[-params.top_k]] = 0.0
    order = np.argsort(-weights, kind="stable")
    total = np.cumsum(weights[order]) / weights.sum()
    weights[order[int(np.searchsorted(total, params.top_p)) + 1 :]] = 0.0
    noise = gumbel(np.array([params.seed], np.uint32), np.array([position]), tiny_llama.VOCAB)
    return np.where(weights > 0, scaled + np.asarray(noise)[0], -np.inf)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.05}])
def test_sampling_matches_numpy(engine: Engine, filters: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.3, seed=11, ignore_eos=True, **filters)
    request = Request("s", prompt(6), params)
    tokens = run(engine, [request])["s"].tokens
    for index, row in enumerate(logits_after(engine, request, tokens)[:20]):
        noisy = sampled(row, params, len(request.prompt_token_ids) + index)
        near = 3 * logit_bound(row)
        assert noisy[tokens[index]] >= noisy.max() - near or not np.isfinite(noisy[tokens[index]])
        assert np.isfinite(noisy[tokens[index]]), "a token that the filter excludes"


def test_seeds_reproduce_whatever_else_is_in_the_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=5, ignore_eos=True)
    alone = run(engine, [Request("a", prompt(6), params)])["a"].tokens
    others = [Request(f"o{n}", prompt(3 + n), greedy(15)) for n in range(3)]
    among = run(engine, [*others, Request("b", prompt(6), params)])["b"].tokens
    other_seed = SamplingParams(max_tokens=12, temperature=2.0, seed=6, ignore_eos=True)
    assert among == alone
    assert run(engine, [Request("c", prompt(6), other_seed)])["c"].tokens != alone


def test_logprobs_of_output_and_prompt(engine: Engine) -> None:
    ids = prompt(21, seed=3)
    request = Request("l", ids, greedy(6, logprobs=3, prompt_logprobs=2))
    stream = run(engine, [request])["l"]
    logits = tiny_llama.plain_logits(engine.state.params, ids + stream.tokens).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    first, *given = stream.outputs[0].prompt_logprobs or []
    assert first is None
    found = [*given, *(entry for output in stream.outputs for entry in output.logprobs or [])]
    assert len(found) == len(ids) + 6 - 1
    for index, entry in enumerate(found):
        assert entry is not None
        row, token = logprobs[index], (ids + stream.tokens)[index + 1]
        assert entry.token_id == token
        assert abs(entry.logprob - row[token]) <= 2 * logit_bound(logits[index])
        assert abs(entry.rank - int((row > row[token]).sum())) <= 1
        assert len(entry.top) == (2 if index < len(ids) - 1 else 3)
        best = np.sort(row)[::-1][: len(entry.top)]
        assert np.abs(best - [value for _, value in entry.top]).max() <= 2 * logit_bound(
            logits[index]
        )


def test_a_failed_step_is_computed_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(f"f{n}", prompt(10, n), greedy(20)) for n in range(3)]
    launch, failures = engine.launcher.launch, [4, 11]

    def sometimes(*args: Any) -> Any:
        if failures and engine.step_number - start >= failures[0]:
            failures.pop(0)
            launch(*args)  # what was donated is gone
            raise RuntimeError("injected")
        return launch(*args)

    start = engine.step_number
    monkeypatch.setattr(engine.launcher, "launch", sometimes)
    streams = run(engine, requests)
    assert not failures
    for request in requests:
        assert len(streams[request.id].tokens) == 20
        assert_greedy(engine, request, streams[request.id].tokens)


def test_a_request_that_always_fails_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = engine.launcher.launch

    def poisoned(step: Any, *args: Any) -> Any:
        if any(s.request.id == "bad" for part in step.launches for s in part.sequences):
            raise RuntimeError("injected")
        return launch(step, *args)

    monkeypatch.setattr(engine.launcher, "launch", poisoned)
    good = [Request(f"g{n}", prompt(6, n), greedy(8)) for n in range(2)]
    streams = run(engine, [good[0], Request("bad", prompt(5), greedy(8)), good[1]])
    assert streams["bad"].finish_reason is FinishReason.ERROR
    assert "injected" in (streams["bad"].outputs[-1].error or "")
    for request in good:
        assert_greedy(engine, request, streams[request.id].tokens)
        assert len(streams[request.id].tokens) == 8


def test_abort_frees_the_pages(engine: Engine) -> None:
    engine.add(Request("x", prompt(20), greedy(50)))
    for _ in range(4):
        engine.step()
    assert engine.stats().kv_usage > 0
    engine.abort("x")
    while engine.has_work:
        assert engine.step() == []
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize(
    ("ids", "changes", "param"),
    [
        ([1, 256], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([], {}, "prompt"),
        ([1] * 200, {}, "prompt"),
        ([1], {"logit_bias": ((300, 1.0),)}, "logit_bias"),
        ([1], {"numerics": "batch_invariant"}, "numerics"),
    ],
)
def test_requests_that_cannot_be_served(
    engine: Engine, ids: list[int], changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.add(Request("no", ids, greedy(4, **changes)))
    assert refused.value.param == param
    assert not engine.has_work


def test_fail_on_recompile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        traces, compiles = 1, 0

    monkeypatch.setattr(engine, "watch", Watch())
    monkeypatch.setattr(engine, "config", _strict(engine))
    engine.add(Request("r", prompt(4), greedy(2)))
    with pytest.raises(RuntimeError, match="0 compiles and 1 traces after warm-up"):
        engine.step()
    monkeypatch.undo()
    engine.abort("r")
    while engine.has_work:
        engine.step()


def _strict(engine: Engine) -> Any:
    import dataclasses

    return dataclasses.replace(engine.config, fail_on_recompile=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 128, "num_kv_pages": 8}, "--max_model_len=128 needs 16 KV pages"),
        ({"max_model_len": 4096}, "the model was made for 128"),
        ({"dtype": "int8"}, "--dtype=int8"),
        ({"plan": "/nowhere/plan.json"}, "--plan=/nowhere/plan.json"),
        ({"tensor_parallel_size": 64}, "--tensor_parallel_size"),
    ],
)
def test_impossible_configs_name_the_flag(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, **changes)
