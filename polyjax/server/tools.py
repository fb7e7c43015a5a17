"""The tools of a chat request: which functions, whether and how the model is to call them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.errors import RequestError
from polyjax.engine.types import Grammar, SamplingParams
from polyjax.io import grammar
from polyjax.server.protocol import ChatBody
from polyjax.server.tool_formats.contract import Calls, Function, Marks, ToolFormat
from polyjax.server.tool_support import ToolSupport

MAX_TOOLS = 128  # OpenAI's, as is the pattern
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")
_ANY_ARGUMENTS = {"type": "object"}
# Keywords that say more about an object's properties than `properties` does.
_FURTHER_KEYWORDS = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of its tools.

    `functions` are those that may be called. `is_required` says that one has to be; `is_named`,
    that the request names it, and it is to be called once. Unless `is_parallel`, one call is all.
    """

    functions: tuple[Function, ...]
    format: ToolFormat
    marks: Marks
    is_required: bool
    is_named: bool
    is_parallel: bool

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with the grammar that the calls need, if they need one.

        Calls that are required follow their functions' schemas, as do those of strict functions.
        Beside a JSON answer, calls are what the model may write in its place.
        """
        if self.is_required or params.grammar is not None:
            functions = [_closed(function) for function in self.functions]
            calls = Calls.SOME if self.is_parallel and not self.is_named else Calls.ONE
        elif any(function.strict for function in self.functions):
            functions = [
                _closed(function)
                if function.strict
                else dataclasses.replace(function, parameters=_ANY_ARGUMENTS)
                for function in self.functions
            ]
            calls = Calls.ANY
        else:
            return params
        rules = self.format.grammar(functions, calls, self.marks)
        start = f"start: calls{self._or_answer(params.grammar)}\n"
        _check(functions, start + rules)
        return dataclasses.replace(params, grammar=Grammar("grammar", start + rules))

    def _or_answer(self, answer: Grammar | None) -> str:
        """The answer that the model may give in place of calls, as an alternative to them."""
        if answer is None:
            return ""
        if self.is_required:
            raise RequestError(
                "tool_choice asks for a call and another field for an answer of a given form; "
                "leave one of them out",
                "tool_choice",
            )
        if self.format.is_bare_json:
            raise RequestError(
                "this model's calls are JSON themselves and cannot be told from an answer of a "
                "given form; leave out tools or the form",
                "tools",
            )
        if answer.kind not in ("json_schema", "json_object"):
            raise RequestError(
                f"tools go together with an answer in JSON, not with one by {answer.kind}", "tools"
            )
        schema = json.loads(answer.text) if answer.kind == "json_schema" else _ANY_ARGUMENTS
        if not isinstance(schema, dict):  # `true`, which any JSON satisfies
            schema = {}
        return f" | %json {json.dumps({**schema, 'x-guidance': grammar.COMPACT})}"


def requested(body: ChatBody, support: ToolSupport) -> ToolUse | None:
    """Returns what a request wants of tools; None where the model is to call none.

    Raises RequestError naming the field that is wrong, or that this server cannot serve.
    """
    functions = read_functions(body.tools)
    choice = "auto" if functions else "none"
    name = None
    if isinstance(body.tool_choice, dict):
        choice, name = "named", _named(body.tool_choice)
    elif body.tool_choice is not None:
        choice = body.tool_choice
    if choice not in (*_MODES, "named"):
        raise RequestError(
            f'tool_choice must be one of {", ".join(_MODES)}, or {{"type": "function", '
            '"function": {"name": ...}}',
            "tool_choice",
        )
    if choice == "none":
        return None
    if not functions:
        raise RequestError("tool_choice needs tools", "tool_choice")
    if name is not None:
        functions = tuple(function for function in functions if function.name == name)
        if not functions:
            raise RequestError(f"tool_choice: tools has no function {name!r}", "tool_choice")
    return ToolUse(
        functions,
        support.format_for(is_auto=choice == "auto"),
        support.marks,
        is_required=choice != "auto",
        is_named=choice == "named",
        is_parallel=body.parallel_tool_calls is not False,
    )


def for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools that `read_functions` accepted, as chat templates expect them, in their usual order."""
    shown = []
    for tool in tools:
        given = {k: v for k, v in tool["function"].items() if k != "strict" and v is not None}
        usual = {"name": given["name"], "description": "", "parameters": _NO_PARAMETERS}
        shown.append({"type": "function", "function": {**usual, **given}})
    return shown


_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def read_functions(tools: Sequence[Any] | None) -> tuple[Function, ...]:
    """Returns the functions of a body's `tools`. Raises RequestError naming the field."""
    if len(tools or ()) > MAX_TOOLS:
        raise RequestError(f"tools has more than {MAX_TOOLS} entries", "tools")
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    seen: set[str] = set()
    for i, function in enumerate(functions):
        if function.name in seen:
            where = f"tools[{i}].function.name"
            raise RequestError(f"{where}: {function.name!r} is there twice", where)
        seen.add(function.name)
    return functions


def _function(tool: Mapping[str, Any], where: str) -> Function:
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type must be function", f"{where}.type")
    where += ".function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where} must be an object", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must match {_NAME.pattern}", f"{where}.name")
    for field, kind, what in (("description", str, "a string"), ("strict", bool, "a boolean")):
        if not isinstance(function.get(field), kind | None):
            raise RequestError(f"{where}.{field} must be {what}", f"{where}.{field}")
    return Function(
        name,
        _parameters(function.get("parameters"), f"{where}.parameters"),
        bool(function.get("strict")),
    )


def _parameters(schema: Any, where: str) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object; no schema: it takes none."""
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict):
        raise RequestError(f"{where} must be a JSON schema, an object", where)
    if schema.get("type", "object") != "object":
        raise RequestError(f'{where}.type must be "object"', f"{where}.type")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(value, dict | bool) for value in properties.values()
    ):
        raise RequestError(
            f"{where}.properties must map names to JSON schemas", f"{where}.properties"
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required must be a list of names", f"{where}.required")
    return {"type": "object", **schema}


def _named(choice: Mapping[str, Any]) -> str:
    kind, function = choice.get("type"), choice.get("function")
    if kind != "function":
        raise RequestError('tool_choice.type must be "function"', "tool_choice.type")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice.function.name is missing", "tool_choice.function.name")
    return name


def _closed(function: Function) -> Function:
    """A function whose schema lists its parameters takes no others, whether that is said or not."""
    if _FURTHER_KEYWORDS & function.parameters.keys() or "properties" not in function.parameters:
        return function
    return dataclasses.replace(
        function, parameters={**function.parameters, "additionalProperties": False}
    )


def _check(functions: Sequence[Function], text: str) -> None:
    """Raises RequestError with the reason if the grammar `text` cannot be used."""
    try:
        grammar.check("grammar", text)
    except RequestError as error:
        for function in functions:
            try:
                grammar.check("json_schema", json.dumps(function.parameters))
            except RequestError as of_one:
                raise RequestError(
                    f"tools: parameters of {function.name}: {of_one}", "tools"
                ) from error
        raise RequestError(f"tools: {error}", "tools") from error
