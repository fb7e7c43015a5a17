"""The form of an answer as requests spell it: what is understood, and what is refused and why."""

import json
import sys
from typing import Any

import pytest

from polyjax.core.errors import RequestError
from polyjax.engine.types import Grammar
from polyjax.server.protocol import ChatBody, CompletionBody, parse, sampling_params
from tests.server.serving import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "nonsense"}}}


def grammar_of(kind: type[Any] = ChatBody, **fields: Any) -> Grammar | None:
    prompt = {"messages": []} if kind is ChatBody else {"prompt": "x"}
    body = parse(kind, json.dumps({**prompt, **fields}).encode())
    return sampling_params(body, {}, 5).grammar


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": of_schema(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
        ({"response_format": {"type": "json_object"}}, ("json_object", None)),
        ({"structured_outputs": {"json_object": True}}, ("json_object", None)),
        ({"guided_choice": ["a", "é"]}, ("choice", ["a", "é"])),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"])),
        ({"guided_regex": "[ab]+"}, ("regex", "[ab]+")),
        ({"structured_outputs": {"regex": "a?"}}, ("regex", "a?")),
        ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("grammar", 'start: "a"')),
    ],
)
def test_every_spelling(kind: type[Any], fields: Any, expected: tuple[str, Any]) -> None:
    grammar = grammar_of(kind, **fields)
    assert grammar is not None and grammar.kind == expected[0]
    if grammar.kind in ("json_schema", "choice"):
        assert json.dumps(json.loads(grammar.text)) == json.dumps(expected[1])  # in its order
    elif grammar.kind != "json_object":
        assert grammar.text == expected[1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None}},
        {
            "structured_outputs": {"regex": None, "disable_any_whitespace": True},
            "guided_json": None,
        },
    ],
)
def test_no_form(fields: dict[str, Any]) -> None:
    assert grammar_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": of_schema(BAD_SCHEMA)},
            "response_format.json_schema.schema",
            "Invalid type: nonsense",
        ),
        ({"guided_json": BAD_SCHEMA}, "guided_json", "Invalid type: nonsense"),
        ({"guided_json": "{"}, "guided_json", "property name"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "object or a boolean"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be a string"),
        ({"guided_choice": []}, "guided_choice", "not empty"),
        ({"guided_choice": [1]}, "guided_choice[0]", "string"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "list of strings"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"response_format": {}}, "response_format.type", "one of text, json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of text, json_object"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "guided_json",
            "response_format both",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "structured_outputs.json both",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_choice both"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Server, fields: Any, param: str, reason: str, stream: bool) -> None:
    for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (TEXT, {})):
        body = {"prompt": "x", **prompt, **fields, "max_tokens": 4, "stream": stream}
        response = server.post(path, body)
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["param"] == param
        assert param in error["message"] and reason in error["message"], error


def test_a_large_body_may_have_a_grammar(server: Server) -> None:
    names = [f"a-property-with-a-long-name-{number}" for number in range(1000)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    body = {"prompt": "x", "max_tokens": 2, "guided_json": schema}
    assert server.post(TEXT, body).status_code == 200
    body["guided_json"] = {**schema, "required": "nothing"}
    assert server.post(TEXT, body).status_code == 400


def test_without_llguidance_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"polyjax\[grammar\]") as refused:
        grammar_of(guided_regex="never-seen-before[ab]")
    assert (refused.value.param, refused.value.status) == ("guided_regex", 400)
