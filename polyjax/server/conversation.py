"""Chat messages from requests, checked and brought into the form that chat templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.errors import RequestError
from polyjax.server.protocol import ChatBody, TokenizeBody
from polyjax.server.service import ServedModel

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with contents as plain texts. Raises RequestError naming the field."""
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
    return {**message, "content": _text(content, f"{where}.content")}


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
    """Returns the prompt that the chat template makes of a body's messages. Raises RequestError."""
    messages = conversation(body.messages or [])
    if model.template is None:
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
    return model.template.render(
        messages,
        add_generation_prompt=adds_prompt,
        continue_final_message=body.continue_final_message,
        variables=variables,
    )
