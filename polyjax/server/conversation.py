"""Chat messages from requests, checked and brought into the form that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.errors import RequestError
from polyjax.server.protocol import ChatBody, TokenizeBody
from polyjax.server.service import ServedModel
from polyjax.server.tools import for_template

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with contents as plain texts, without fields that are null.

    Raises RequestError naming the field that is wrong.
    """
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise RequestError(f"{where}.content is missing", f"{where}.content")
        content = ""
    if not isinstance(message.get("tool_call_id", ""), str) or (
        role == "tool" and "tool_call_id" not in message
    ):
        field = f"{where}.tool_call_id"
        raise RequestError(f"{field} must be the id of the call that this answers", field)
    given = {key: value for key, value in message.items() if value is not None}
    if calls := given.pop("tool_calls", None):
        given["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return {**given, "content": _text(content, f"{where}.content")}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with the fields in the order in which models write them."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", where)
    ordered = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise RequestError(f"{where}[{i}] must be a call of a function", f"{where}[{i}]")
        for field in ("name", "arguments"):
            if not isinstance(function.get(field), str):
                field = f"{where}[{i}].function.{field}"
                raise RequestError(f"{field} must be a string", field)
        spelled = {"name": function["name"], "arguments": function["arguments"]}
        ordered.append({**call, "type": "function", "function": spelled})
    return ordered


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(f"{where}: only parts of type text are supported", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", f"{where}.text")
    return text


def render(model: ServedModel, body: ChatBody | TokenizeBody) -> str:
    """Returns the prompt that the chat template makes of a body's messages and tools.

    Tools that are not to be called are left out. Raises RequestError.
    """
    messages = conversation(body.messages or [])
    is_off = isinstance(body, ChatBody) and body.tool_choice == "none"
    tools = None if is_off or not body.tools else for_template(body.tools)
    template = model.tools.template_for_tools() if tools else model.template
    if template is None:
        raise RequestError(
            "the model has no chat template; use /v1/completions or start the server with "
            "--chat_template",
            "messages",
        )
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    adds_prompt = body.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not body.continue_final_message
    return template.render(
        messages,
        tools=tools,
        add_generation_prompt=adds_prompt,
        continue_final_message=body.continue_final_message,
        variables=variables,
    )
