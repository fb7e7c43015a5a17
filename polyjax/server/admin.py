"""/admin: the plan in force and the engine's statistics, for operators only."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import ConfigError, RequestError
from polyjax.core.kernel_source import read_source
from polyjax.server.endpoint import read_body
from polyjax.server.errors import send_json
from polyjax.server.service import Service


async def plan(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """GET tells the plan in force; POST installs the one that the JSON body describes."""
    service.ready_model()
    if scope["method"] == "POST":
        result = await service.client.admin(
            "plan/install", await read_payload(service, scope, receive)
        )
    else:
        result = await service.client.admin("plan", {})
    await send_json(send, 200, msgspec.json.encode(result))


async def roll_back(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.ready_model()
    result = await service.client.admin(
        "plan/rollback", await read_payload(service, scope, receive)
    )
    await send_json(send, 200, msgspec.json.encode(result))


async def kernels(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """GET tells of the kernel files that came; POST takes another: {"path", "op"?, "name"?}."""
    service.ready_model()
    if scope["method"] == "POST":
        payload = await read_payload(service, scope, receive)
        if not isinstance(path := payload.get("path"), str):
            raise RequestError("path must be a string: a Python file of the server's host", "path")
        try:
            # Here, not in the engine: a slow disk must not hold up a step.
            text = await asyncio.to_thread(read_source, Path(path))
        except ConfigError as error:
            raise RequestError(str(error), "path") from error
        result = await service.client.admin("kernels/add", {**payload, "text": text})
    else:
        result = await service.client.admin("kernels", {})
    await send_json(send, 200, msgspec.json.encode(result))


async def statistics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    model = service.ready_model()
    answer = {
        "info": dataclasses.asdict(model.info),
        "stats": dataclasses.asdict(service.client.stats),
        "heartbeat_age_s": service.client.heartbeat_age_s,
    }
    await send_json(send, 200, msgspec.json.encode(answer))


async def read_payload(service: Service, scope: Scope, receive: Receive) -> dict[str, Any]:
    """The JSON object in a request's body, {} without one. Raises RequestError."""
    raw = await read_body(scope, receive, service.config.max_body_bytes)
    try:
        payload = msgspec.json.decode(raw or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise RequestError("the body must be a JSON object")
    return payload
