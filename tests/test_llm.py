"""Offline generation on a golden checkpoint: what transformers generated, and the API around it."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyjax import LLM, Plan, SamplingParams
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError, RequestError

ROOT = Path(__file__).resolve().parent
MODEL = ROOT / "goldens" / "llama" / "gqa"
LADDER = BucketLadder((Bucket(1, 4, 16),), (Bucket(64, 1, 16),), (1, 4))
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llm")
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"ladder": dataclasses.asdict(LADDER)}))
    with LLM(
        str(MODEL),
        progress=False,
        plan=str(plan),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_kv_pages=64,
        compile_cache_dir=str(folder / "programs"),
    ) as made:
        yield made


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    golden = np.load(MODEL / "expected.npz")
    rows = [
        (tokens[:prompt].tolist(), tokens[prompt:length].tolist())
        for tokens, prompt, length in zip(
            golden["tokens"], golden["prompt_lens"], golden["lens"], strict=True
        )
    ]
    results = llm.generate([prompt for prompt, _ in rows], GREEDY)
    for (prompt, wanted), result in zip(rows, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert result.token_ids == wanted
        assert result.finish_reason == "length"
        assert result.text == llm.tokenizer.decode(wanted)


def test_a_text_and_its_token_ids_give_the_same(llm: LLM) -> None:
    (by_text,) = llm.generate("Hello there", GREEDY)
    (by_ids,) = llm.generate(llm.tokenizer.encode("Hello there"), GREEDY)
    assert by_text.prompt == "Hello there"
    assert by_ids.prompt is None
    assert by_text.text == by_ids.text


def test_a_stop_string_ends_the_text_and_the_work(llm: LLM) -> None:
    (free,) = llm.generate("Hello", GREEDY)
    stop = free.text[10:13]
    at = free.text.index(stop)
    (cut,) = llm.generate("Hello", dataclasses.replace(GREEDY, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (free.text[:at], "stop")
    keep = dataclasses.replace(GREEDY, stop=(stop,), include_stop_str_in_output=True)
    assert llm.generate("Hello", keep)[0].text == free.text[:at] + stop
    assert llm.engine.stats().running == 0


def test_n_seeded_generations_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, n=3, seed=4, ignore_eos=True)
    first, again = llm.generate("abc", params), llm.generate("abc", params)
    assert [result.index for result in first] == [0, 1, 2]
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert len({tuple(result.token_ids) for result in first}) == 3


def test_logprobs(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("logprobs please", params)
    assert result.logprobs is not None
    assert [entry.rank for entry in result.logprobs] == [0] * 4
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(messages, GREEDY)
    two = llm.chat([messages, messages], GREEDY)
    assert [result.text for result in two] == [one.text] * 2
    assert "Hi" in llm.tokenizer.decode(one.prompt_token_ids)


def test_each_prompt_may_have_its_parameters(llm: LLM) -> None:
    short = dataclasses.replace(GREEDY, max_tokens=2)
    results = llm.generate(["a", "b"], [short, GREEDY])
    assert [len(result.token_ids) for result in results] == [2, 64]
    with pytest.raises(ConfigError, match="2 prompts came with 1 SamplingParams"):
        llm.generate(["a", "b"], [short])


def test_one_impossible_prompt_refuses_the_batch_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[5, 6], [10**6]], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.stats().waiting == 0
    assert len(llm.generate("fine", GREEDY)) == 1


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="no option max_sequences"):
        LLM("x", max_sequences=3)


def test_public_names_come_without_importing_jax() -> None:
    code = (
        "import polyjax, sys; assert 'jax' not in sys.modules; "
        "polyjax.SamplingParams; assert 'jax' not in sys.modules; "
        "print(all(getattr(polyjax, name) for name in polyjax.__all__))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    with pytest.raises(ImportError):
        from polyjax import NoSuchName  # noqa: F401
    assert Plan is not None
