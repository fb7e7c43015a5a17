"""Renders a model's chat template: messages in, one prompt string out.

The template comes with the model, so it runs in jinja2's sandbox, where it can neither reach Python
objects nor change its arguments.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from polyjax.core.errors import ConfigError, RequestError

# Names that the caller may not set through chat_template_kwargs: other request fields own them.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A compiled template. Safe to use from several threads.

    `takes_tools` says whether it reads its variable `tools`; without that, tools never reach the
    model.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles `source`; `special_tokens` are variables of it, such as bos_token.

        Raises ConfigError if the template does not parse.
        """
        self._variables = dict(special_tokens or {})
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not parse (line {error.lineno}): {error.message}; "
                "name another with --chat_template"
            ) from error
        self.takes_tools = any(
            name.name == "tools" and name.ctx == "load"
            for name in parsed.find_all(jinja2.nodes.Name)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt; encode it without adding special tokens, it holds its own.

        `tools` and `tool_calls` are spelled as in OpenAI's API. `variables` are the request's
        chat_template_kwargs. With `continue_final_message` the prompt ends inside the last message,
        so that the model goes on with it. Raises RequestError where the messages do not fit the
        template.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        if reserved := _RESERVED & set(variables or {}):
            raise RequestError(
                f"{', '.join(sorted(reserved))} cannot be set here", "chat_template_kwargs"
            )
        arguments = {
            **self._variables,
            **(variables or {}),
            "messages": [_plain(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(arguments)
        except RequestError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, MemoryError) as error:
            kind = type(error).__name__
            raise RequestError(
                f"the chat template failed on these messages ({kind})", "messages"
            ) from error
        return _cut_after(text, messages) if continue_final_message else text


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: text parts joined, arguments of calls as mappings."""
    plain, content = dict(message), message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        plain["content"] = "".join(str(part.get("text", "")) for part in content)
    if isinstance(calls := message.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    """OpenAI's API has arguments as JSON text; Hugging Face templates get them as a mapping.

    Text that is no JSON object, which a model may have written, stays text.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(arguments)}}


class _Arguments(dict[str, Any]):
    """Arguments that also read as JSON, for templates (DeepSeek-V3's) that put them into a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


def _cut_after(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns `text` up to the end of the last message's content."""
    content = _plain(messages[-1]).get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message with text", "continue_final_message"
        )
    # Many templates strip a message; its inner text is what can be found again.
    for wanted in (content, content.strip()):
        at = text.rfind(wanted)
        if at >= 0:
            return text[: at + len(wanted)]
    raise RequestError(
        "the chat template changes the last message, so it cannot be continued",
        "continue_final_message",
    )


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which would put &#39; into prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
