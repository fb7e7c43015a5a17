"""Tool calling over HTTP, with the real `openai` client, before answers that a test has written.

The scripted engine repeats its prompt up to an end token, and the chat template of these tests
renders a conversation's last message and that token: the last message is the answer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from tokenizers import AddedToken

from polyjax.core.errors import ConfigError
from polyjax.engine.scripted import Script, ScriptedEngine
from polyjax.engine.types import EngineConfig
from polyjax.io.files import open_model
from polyjax.server.config import ServerConfig
from polyjax.server.service import ServedModel
from tests.server.serving import Server, running, write_model

CHAT = "/v1/chat/completions"
TEMPLATE = "{% if tools %}{% endif %}{{ messages[-1].content }}<|end|>"
SHOWS_PROMPT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function | tojson }}"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Örebro", "days": 3}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **fields}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


TOOLS = [tool("weather", WEATHER, description="Forecast"), tool("time")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its marks are special tokens, which answers do not show by themselves."""
    model = write_model(tmp_path_factory.mktemp("model"))
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, special=True) for mark in ("<tool_call>", "</tool_call>")])
    backend.save(str(model / "tokenizer.json"))
    template = model / "answers.jinja"
    template.write_text(TEMPLATE)
    flags = (f"--chat_template={template}", "--tool_call_parser=hermes")
    with running(model, (*flags, "--enable-auto-tool-choice"), {}) as ready:
        yield ready


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, answer: str, **fields: Any) -> ChatCompletion:
    """Returns the body for `answer`, which must be the same streamed and whole, but for ids."""
    request: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": answer}],
        "temperature": 0,
        "tools": TOOLS,
        **fields,
    }
    whole = client.chat.completions.create(**request)
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**request, stream=True):
        state.handle_chunk(chunk)
    streamed = state.current_completion_snapshot
    assert [without_ids(c) for c in whole.choices] == [without_ids(c) for c in streamed.choices]
    return whole


