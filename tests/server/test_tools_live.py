"""Tool calls that a real engine is made to write: their arguments satisfy the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.goldens import ROOT as GOLDENS
from tests.server.serving import ROOT, Server, running

READY_LIMIT_S = 600.0  # to compile the programs on a machine that is busy with other tests
TINY_FLAGS = (
    *("--max_model_len=256", "--max_num_seqs=8", "--max_num_batched_tokens=64"),
    *("--max_programs=4", "--dtype=float32", "--tool_call_parser=hermes"),
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Örebro", "São Paulo", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
}
COLOUR = {
    "type": "object",
    "properties": {"rgb": {"type": "string", "pattern": "^#[0-9a-f]{6}$"}},
    "required": ["rgb"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "set_colour": COLOUR}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def answers(client: openai.OpenAI, **fields: Any) -> list[tuple[Any, list[tuple[str, str]], str]]:
    """Content, calls and finish reason of each choice, which are the same streamed and whole."""
    request: dict[str, Any] = {"model": client.models.list().data[0].id, "tools": TOOLS, **fields}
    whole = [
        (
            choice.message.content,
            [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in client.chat.completions.create(**request).choices
    ]
    assert streamed(client, request, len(whole)) == whole
    return whole


def streamed(client: openai.OpenAI, request: dict[str, Any], count: int) -> list[Any]:
    contents: list[str | None] = [None] * count
    calls: list[list[list[str]]] = [[] for _ in range(count)]
    reasons = [""] * count
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            if choice.delta.content is not None:
                contents[choice.index] = (contents[choice.index] or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.function.name is not None:
                    calls[choice.index].append([call.function.name, ""])
                calls[choice.index][call.index][1] += call.function.arguments
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return [
        (content, [(name, arguments) for name, arguments in called], reason)
        for content, called, reason in zip(contents, calls, reasons, strict=True)
    ]


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


# A tiny model with random weights, which would never write a call by itself


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = tmp_path_factory.mktemp("template") / "short.jinja"
    template.write_text("{% if tools %}T{% endif %}{{ messages[-1].content }}")
    flags = (*TINY_FLAGS, f"--chat_template={template}")
    with running(GOLDENS / "llama" / "gqa", flags, ready_limit_s=READY_LIMIT_S) as server:
        yield from connected(server)


def connected(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
    assert server.metric("polyjax_compiles_after_ready_total") == 0


QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]


def test_required_calls(tiny: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "tool_choice": "required", "seed": 5}
    one_each = answers(tiny, **fields, n=6, parallel_tool_calls=False)
    names = set()
    for content, calls, reason in one_each:
        assert (content, len(calls), reason) == (None, 1, "tool_calls")
        check(calls)
        names.add(calls[0][0])
    assert names == SCHEMAS.keys()  # the model chooses
    for content, calls, reason in answers(tiny, **fields, n=4):
        assert content is None and calls
        check(calls if reason == "tool_calls" else calls[:-1])


@pytest.mark.parametrize("name", SCHEMAS)
def test_named_calls(tiny: openai.OpenAI, name: str) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "tool_choice": named(name), "n": 4, "seed": 1}
    for content, calls, reason in answers(tiny, **fields):
        assert (content, [called for called, _ in calls], reason) == (None, [name], "stop")
        check(calls)
    greedy = answers(tiny, messages=QUESTION, tool_choice=named(name), temperature=0)
    check(greedy[0][1])


def test_a_call_that_max_tokens_cuts(tiny: openai.OpenAI) -> None:
    beginning = len('<tool_call>\n{"name": "weather", "arguments": {"city')
    [(content, calls, reason)] = answers(
        tiny, messages=QUESTION, tool_choice=named("weather"), max_tokens=beginning
    )
    assert (content, calls, reason) == (None, [("weather", '{"city')], "length")


# The default model, with the template of docs/tool_calling.md


@pytest.fixture(scope="module")
def smollm2() -> Iterator[openai.OpenAI]:
    template: Path = ROOT / "docs" / "chat_templates" / "chatml_tools.jinja"
    flags = (
        *(f"--chat_template={template}", "--max_model_len=512", "--max_num_seqs=4"),
        *("--max_num_batched_tokens=64", "--max_programs=4"),
    )
    with running(None, flags, ready_limit_s=READY_LIMIT_S) as server:
        yield from connected(server)


@pytest.mark.slow
def test_a_conversation_with_a_real_model(smollm2: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo for 3 days?"}]
    [(content, calls, reason)] = answers(
        smollm2, messages=messages, tool_choice="required", temperature=0, parallel_tool_calls=False
    )
    assert (content, len(calls), reason) == (None, 1, "tool_calls")
    check(calls)
    [(name, arguments)] = calls
    assert name == "weather" and json.loads(arguments)["city"] == "Oslo"
    function = {"name": name, "arguments": arguments}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    [(content, _, _)] = answers(smollm2, messages=messages, temperature=0, max_tokens=60)
    assert content
