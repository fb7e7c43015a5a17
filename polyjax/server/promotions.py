"""/admin: promotions, events, limits, ladder and leases. The payloads are those of engine/admin.py.

GET asks, POST changes. /admin/events is a stream of server-sent events where the client accepts
that, and a JSON object of what there is otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.server.admin import read_payload
from polyjax.server.endpoint import Handler, header
from polyjax.server.errors import send_json
from polyjax.server.service import Service
from polyjax.server.stream import EVENT_STREAM_HEADERS

EVENT_POLL_S = 0.5


def commands(asks: str | None, changes: str | None) -> Handler:
    """A handler whose GET runs one admin command and whose POST, with its body, another."""

    async def handle(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        service.ready_model()
        if scope["method"] == "POST":
            assert changes is not None  # routes name the methods
            payload = await read_payload(service, scope, receive)
            result = await service.client.admin(changes, payload)
        else:
            assert asks is not None
            result = await service.client.admin(asks, {})
        await send_json(send, 200, msgspec.json.encode(result))

    return handle


async def proposal(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """How far a proposal got."""
    service.ready_model()
    number = int(scope["path_params"]["proposal_id"])
    result = await service.client.admin("plan/proposal", {"proposal_id": number})
    await send_json(send, 200, msgspec.json.encode(result))


async def events(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Events numbered above `after`, at most `limit`; as a stream, all that follow, too."""
    service.ready_model()
    query = _numbers(scope, "after", "limit")
    result = await service.client.admin("events", query)
    if b"text/event-stream" not in (header(scope, b"accept") or b""):
        await send_json(send, 200, msgspec.json.encode(result))
        return
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        with contextlib.suppress(PolyjaxError):  # the engine ended, and the stream with it
            while not gone.done():
                body = b"".join(_as_event(event) for event in result["events"])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait([gone], timeout=EVENT_POLL_S)
                result = await service.client.admin("events", {"after": result["next"]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        gone.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_event(event: dict[str, Any]) -> bytes:
    head = f"id: {event['number']}\nevent: {event['kind']}\ndata: "
    return head.encode() + msgspec.json.encode(event) + b"\n\n"


def _numbers(scope: Scope, *known: str) -> dict[str, int]:
    """Query parameters that are whole numbers. Raises RequestError naming one that is not."""
    found = {}
    for name, values in parse_qs(scope["query_string"].decode("latin-1")).items():
        if name not in known:
            raise RequestError(f"unknown query parameter {name!r}", name)
        if not values[-1].isascii() or not values[-1].isdigit():
            raise RequestError(f"{name} must be a whole number, not {values[-1]!r}", name)
        found[name] = int(values[-1])
    return found