def without_ids(choice: Any) -> tuple[Any, ...]:
    message = choice.message
    calls = [(c.type, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    ids = [call.id for call in message.tool_calls or ()]
    assert all(call_id.startswith("call_") for call_id in ids) and len(set(ids)) == len(ids)
    return message.role, message.content, calls, choice.finish_reason


def called(completion: ChatCompletion) -> list[tuple[str, Any]]:
    calls: Any = completion.choices[0].message.tool_calls or ()
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


# Answers


def test_a_call(client: openai.OpenAI) -> None:
    completion = ask(client, CALL)
    [choice] = completion.choices
    assert called(completion) == [("weather", {"city": "Örebro", "days": 3})]
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_several_calls_in_a_text(client: openai.OpenAI) -> None:
    completion = ask(client, f"Let me see.\n{CALL}\n{SECOND}\n")
    assert [name for name, _ in called(completion)] == ["weather", "time"]
    assert completion.choices[0].message.content == "Let me see."
    one = ask(client, f"{CALL}\n{SECOND}", parallel_tool_calls=False)
    assert [name for name, _ in called(one)] == ["weather"]


@pytest.mark.parametrize("answer", ["Just text.", "a < b", "<tool_call>none</tool_call>", ""])
def test_an_answer_without_a_call(client: openai.OpenAI, answer: str) -> None:
    [choice] = ask(client, answer).choices
    assert choice.message.content == answer
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_required_and_named(client: openai.OpenAI) -> None:
    required = ask(client, CALL, tool_choice="required")
    assert required.choices[0].finish_reason == "tool_calls"
    choice = {"type": "function", "function": {"name": "weather"}}
    named = ask(client, CALL, tool_choice=choice)
    assert called(named) == called(required)
    assert named.choices[0].finish_reason == "stop"  # as OpenAI has it for a function by name


def test_calls_beside_a_json_answer(client: openai.OpenAI) -> None:
    form = {"type": "json_object"}
    assert called(ask(client, SECOND, response_format=form)) == [("time", {})]
    assert ask(client, '{"a": 1}', response_format=form).choices[0].message.content == '{"a": 1}'


def test_none_reads_no_calls(client: openai.OpenAI) -> None:
    [choice] = ask(client, "a<tool", tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == ("a<tool", None)


def test_a_call_cut_off(client: openai.OpenAI) -> None:
    length = len('<tool_call>\n{"name": "weather", "arguments": {"ci')
    length -= len("<tool_call>") - 1  # which is one token
    completion = ask(client, CALL, max_tokens=length)
    [choice] = completion.choices
    assert choice.finish_reason == "length"
    calls: Any = choice.message.tool_calls
    assert calls[0].function.arguments == '{"ci'


def test_a_stop_string_within_a_call(client: openai.OpenAI) -> None:
    completion = ask(client, CALL, stop=['"days"'])
    calls: Any = completion.choices[0].message.tool_calls
    assert calls[0].function.arguments == '{"city": "Örebro", '


def test_choices_are_read_apart(client: openai.OpenAI) -> None:
    completion = ask(client, CALL, n=2)
    assert [choice.finish_reason for choice in completion.choices] == ["tool_calls"] * 2
    ids = [call.id for choice in completion.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 2


def test_events_of_a_stream(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": CALL}], "tools": TOOLS, "temperature": 0}
    events = server.stream(CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant"}
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
    assert entries[0].keys() == {"index", "id", "type", "function"}
    assert entries[0]["function"] == {"name": "weather", "arguments": "{"}
    assert all(entry.keys() == {"index", "function"} for entry in entries[1:])
    assert all(entry["function"].keys() == {"arguments"} for entry in entries[1:])
    assert len(entries) > 20  # arguments come as they are written
    assert not any("content" in delta for delta in deltas)
    usage = server.post(CHAT, body).json()["usage"]
    assert len(events) == usage["completion_tokens"]


def test_logprobs_beside_calls(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": SECOND}], "tools": TOOLS, "temperature": 0}
    events = server.stream(CHAT, {**body, "logprobs": True})
    tokens = [e["token"] for event in events for e in event["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens).startswith(SECOND)


# Prompts


def prompt_of(server: Server, **body: Any) -> str:
    response = server.post("/tokenize", body)
    assert response.status_code == 200, response.text
    text: str = server.post("/detokenize", {"tokens": response.json()["tokens"]}).json()["prompt"]
    return text


@pytest.fixture(scope="module")
def showing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_model(tmp_path_factory.mktemp("showing"))
    template = model / "prompts.jinja"
    template.write_text(SHOWS_PROMPT)
    flags = (f"--chat_template={template}", "--tool_call_parser=llama3_json")
    with running(model, (*flags, "--noenable_auto_tool_choice"), {}) as ready:
        yield ready


def test_tools_and_calls_reach_the_prompt(showing: Server) -> None:
    call = {"arguments": '{"city":"Örebro"}', "name": "weather"}  # as the openai client has it
    messages = [
        {"role": "user", "content": "Q", "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
        {"role": "assistant", "content": "Cold", "tool_calls": None, "refusal": None},
    ]
    prompt = prompt_of(showing, messages=messages, tools=[tool("f", WEATHER, strict=True)])
    shown = {"name": "f", "description": "", "parameters": WEATHER}
    assert prompt == (
        json.dumps({"type": "function", "function": shown})
        + '[user]Q[assistant]{"name": "weather", "arguments": {"city": "Örebro"}}'
        + "[tool]12 °Ccall_1[assistant]Cold"
    )
    assert prompt_of(showing, messages=messages[:1]) == "[user]Q"


def test_tools_that_are_not_to_be_called_stay_out_of_the_prompt(showing: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 7, "temperature": 0}
    answer = showing.post(CHAT, {**body, "tools": TOOLS, "tool_choice": "none"}).json()
    assert answer["choices"][0]["message"]["content"] == "[user]Q"


# Refusals


def refused(response: httpx.Response, param: str | None) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("weather", "tools"),
        (["weather"], "tools[0]"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([tool("two words")], "tools[0].function.name"),
        ([tool("f" * 65)], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name"),
        ([tool("f", description=3)], "tools[0].function.description"),
        ([tool("f", strict="yes")], "tools[0].function.strict"),
        ([tool("f", [])], "tools[0].function.parameters"),
        ([tool("f", {"type": "string"})], "tools[0].function.parameters.type"),
        ([tool("f", {"properties": ["a"]})], "tools[0].function.parameters.properties"),
        ([tool("f", {"properties": {"a": "string"}})], "tools[0].function.parameters.properties"),
        ([tool("f", {"required": "a"})], "tools[0].function.parameters.required"),
        ([tool(f"f{i}") for i in range(129)], "tools"),
    ],
)
def test_tools_that_are_none(server: Server, tools: Any, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Q"}], "tools": tools}
    assert param in refused(server.post(CHAT, body), param)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice", "one of none, auto, required"),
        (
            {"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS},
            "tool_choice.type",
            "function",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function.name", ""),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
            "tool_choice",
            "no function 'f'",
        ),
        (
            {"tools": [tool("f", {"properties": {"a": {"type": "x"}}})], "tool_choice": "required"},
            "tools",
            "parameters of f",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "leave one of them out",
        ),
        ({"tools": TOOLS, "guided_regex": "a+"}, "tools", "not with one by regex"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": "auto"}, "function_call", "use tool_choice"),
        ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls", ""),
    ],
)
def test_choices_that_are_none(
    server: Server, fields: Mapping[str, Any], param: str, reason: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Q"}], **fields}
    assert reason in refused(server.post(CHAT, body), param)


F = {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "12"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "12", "tool_call_id": 3}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {**F, "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": F}, {"function": {"name": "f"}}]},
            "messages[0].tool_calls[1].function.arguments",
        ),
    ],
)
def test_messages_that_are_none(server: Server, message: Mapping[str, Any], param: str) -> None:
    refused(server.post(CHAT, {"messages": [message], "tools": TOOLS}), param)


def test_the_operator_may_leave_no_choice_to_the_model(showing: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Q"}], "tools": TOOLS, "max_tokens": 2}
    assert "--noenable_auto_tool_choice" in refused(showing.post(CHAT, body), "tool_choice")
    assert showing.post(CHAT, {**body, "tool_choice": "required"}).status_code == 200


@pytest.mark.parametrize(
    ("templates", "flags", "template", "parser"),
    [
        ({"default": "{{ tools }} <tool_call>"}, {}, "default", "hermes"),
        ({"default": "x", "tool_use": "{{ tools }} <tool_call>"}, {}, "tool_use", "hermes"),
        ({"default": "{{ tools }}"}, {"tool_call_parser": "mistral"}, "default", "mistral"),
        ({"default": "{{ tools }}"}, {}, "default", None),
        ({"default": "no tools <tool_call>"}, {}, None, "hermes"),
        ({}, {}, None, None),
    ],
)
def test_which_template_and_parser_a_model_gets(
    model_dir: Path,
    templates: dict[str, str],
    flags: dict[str, Any],
    template: str | None,
    parser: str | None,
) -> None:
    files = dataclasses.replace(open_model(model_dir), chat_templates=templates)
    info = ScriptedEngine(EngineConfig(), Script()).info
    model = ServedModel.build(files, files.load_tokenizer(), info, ServerConfig(**flags))
    found = model.tools.format
    assert (found and found.name) == parser
    if template is None:
        assert model.tools.template is None
    else:
        rendered = model.tools.template_for_tools().render([], tools=[{"a": 1}])
        assert rendered == templates[template].replace("{{ tools }}", "[{'a': 1}]")


def test_a_parser_that_is_none() -> None:
    with pytest.raises(ConfigError, match="auto or one of hermes"):
        ServerConfig(tool_call_parser="herms")
