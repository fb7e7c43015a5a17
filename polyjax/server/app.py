"""The routes of the HTTP API as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from polyjax.core.errors import RequestError
from polyjax.server import admin, completions, maintenance, probes, promotions, tokens
from polyjax.server.endpoint import Endpoint, Handler
from polyjax.server.errors import error_body
from polyjax.server.service import Service


def build_app(service: Service) -> ASGIApp:
    """Returns the application. Routes under /admin exist only if there is an admin key."""
    config = service.config

    def route(
        path: str, handler: Handler, methods: Sequence[str] = ("GET",), keys: Sequence[str] = ()
    ) -> Route:
        return Route(path, Endpoint(service, handler, keys), methods=list(methods))

    post, keys = ("POST",), config.api_key
    routes = [
        route("/v1/chat/completions", completions.complete_chat, post, keys),
        route("/v1/completions", completions.complete_text, post, keys),
        route("/v1/models", probes.models, keys=keys),
        route("/v1/models/{name:path}", probes.one_model, keys=keys),
        route("/tokenize", tokens.tokenize, post, keys),
        route("/detokenize", tokens.detokenize, post, keys),
        route("/tokenizer_info", tokens.tokenizer_info, keys=keys),
        route("/health", probes.health),
        route("/ping", probes.health, ("GET", "POST")),
        route("/ready", probes.ready),
        route("/metrics", probes.metrics),
        route("/version", probes.version),
    ]
    if config.admin_key is not None:
        admins, both = (config.admin_key,), ("GET", "POST")
        commands = promotions.commands
        routes += [
            route("/admin/plan", admin.plan, ("GET", "POST"), admins),
            route("/admin/plan/rollback", admin.roll_back, post, admins),
            route("/admin/plan/proposals", commands(None, "plan/propose"), post, admins),
            route("/admin/plan/proposals/{proposal_id:int}", promotions.proposal, keys=admins),
            route("/admin/events", promotions.events, keys=admins),
            route("/admin/limits", commands("limits", "limits/set"), both, admins),
            route("/admin/ladder", commands("ladder", "ladder/set"), both, admins),
            route("/admin/tune/lease", commands(None, "tune/lease"), post, admins),
            route("/admin/tune/check", commands(None, "tune/check"), post, admins),
            route("/admin/tune/release", commands(None, "tune/release"), post, admins),
            route("/admin/kernels", admin.kernels, ("GET", "POST"), admins),
            route("/admin/stats", admin.statistics, keys=admins),
            route("/admin/weights", maintenance.weights, ("GET", "POST"), admins),
            route("/admin/sleep", maintenance.sleep, post, admins),
            route("/admin/wake", maintenance.wake, post, admins),
            route("/admin/is_sleeping", maintenance.is_sleeping, keys=admins),
            route("/sleep", maintenance.vllm_sleep, post, admins),
            route("/wake_up", maintenance.vllm_wake_up, post, admins),
            route("/is_sleeping", maintenance.is_sleeping, keys=admins),
        ]
    app: ASGIApp = Starlette(routes=routes, exception_handlers={HTTPException: _routing_error})
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path}: {error.detail}"
    status, body = error_body(RequestError(reason, status=error.status_code))
    return Response(body, status, dict(error.headers or {}), media_type="application/json")
