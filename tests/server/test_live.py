"""The default model behind the real engine, driven by the real `openai` client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from polyjax.io.files import ModelFiles, open_model
from polyjax.io.tokenizer import Tokenizer
from tests.server.llama_reference import LlamaReference, log_softmax
from tests.server.serving import Server, running, wait_for

MAX_MODEL_LEN = 256
FLAGS = (
    *(f"--max_model_len={MAX_MODEL_LEN}", "--max_num_seqs=32", "--max_num_batched_tokens=64"),
    *("--max_programs=4", "--admin_key=admin-secret"),
)
ADMIN = {"Authorization": "Bearer admin-secret"}
READY_LIMIT_S = 600.0  # to compile the programs on a machine that is busy with other tests
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
BEGINNINGS = (
    *("Water boils at", "The first month is", "Once upon a time", "def add(a, b):"),
    *("My favourite colour", "In the morning I", "The sun rises in", "Two plus two is"),
)
OTHER_OPTIONS = {"compiler_options": {"xla_cpu_enable_fast_min_max": True}}


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    with running(None, FLAGS, ready_limit_s=READY_LIMIT_S) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_compiled_while_serving(live: Server) -> Iterator[None]:
    yield
    assert live.metric("polyjax_compiles_after_ready_total") == 0
    assert live.metric("polyjax_retraces_after_ready_total") == 0


@pytest.fixture(scope="module")
def client(live: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [card] = client.models.list().data
    return card.id


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_model()


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return files.load_tokenizer()


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> LlamaReference:
    return LlamaReference(files, np.float32)


@pytest.fixture(scope="module")
def bound(files: ModelFiles, reference: LlamaReference, tokenizer: Tokenizer) -> float:
    """How far logits of two float32 programs may be apart: each errs about as the reference does.

    Its error is a maximum over one program's logits; another program sums in another order, whose
    maximum may be a few times that.
    """
    sequences = [tokenizer.encode(text) for text in BEGINNINGS[:2]]
    truth = LlamaReference(files, np.float64).logits(sequences)
    errors = [
        np.abs(ours - true).max()
        for ours, true in zip(reference.logits(sequences), truth, strict=True)
    ]
    return 8 * float(max(errors))


def assert_greedy(
    reference: LlamaReference, bound: float, streams: Sequence[tuple[list[int], list[int]]]
) -> None:
    """Every token of every (prompt, answer) is the reference's choice for its own prefix.

    A token whose logit is within the bounds of both programs below the best may win as well.
    """
    all_logits = reference.logits([prompt + answer for prompt, answer in streams])
    for (prompt, answer), logits in zip(streams, all_logits, strict=True):
        predictions = logits[len(prompt) - 1 : -1]
        chosen = predictions[np.arange(len(answer)), answer]
        shortfall = predictions.max(axis=-1) - chosen
        assert shortfall.max() <= 2 * bound, (prompt, answer, shortfall)


def greedy_stream(live: Server, prompt: list[int], max_tokens: int) -> tuple[list[int], set[str]]:
    """Streams an answer; returns its token ids and the fingerprints it was computed under."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    events = live.stream("/v1/completions", body)
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    return ids, {event["system_fingerprint"] for event in events}


