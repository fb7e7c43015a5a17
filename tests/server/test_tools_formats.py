"""Tool formats: however an answer is cut into pieces it reads the same, and loses no text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.server.tool_formats import FORMATS, format_of
from polyjax.server.tool_formats.contract import CallDelta, Event

Answer = tuple[str, list[tuple[str, str]]]  # content, and the calls' names and arguments


def add_up(events: Iterable[Event]) -> Answer:
    """What a client makes of the events; checks that each call begins with its name, once."""
    content, calls = "", list[tuple[str, str]]()
    for event in events:
        if isinstance(event, CallDelta):
            assert (event.name is not None) == (event.index == len(calls))
            if event.name is not None:
                calls.append((event.name, ""))
            assert event.index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + event.arguments)
        else:
            assert event
            content += event
    return content, calls


def read(format_name: str, pieces: Sequence[str]) -> Answer:
    parser = FORMATS[format_name].parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return add_up([*events, *parser.finish()])


def events_by_character(format_name: str, text: str) -> list[list[Event]]:
    parser = FORMATS[format_name].parser()
    return [*map(parser.push, text), parser.finish()]


# Any cut gives the same

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<tool_", "</tool", "<"),
    *("<|python_tag|>", "<|python", ";", " ; ", "text", " ", "\n", "é🙂"),
    *("[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_", ", ", "] "),
    *('{"name": "f", "arguments": {}}', '{"name": "g", "parameters": {"a": [1, {"b": null}]}}'),
    *('{"name": "f", ', '"name": "g"', '"arguments": {', '"parameters": ', '"arguments": "{}"'),
    *('{"arguments": {"a": 1}, "name": "h"}', '{"name": "é\\u00e9", "arguments": {"x": "}"}}'),
    *("{", "}", "[", "]", '"', "\\", '\\"', ":", ",", '"a": 1', '"</tool_call>"', '"name"', "}}"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@st.composite
def cut_texts(draw: Any) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    borders = [0, *cuts, len(text)]
    return text, [text[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("format_name", FORMATS)
@given(cut=cut_texts())
def test_any_cut_reads_as_the_whole(format_name: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole = read(format_name, [text])
    assert read(format_name, pieces) == whole
    assert read(format_name, list(text)) == whole


@pytest.mark.parametrize("format_name", FORMATS)
@given(text=texts)
def test_no_text_is_lost_where_no_call_was_read(format_name: str, text: str) -> None:
    content, calls = read(format_name, list(text))
    if not calls:
        assert content == text


# Calls come back as they were written

names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=8), values, max_size=3)
call_lists = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
words = st.from_regex(r"[a-z][a-z .,]*[a-z.]", fullmatch=True) | st.just("")


@settings(max_examples=40)
@given(calls=call_lists, before=words, after=words, is_ascii=st.booleans())
def test_hermes_calls_come_back(
    calls: list[tuple[str, Any]], before: str, after: str, is_ascii: bool
) -> None:
    written = [json.dumps(arguments, ensure_ascii=is_ascii) for _, arguments in calls]
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        for (name, _), text in zip(calls, written, strict=True)
    ]
    text = "\n".join([before, *blocks, after])
    expected = [(name, text) for (name, _), text in zip(calls, written, strict=True)]
    content, got = read("hermes", list(text))
    assert got == expected
    assert content == (f"{before}\n{after}" if before and after else before + after)


@settings(max_examples=40)
@given(calls=call_lists, is_tagged=st.booleans())
def test_llama_calls_come_back(calls: list[tuple[str, Any]], is_tagged: bool) -> None:
    written = [json.dumps(arguments) for _, arguments in calls]
    objects = [
        f'{{"name": "{name}", "parameters": {text}}}'
        for (name, _), text in zip(calls, written, strict=True)
    ]
    text = ("<|python_tag|>" if is_tagged else "") + "; ".join(objects) + "\n"
    expected = [(name, text) for (name, _), text in zip(calls, written, strict=True)]
    assert read("llama3_json", list(text)) == ("", expected)


# Single cases

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call at all", "no call at all", []),
        (" \n ", " \n ", []),
        ("a < b, <tool", "a < b, <tool", []),
        (f"Wait.\n{CALL}\nDone.", "Wait.\nDone.", [("f", '{"a": 1}')]),
        (f"\n\n{CALL}\n{CALL}\n", "", [("f", '{"a": 1}')] * 2),
        (CALL.replace("\n", ""), "", [("f", '{"a": 1}')]),
        # Another order, other spaces, arguments as text, further keys.
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{ "name":"f" ,"arguments" :{"a":1} }</tool_call>', "", [("f", '{"a":1}')]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name":"f","arguments":{},"id":[7]}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"id":7,"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        # Marks and braces inside strings belong to the arguments.
        (
            '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}\\""}}</tool_call>x',
            "x",
            [("f", '{"a":"</tool_call>}\\""}')],
        ),
        # Cut off, or a mark forgotten.
        ('<tool_call>\n{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        ('<tool_call>\n{"name": "f", "argum', '<tool_call>\n{"name": "f", "argum', []),
        (f"{CALL[:-1]}", "", [("f", '{"a": 1}')]),
        (CALL[: -len("</tool_call>")] + CALL, "", [("f", '{"a": 1}')] * 2),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
        # What is no call is content, marks included.
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('a <tool_call>\n{"name": }\n</tool_call>', 'a <tool_call>\n{"name": }\n</tool_call>', []),
        (f"<tool_call> oh, {CALL}", "<tool_call> oh,", [("f", '{"a": 1}')]),
        # Malformed once the name is out: as the model wrote it, up to the end of the call.
        (
            '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> b',
            "b",
            [("f", '{"a": [1}}')],
        ),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read("hermes", [text]) == (content, calls)


def test_arguments_stream_while_they_are_written() -> None:
    by_character = events_by_character("hermes", CALL)
    first = next(i for i, events in enumerate(by_character) if events)
    assert by_character[first] == [CallDelta(0, "f", "{")]
    assert CALL[: first + 1].endswith('"arguments": {')
    pieces = [event.arguments for events in by_character for event in events]
    assert pieces == list('{"a": 1}')


def test_content_streams_while_it_is_written() -> None:
    by_character = events_by_character("hermes", "a b<c")
    assert by_character == [["a"], [], [" b"], [], ["<c"], []]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello {you}", "Hello {you}", []),
        ('{"answer": 3} is it', '{"answer": 3} is it', []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('\n{"name": "f", "parameters": {}} ', "", [("f", "{}")]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ('{"name": "f", "parameters": {}} and then; {}', "and then; {}", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"a": 1}', '; {"a": 1}', [("f", "{}")]),
        ('{"name": "f", "parameters": {"a": "', "", [("f", '{"a": "')]),
    ],
)
def test_llama3_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read("llama3_json", [text]) == (content, calls)


LIST = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello [you]", "Hello [you]", []),
        (LIST, "", [("f", '{"a": 1}'), ("g", "{}")]),
        (f"Wait. {LIST} \n", "Wait.", [("f", '{"a": 1}'), ("g", "{}")]),
        (LIST.replace(" ", ""), "", [("f", '{"a":1}'), ("g", "{}")]),
        (LIST[:-1], "", [("f", '{"a": 1}'), ("g", "{}")]),
        (LIST[: LIST.index(", {") + 1], "", [("f", '{"a": 1}')]),
        ("a [TOOL_CALLS] b", "a [TOOL_CALLS] b", []),
        ("[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]{}", []),
        ('[TOOL_CALLS] [{"a": 1}]', '[TOOL_CALLS] [{"a": 1}]', []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    ],
)
def test_mistral(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read("mistral", [text]) == (content, calls)


def test_ids_of_calls() -> None:
    assert FORMATS["hermes"].new_id().startswith("call_")
    assert re.fullmatch("[a-zA-Z0-9]{9}", FORMATS["mistral"].new_id())


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('... {\'<tool_call>\\n{"name": "\' ...', "hermes"),
        ('<|start_header_id|> ... {"name": ..., "parameters": ...}', "llama3_json"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]f[ARGS]", None),
        ("<tool_call>\n<function=f>", None),
        ("<tool_call>f\n<arg_key>", None),
        ("{{ tools | tojson }}", None),
    ],
)
def test_the_format_is_told_from_the_template(template: str, name: str | None) -> None:
    found = format_of(template)
    assert (found and found.name) == name
