"""What orchestrators, balancers and scrapers ask: models, health, readiness, metrics, version."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import RequestError
from polyjax.server.errors import send_json
from polyjax.server.service import ServedModel, Service


async def health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """200 while the engine starts, and then as long as it finishes steps."""
    client, limit_s = service.client, service.config.health_timeout_s
    if client.is_dead:
        raise RequestError("the engine process has ended", status=503)
    if client.info is not None and client.heartbeat_age_s > limit_s:
        raise RequestError(
            f"no engine step has ended for {client.heartbeat_age_s:.0f} s", status=503
        )
    await send_json(send, 200, b"{}")


async def ready(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """200 exactly while new requests are taken."""
    service.model_for_work()
    await health(service, scope, receive, send)


async def models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    card = _model_card(service.ready_model(), service)
    await send_json(send, 200, msgspec.json.encode({"object": "list", "data": [card]}))


async def one_model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    model = service.ready_model()
    model.check_name(scope["path_params"]["name"])
    await send_json(send, 200, msgspec.json.encode(_model_card(model, service)))


def _model_card(model: ServedModel, service: Service) -> dict[str, Any]:
    return {
        "id": model.info.model_name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "polyjax",
        "root": service.client.stats.weights_path or model.info.model_path,
        "parent": None,
        "weights_digest": service.client.stats.weights_digest,
        "max_model_len": model.info.max_model_len,
    }


async def metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = b"" if service.metrics is None else service.metrics.render()
    headers = [
        (b"content-type", CONTENT_TYPE_LATEST.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def version(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    answer = {"version": polyjax_version()}
    if service.model is not None:
        info = service.model.info
        answer |= {"device": info.device, "dtype": info.dtype, "plan": info.plan_digest}
    await send_json(send, 200, msgspec.json.encode(answer))


def polyjax_version() -> str:
    """The installed version; that of a checkout that is not installed is not known."""
    try:
        return importlib.metadata.version("polyjax")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