def test_the_capital_of_france(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=PARIS,
        temperature=0,
        max_tokens=30,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_chat_equals_whole_chat(client: openai.OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": PARIS, "temperature": 0}
    whole = client.chat.completions.create(**request, max_tokens=30)
    *chunks, last = client.chat.completions.create(
        **request, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        whole.choices[0].message.content
    )
    assert len(chunks) == last.usage.completion_tokens == whole.usage.completion_tokens


def test_chat_answers_by_a_json_schema(client: openai.OpenAI, model: str) -> None:
    properties: dict[str, Any] = {
        "capital": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "Asia", "Europe", "America"]},
        "on_an_island": {"type": "boolean"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    request: dict[str, Any] = {"model": model, "messages": PARIS, "response_format": form}
    request |= {"temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**request).choices[0]
    answer = json.loads(whole.message.content or "")
    assert whole.finish_reason == "stop"
    assert list(answer) == list(properties)
    assert answer["capital"] == "Paris"
    assert answer["continent"] in properties["continent"]["enum"]
    assert isinstance(answer["on_an_island"], bool)
    chunks = client.chat.completions.create(**request, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content


def test_completions_and_stop(client: openai.OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "1, 2, 3, 4,", "temperature": 0}
    whole = client.completions.create(**request, max_tokens=8).choices[0]
    assert "5, 6" in whole.text
    stopped = client.completions.create(**request, max_tokens=20, stop=["6"]).choices[0]
    assert stopped.text == whole.text.partition("6")[0]
    assert stopped.finish_reason == "stop"


def test_n_samples_follow_their_seeds(client: openai.OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "prompt": "I like", "temperature": 1.0}
    first = client.completions.create(**request, n=4, seed=3, max_tokens=12)
    texts = [choice.text for choice in sorted(first.choices, key=lambda c: c.index)]
    assert len(set(texts)) > 1
    again = client.completions.create(**request, n=4, seed=3, max_tokens=12)
    assert [c.text for c in sorted(again.choices, key=lambda c: c.index)] == texts


def test_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.completions.create(model=model, prompt=[5] * MAX_MODEL_LEN, max_tokens=5)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model=model, prompt=[10**6], max_tokens=5)


def test_scores_of_a_prompt(
    live: Server, tokenizer: Tokenizer, reference: LlamaReference, bound: float
) -> None:
    ids = tokenizer.encode("The capital of France is Paris, and it is")
    for max_tokens in (0, 1):
        answer = live.complete([ids], max_tokens=max_tokens, echo=True, logprobs=2)
        scores = answer["choices"][0]["logprobs"]
        [logits] = reference.logits([ids])
        wanted = log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
        got = scores["token_logprobs"][1 : len(ids)]
        # A log-probability is a logit less a sum over all of them, each of which may be off.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * bound)
        best = [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]]
        np.testing.assert_allclose(best, log_softmax(logits)[:-1].max(axis=-1), atol=2 * bound)


def test_32_streams_at_once(
    live: Server, tokenizer: Tokenizer, reference: LlamaReference, bound: float
) -> None:
    prompts = [tokenizer.encode(f"{text} {i}") for i in range(4) for text in BEGINNINGS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: greedy_stream(live, prompt, 16)[0], prompts))
    assert {len(answer) for answer in answers} == {16}
    assert_greedy(reference, bound, list(zip(prompts, answers, strict=True)))


def test_a_client_that_goes_away_frees_its_pages(live: Server) -> None:
    """Enough choices that they cannot end by themselves before this process looks again."""
    choices, max_tokens = 16, 240
    body = {"prompt": "Count:", "n": choices, "max_tokens": max_tokens, "ignore_eos": True}
    generated = live.metric("vllm:generation_tokens_total")
    body["stream"] = True
    with live.new_client() as http, http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        wait_for(lambda: live.metric("vllm:num_requests_running") > 0, "the request to run")
    wait_for(lambda: live.metric("vllm:num_requests_running") == 0, "the request to leave")
    assert live.metric("vllm:kv_cache_usage_perc") == 0
    assert live.metric("vllm:generation_tokens_total") - generated < choices * max_tokens * 0.9


class Streams:
    """Streams one after the other in threads, until told to stop; keeps what they brought."""

    def __init__(self, live: Server, prompts: Sequence[list[int]]):
        self.finished: list[tuple[list[int], list[int], set[str]]] = []
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(len(prompts))
        self._runs = [self._pool.submit(self._run, live, prompt) for prompt in prompts]

    def _run(self, live: Server, prompt: list[int]) -> None:
        while not self._stopping.is_set():
            answer, fingerprints = greedy_stream(live, prompt, 64)
            self.finished.append((prompt, answer, fingerprints))

    def stop(self) -> None:
        self._stopping.set()
        for run in self._runs:
            run.result()
        self._pool.shutdown()


class Plans:
    """Installs the other plan and rolls it back, waiting for each to be in force."""

    def __init__(self, live: Server):
        self._live = live

    def in_force(self) -> dict[str, Any]:
        described: dict[str, Any] = self._live.http.get("/admin/plan", headers=ADMIN).json()
        installation = described["installation"]
        assert not installation or installation["state"] != "refused", (
            installation,
            self._live.log,
        )
        return described

    def install(self) -> None:
        before = self.in_force()
        self._post("/admin/plan", OTHER_OPTIONS, before["epoch"] + 1)
        assert self.in_force()["digest"] != before["digest"]

    def roll_back(self) -> None:
        before = self.in_force()
        self._post("/admin/plan/rollback", {}, before["epoch"] + 1)
        assert self.in_force()["digest"] != before["digest"]

    def _post(self, path: str, body: Mapping[str, Any], epoch: int) -> None:
        response = self._live.post(path, body, headers=ADMIN)
        assert response.status_code == 200, response.text
        wait_for(lambda: self.in_force()["epoch"] == epoch, f"epoch {epoch}", READY_LIMIT_S)


@pytest.mark.slow  # compiles every program of a real model anew; test_swaps has it small
def test_a_plan_is_swapped_and_rolled_back_under_running_streams(
    live: Server, tokenizer: Tokenizer, reference: LlamaReference, bound: float
) -> None:
    plans = Plans(live)
    first = plans.in_force()
    plans.install()  # of an idle engine: compiles what the streams would have to wait for
    plans.roll_back()
    streams = Streams(live, [tokenizer.encode(text) for text in BEGINNINGS[:3]])
    try:
        wait_for(lambda: streams.finished, "streams under the old plan", 120)
        plans.install()
        done = len(streams.finished)
        wait_for(lambda: len(streams.finished) > done + 2, "streams under the new plan", 120)
        plans.roll_back()
    finally:
        streams.stop()
    assert plans.in_force()["digest"] == first["digest"]
    crossing = [stream for stream in streams.finished if len(stream[2]) > 1]
    assert len(crossing) >= 2
    assert {len(answer) for _, answer, _ in streams.finished} == {64}  # nothing lost or repeated
    assert_greedy(reference, bound, [(prompt, answer) for prompt, answer, _ in crossing])
    assert live.metric("polyjax_swaps_total") == 2
    assert live.metric("polyjax_rollbacks_total") == 2
    refused = live.post("/admin/plan/rollback", {}, headers=ADMIN)
    assert refused.status_code == 409
