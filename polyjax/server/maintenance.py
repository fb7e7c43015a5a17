"""/admin/weights, /admin/sleep and /admin/wake: what is on the devices, changed while serving.

The engine answers such commands at once and does the work beside its steps; these routes follow it
as far as the caller wants to know. /sleep, /wake_up and /is_sleeping are the same under the names
and with the query parameters that tools for vLLM use.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import RequestError
from polyjax.server.admin import read_payload
from polyjax.server.errors import send_json
from polyjax.server.service import Service

POLL_S = 0.02
CHECKING, UNFINISHED = ("checking",), ("checking", "loading", "pending")

Json = dict[str, Any]


async def weights(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """GET tells of weights in force and loads under way. POST loads others.

    A load that does not fit is answered with 409 and every reason. Others are answered once they
    are checked (202), or with "wait" true once they are in force (200).
    """
    service.ready_model()
    if scope["method"] == "GET":
        await _send(send, await service.client.admin("weights", {}))
        return
    payload = await read_payload(service, scope, receive)
    wait = payload.pop("wait", False)
    if not isinstance(wait, bool):
        raise RequestError("wait must be true or false", "wait")
    told = await service.client.admin("weights/load", payload)
    number = told["load"]
    while (load := _load(told, number))["state"] in (UNFINISHED if wait else CHECKING):
        await asyncio.sleep(POLL_S)
        told = await service.client.admin("weights", {})
    if load["state"] == "refused":
        raise RequestError("\n".join([f"{load['path']}:", *load["problems"]]), "path", 409)
    status = 202 if load["state"] in UNFINISHED else 200
    await _send(send, {"load": load, "current": told["current"]}, status)


async def sleep(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers once the devices' memory is free."""
    payload = await read_payload(service, scope, receive)
    await _fall_asleep(service, send, payload)


async def vllm_sleep(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    query = _query(scope, ("level",))
    level = query.get("level", "1")
    await _fall_asleep(service, send, {"level": int(level) if level.isdecimal() else level})


async def wake(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers once requests are taken again; 503 with the reason where it could not be woken."""
    await read_payload(service, scope, receive)
    await _wake_up(service, send)


async def vllm_wake_up(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    _query(scope, ())
    await _wake_up(service, send)


async def is_sleeping(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.ready_model()
    await _send(send, await service.client.admin("sleep", {}))


async def _fall_asleep(service: Service, send: Send, payload: Json) -> None:
    service.ready_model()
    told = await service.client.admin("sleep/begin", payload)
    told = await _once_settled(service, told)
    if not told["is_sleeping"]:
        raise RequestError(f"the engine stays awake: {told['error']}", status=503)
    await _send(send, told)


async def _wake_up(service: Service, send: Send) -> None:
    service.ready_model()
    told = await _once_settled(service, await service.client.admin("sleep/wake", {}))
    if told["is_sleeping"]:
        raise RequestError(f"the engine sleeps on: {told['error']}", status=503)
    await _send(send, told)


async def _once_settled(service: Service, told: Json) -> Json:
    while told["state"] not in ("awake", "asleep"):
        await asyncio.sleep(POLL_S)
        told = await service.client.admin("sleep", {})
    return told


def _load(told: Json, number: int) -> Json:
    for load in told["loads"]:
        if load["number"] == number:
            found: Json = load
            return found
    raise RequestError(f"load {number} is no longer known: many others have come since", status=404)


def _query(scope: Scope, known: tuple[str, ...]) -> dict[str, str]:
    """The query parameters. Raises RequestError for one that is not known here."""
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
    if unknown := sorted(set(query) - set(known)):
        raise RequestError(f"unknown query parameter {unknown[0]!r}", unknown[0])
    return query


async def _send(send: Send, answer: Json, status: int = 200) -> None:
    await send_json(send, status, msgspec.json.encode(answer))
