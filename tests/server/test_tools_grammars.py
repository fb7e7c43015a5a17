"""Calls under a grammar: whatever a model samples there is a call with arguments of the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from polyjax.core.errors import RequestError
from polyjax.engine.types import Grammar, SamplingParams
from polyjax.io.chat import ChatTemplate
from polyjax.io.grammar import GrammarCompiler, Matcher
from polyjax.io.tokenizer import Tokenizer
from polyjax.server.protocol import ChatBody
from polyjax.server.tool_formats import FORMATS
from polyjax.server.tool_formats.contract import CallDelta
from polyjax.server.tool_support import ToolSupport
from polyjax.server.tools import ToolUse, requested
from tests.schemas import bounded_schema

EOS = 0


def tokenizer_with(marks: tuple[str, ...], are_special: bool) -> Tokenizer:
    """One token a byte, an end, a token that is no text, and `marks` as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<eos>", *alphabet, '{"name": "', '"}', "}}"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    backend.add_tokens([AddedToken(mark, special=are_special) for mark in marks])
    return Tokenizer(backend, {"eos_token": "<eos>"})


class Model:
    """Samples at random what a grammar allows, ending as soon as it may."""

    def __init__(self, format_name: str, marks_are: str = "text"):
        tool_format = FORMATS[format_name]
        marks = () if marks_are == "text" else tool_format.marks
        self.tokenizer = tokenizer_with(marks, marks_are == "special")
        self.support = ToolSupport.build(
            ChatTemplate("{{ tools }}"), "", tool_format, True, self.tokenizer, [EOS]
        )
        self.compiler = GrammarCompiler(
            self.tokenizer.backend.to_str(), self.tokenizer.vocab_size, [EOS]
        )

    def use(self, tools: list[dict[str, Any]], **fields: Any) -> ToolUse:
        use = requested(ChatBody(messages=[], tools=tools, **fields), self.support)
        assert use is not None
        return use

    def matcher(self, use: ToolUse, params: SamplingParams | None = None) -> Matcher:
        grammar = use.constrain(params or SamplingParams()).grammar
        assert grammar is not None
        return self.compiler.matcher(grammar.kind, grammar.text)

    def sample(self, matcher: Matcher, seed: int, beginning: str = "") -> str:
        """A text that begins with `beginning`; it must end within some thousand tokens."""
        ids, rng = self.tokenizer.encode(beginning), random.Random(seed)
        matcher.consume(ids)
        row = np.zeros(self.compiler.num_mask_words, np.int32)
        for _ in range(3000):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert allowed.size, "a mask must always leave a way on"
            if EOS in allowed:
                return self.text(ids)
            ids.append(int(rng.choice(allowed)))
            matcher.consume(ids[-1:])
        raise AssertionError(f"did not end: {self.text(ids)[-200:]!r}")

    def text(self, ids: list[int]) -> str:
        """As a server reads it: special tokens are hidden unless they are marks."""
        detokenizer = self.tokenizer.detokenizer(shown_ids=self.support.shown_ids)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def admits(self, matcher: Matcher, text: str) -> bool:
        try:
            matcher.consume(self.tokenizer.encode(text))
        except RequestError:
            return False
        return matcher.complete


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **fields}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def read(use: ToolUse, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls with their arguments as values."""
    parser = use.format.parser()
    content, calls = "", list[list[str]]()
    for event in [*parser.push(text), *parser.finish()]:
        if not isinstance(event, CallDelta):
            content += event
        elif event.name is not None:
            calls.append([event.name, event.arguments])
        else:
            calls[event.index][1] += event.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def object_schema(seed: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": bounded_schema(seed), "b": bounded_schema(seed + 1)},
        "required": ["a"],
    }


@pytest.mark.parametrize("marks_are", ["text", "added", "special"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_required_calls_satisfy_their_schemas(format_name: str, marks_are: str) -> None:
    model = Model(format_name, marks_are)
    for seed in range(8):
        schemas = {name: object_schema(seed + i) for i, name in enumerate(("first", "second"))}
        use = model.use([tool(*item) for item in schemas.items()], tool_choice="required")
        text = model.sample(model.matcher(use), seed)
        content, calls = read(use, text)
        assert content == "" and calls, text
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
            assert arguments.keys() <= {"a", "b"}  # what a function does not list it does not take


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_named_function_is_the_one_called(format_name: str) -> None:
    model = Model(format_name)
    choice = {"type": "function", "function": {"name": "second"}}
    use = model.use([tool("first"), tool("second")], tool_choice=choice)
    for seed in range(3):
        assert read(use, model.sample(model.matcher(use), seed)) == ("", [("second", {})])


CALLS = "\n".join(
    f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2)
)
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize("marks_are", ["text", "added"])
def test_several_calls_unless_they_may_not_be_parallel(marks_are: str) -> None:
    model = Model("hermes", marks_are)
    several = model.use([tool("f", COUNT)], tool_choice="required")
    assert model.admits(model.matcher(several), CALLS)
    one = model.use([tool("f", COUNT)], tool_choice="required", parallel_tool_calls=False)
    assert not model.admits(model.matcher(one), CALLS)
    assert model.admits(model.matcher(one), CALLS.partition("\n<tool_call>")[0])


@pytest.mark.parametrize("marks_are", ["text", "added", "special"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_strict_functions_where_the_model_may_choose(format_name: str, marks_are: str) -> None:
    model = Model(format_name, marks_are)
    tools = [tool("f", COUNT, strict=True), tool("loose", COUNT)]
    use = model.use(tools)
    before, opening, key, closing = {
        "hermes": ("Let me <think>see.\n", "<tool_call>\n", "arguments", "\n</tool_call>"),
        "llama3_json": ("", "", "parameters", ""),
        "mistral": ("Let me <think>see.\n", "[TOOL_CALLS] [", "arguments", "]"),
    }[format_name]
    for text in ("", "Just text <think> and more", before + "a"):
        assert model.admits(model.matcher(use), text), text

    def call(name: str, arguments: str) -> str:
        return f'{before}{opening}{{"name": "{name}", "{key}": {arguments}}}{closing}'

    assert model.admits(model.matcher(use), call("f", '{"n": 7}'))
    assert model.admits(model.matcher(use), call("loose", '{"x": [1, {"y": null}]}'))
    assert not model.admits(model.matcher(use), call("f", '{"n": "7"}'))
    assert not model.admits(model.matcher(use), call("f", '{"n": 7, "x": 1}'))
    assert not model.admits(model.matcher(use), call("g", "{}"))
    text = model.sample(model.matcher(use), 0, call("f", "{")[: -len("}" + closing)])
    assert isinstance(read(use, text)[1][0][1]["n"], int)


def test_no_grammar_where_the_model_may_choose_and_nothing_is_strict() -> None:
    params = SamplingParams()
    assert Model("hermes").use([tool("f", COUNT)]).constrain(params) is params


def test_schemas_with_references_and_odd_names() -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}, 'q"\\/é': {"enum": ["a/b", '"', "\n"]}},
        "required": ["p", 'q"\\/é'],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
        "x-guidance": {"whitespace_flexible": True},
    }
    model = Model("hermes")
    use = model.use([tool("f", schema), tool("g", COUNT)], tool_choice="required")
    names = set()
    for seed in range(6):
        [(name, arguments)] = read(use, model.sample(model.matcher(use), seed))[1]
        jsonschema.validate(arguments, {"f": schema, "g": COUNT}[name])
        names.add(name)
    assert names == {"f", "g"}


# Beside answers of a given form


@pytest.mark.parametrize("marks_are", ["text", "added"])
def test_a_json_answer_or_calls(marks_are: str) -> None:
    model = Model("hermes", marks_are)
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    schema |= {"required": ["answer"], "additionalProperties": False}
    params = SamplingParams(grammar=Grammar("json_schema", json.dumps(schema)))
    use = model.use([tool("f", COUNT)])
    assert model.admits(model.matcher(use, params), '{"answer":3}')
    assert not model.admits(model.matcher(use, params), '{"answer":"3"}')
    assert not model.admits(model.matcher(use, params), "text")
    text = model.sample(model.matcher(use, params), 0, "<tool_call>")
    assert isinstance(read(use, text)[1][0][1]["n"], int)
    any_object = SamplingParams(grammar=Grammar("json_object", ""))
    assert model.admits(model.matcher(use, any_object), '{"a":[]}')


@pytest.mark.parametrize(
    ("format_name", "fields", "kind", "param"),
    [
        ("hermes", {"tool_choice": "required"}, "json_schema", "tool_choice"),
        ("hermes", {}, "regex", "tools"),
        ("llama3_json", {}, "json_schema", "tools"),
    ],
)
def test_forms_that_exclude_calls(
    format_name: str, fields: dict[str, Any], kind: str, param: str
) -> None:
    use = Model(format_name).use([tool("f")], **fields)
    with pytest.raises(RequestError) as refused:
        use.constrain(SamplingParams(grammar=Grammar(kind, "{}")))
    assert refused.value.param == param


def test_a_schema_that_cannot_be_followed_is_named() -> None:
    use = Model("hermes").use(
        [tool("f"), tool("g", {"properties": {"a": {"type": "nonsense"}}})], tool_choice="required"
    )
    with pytest.raises(RequestError, match=r"parameters of g: .*nonsense") as refused:
        use.constrain(SamplingParams())
    assert refused.value.param == "tools"


def test_a_model_whose_way_of_calling_is_not_known() -> None:
    tokenizer = tokenizer_with((), False)
    template = ChatTemplate("{{ tools }}")
    support = ToolSupport.build(template, "the template of x", None, True, tokenizer, [EOS])
    with pytest.raises(RequestError, match=r"the template of x.*--tool_call_parser"):
        requested(ChatBody(messages=[], tools=[tool("f")]), support)
