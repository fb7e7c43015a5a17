"""What a request says of the form of its answer: JSON of a schema, a pattern, choices, a grammar.

Three spellings mean the same: OpenAI's `response_format`, vLLM's `structured_outputs`, and its
older `guided_*` fields. JSON is written without white space between its parts, whatever `strict`
says. Log-probabilities are those among the allowed tokens, before any other sampling parameter: so
has vLLM them by default, whose raw_logprobs follow the grammar's mask.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from polyjax.core.errors import ConfigError, RequestError
from polyjax.engine.types import Grammar
from polyjax.io.grammar import check

if TYPE_CHECKING:
    from polyjax.server.protocol import GenerationBody

_FORMATS = ("text", "json_object", "json_schema")
# Options of `structured_outputs` that would change what is allowed.
_REFUSED_OPTIONS = ("structural_tag", "whitespace_pattern", "disable_additional_properties")


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """A form that the field `field` asks for."""

    field: str
    grammar: Grammar


def requested_grammar(body: GenerationBody) -> Grammar | None:
    """Returns what the answer to `body` must match, None where that is free.

    Raises RequestError naming the field that is wrong, or a second one that asks for a form.
    """
    wishes = [
        *_response_format(body.response_format),
        *_structured_outputs(body.structured_outputs),
        *_guided(body),
    ]
    if not wishes:
        return None
    wish, *others = wishes
    if others:
        raise RequestError(
            f"{others[0].field} and {wish.field} both ask for a form of the answer; leave one of "
            "them out",
            others[0].field,
        )
    _check(wish)
    return wish.grammar


def _response_format(value: Mapping[str, Any] | None) -> Iterator[_Wish]:
    if value is None:
        return
    kind = value.get("type")
    if kind == "structural_tag":
        raise RequestError(
            "response_format.type structural_tag is not supported: tools write calls in a model's "
            "own form, and guided_grammar takes any other mixture of text and JSON",
            "response_format.type",
        )
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}", "response_format.type"
        )
    if kind == "json_object":
        yield _Wish("response_format", Grammar("json_object", ""))
    elif kind == "json_schema":
        where = "response_format.json_schema"
        described = value.get("json_schema")
        if not isinstance(described, dict):
            raise RequestError(f"{where} must be an object with a schema", where)
        if described.get("schema") is None:
            raise RequestError(f"{where}.schema is missing", f"{where}.schema")
        yield _json_schema(described["schema"], f"{where}.schema")


def _structured_outputs(value: Mapping[str, Any] | None) -> Iterator[_Wish]:
    for option in _REFUSED_OPTIONS:
        if value and value.get(option):
            where = f"structured_outputs.{option}"
            raise RequestError(f"{where} is not supported", where)
    yield from _by_kind(value or {}, "structured_outputs.")


def _guided(body: GenerationBody) -> Iterator[_Wish]:
    names = ("json", "regex", "choice", "grammar")
    yield from _by_kind({name: getattr(body, f"guided_{name}") for name in names}, "guided_")


def _by_kind(given: Mapping[str, Any], prefix: str) -> Iterator[_Wish]:
    """Forms by vLLM's names of their kinds."""
    if given.get("json") is not None:
        yield _json_schema(given["json"], f"{prefix}json")
    if given.get("json_object"):
        yield _Wish(f"{prefix}json_object", Grammar("json_object", ""))
    if given.get("choice") is not None:
        yield _Wish(f"{prefix}choice", Grammar("choice", json.dumps(given["choice"])))
    for kind in ("regex", "grammar"):
        text = given.get(kind)
        if text is None:
            continue
        if not isinstance(text, str):
            raise RequestError(f"{prefix}{kind} must be a string", f"{prefix}{kind}")
        yield _Wish(f"{prefix}{kind}", Grammar(kind, text))


def _json_schema(schema: Any, field: str) -> _Wish:
    """A schema is given as such or as its text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _Wish(field, Grammar("json_schema", text))


def _check(wish: _Wish) -> None:
    kind = wish.grammar.kind
    try:
        check(kind, wish.grammar.text)
    except (RequestError, ConfigError) as error:
        reason = str(error).removeprefix(f"{kind}: ")
        raise RequestError(f"{wish.field}: {reason}", wish.field) from error
