"""Answers of a given form from a real engine with random weights, over HTTP and as a batch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from polyjax import LLM, Grammar, SamplingParams
from polyjax.core.errors import RequestError
from tests.goldens import ROOT as GOLDENS
from tests.schemas import bounded_schema
from tests.server.serving import ROOT, Server, running

MODEL = GOLDENS / "llama" / "gqa"
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_programs": 4,
    "dtype": "float32",
}
FLAGS = tuple(f"--{name}={value}" for name, value in LIMITS.items())
READY_LIMIT_S = 600.0  # to compile the programs on a machine that is busy with other tests
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Server]:
    with running(MODEL, FLAGS, ready_limit_s=READY_LIMIT_S) as server:
        yield server
        assert server.metric("polyjax_compiles_after_ready_total") == 0
        assert server.metric("polyjax_retraces_after_ready_total") == 0


@pytest.fixture(scope="module")
def client(tiny: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "x{7}"}}, "x{7}"),
        ({"guided_choice": ["vanilla", "van"]}, "vanilla|van"),
        ({"guided_grammar": 'root ::= ("ab" | "c") "!"'}, "(ab|c)!"),
    ],
)
def test_text_completions(tiny: Server, fields: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "Once", "max_tokens": 60, "seed": 2, "n": 3, "temperature": 1.0, **fields}
    answer = tiny.complete(**body)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop" and choice.get("stop_reason") is None
        assert re.fullmatch(pattern, choice["text"])
    texts = ["", "", ""]
    for event in tiny.stream("/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


def test_chat_answers_are_json_of_the_schema(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": FORMAT,
        "max_tokens": 120,
        "n": 4,
        "seed": 1,
    }
    whole = client.chat.completions.create(**request)
    contents = [choice.message.content or "" for choice in whole.choices]
    for choice, content in zip(whole.choices, contents, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(content), SCHEMA)
        assert not re.search(r"\s", content)
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**request, stream=True):
        for piece in chunk.choices:
            streamed[piece.index] += piece.delta.content or ""
    assert streamed == contents
    cut = client.chat.completions.create(**{**request, "max_tokens": 4, "n": 1}).choices[0]
    assert cut.finish_reason == "length"


def test_log_probabilities_are_those_of_what_is_allowed(tiny: Server) -> None:
    body = {"guided_regex": "[a-f]{4}", "logprobs": 3, "max_tokens": 30}
    choice = tiny.complete("x", **body)["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    for logprob, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert logprob == max(top.values()) <= 0  # greedy, among what is allowed


def test_free_streams_beside_constrained_ones(tiny: Server) -> None:
    """Seeded noise outweighs how far two programs differ: the same tokens alone and in company."""
    free = {"max_tokens": 40, "temperature": 2.0, "seed": 9, "ignore_eos": True}
    alone = tiny.complete("Once upon", **free)["choices"][0]["text"]
    schemas = [bounded_schema(seed) for seed in range(6)]
    with ThreadPoolExecutor(8) as pool:
        bound = [
            pool.submit(tiny.complete, "x", guided_json=schema, max_tokens=200, temperature=1.0)
            for schema in schemas
        ]
        among = pool.submit(tiny.complete, "Once upon", **free).result()
        for schema, answer in zip(schemas, bound, strict=True):
            choice = answer.result()["choices"][0]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)
    assert among["choices"][0]["text"] == alone


def test_a_batch_file(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "x", "guided_choice": ["yes", "no"], "max_tokens": 9},
        {"prompt": "x", "guided_json": {"type": "nonsense"}, "max_tokens": 9},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "polyjax.batch", f"--model={MODEL}", *FLAGS]
    command += [f"--input={source}", f"--output={results}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=READY_LIMIT_S)
    answered = map(json.loads, results.read_text().splitlines())
    by_id = {line["custom_id"]: line for line in answered}
    good, bad = by_id["0"]["response"], by_id["1"]["response"]
    assert good["body"]["choices"][0]["text"] in ("yes", "no")
    assert bad["status_code"] == 400
    assert "nonsense" in bad["body"]["error"]["message"]


def test_offline() -> None:
    params = SamplingParams(max_tokens=50, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
    with LLM(str(MODEL), progress=False, **LIMITS) as llm:
        for result in llm.generate(["a", "b"], params):
            assert result.finish_reason == "stop"
            jsonschema.validate(json.loads(result.text), SCHEMA)
        bad = SamplingParams(grammar=Grammar("regex", "("))
        with pytest.raises(RequestError, match="unclosed group"):
            llm.generate(["a"], bad)
        assert llm.engine.stats().waiting == 0
