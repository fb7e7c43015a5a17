"""Errors as OpenAI's clients know them: a status and {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging

import msgspec
from starlette.types import Send

from polyjax.core.errors import EngineDead, PolyjaxError, RequestError

RETRY_AFTER_S = 1
MAX_MESSAGE_CHARACTERS = 2000

log = logging.getLogger("polyjax.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_status(error: Exception) -> int:
    match error:
        case RequestError():
            return error.status
        case EngineDead():
            return 503
        case PolyjaxError():
            return 400
    return 500


def error_body(error: Exception) -> tuple[int, bytes]:
    """Returns the HTTP status and JSON body for an error. What was not meant for clients stays."""
    status = error_status(error)
    if isinstance(error, PolyjaxError):
        message = str(error)[:MAX_MESSAGE_CHARACTERS]
    else:
        message = "internal error; the server's log has the details"
    content = {
        "message": message,
        "type": _TYPES.get(status, "internal_server_error" if status >= 500 else _TYPES[400]),
        "param": error.param if isinstance(error, RequestError) else None,
        "code": status,
    }
    return status, msgspec.json.encode({"error": content})


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: Exception) -> None:
    """Answers with an error; asks to come back where that can help."""
    status, body = error_body(error)
    headers: list[tuple[bytes, bytes]] = []
    if status in (429, 503):
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send_json(send, status, body, headers)
