"""What every route does around its own work: read the body, check the key, answer errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive, Scope, Send

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.server.errors import send_error
from polyjax.server.generation import Disconnected
from polyjax.server.service import Service

log = logging.getLogger("polyjax.server")

Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]


class Endpoint:
    """An ASGI application around a handler, which raises only before its response starts.

    With `keys`, one of them must come as `Authorization: Bearer <key>`.
    """

    def __init__(self, service: Service, handler: Handler, keys: Sequence[str] = ()):
        self._service = service
        self._handler = handler
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_key(scope)
            await self._handler(self._service, scope, receive, send)
        except Disconnected:
            return
        except PolyjaxError as error:
            await send_error(send, error)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(send, error)

    def _check_key(self, scope: Scope) -> None:
        if not self._keys:
            return
        scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        # Compares with every key, so that the time taken does not tell which one is near.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise RequestError("a valid key must come as Authorization: Bearer <key>", status=401)


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a header; `name` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Returns the request's body. Raises RequestError (413) as soon as it is too large."""
    too_large = RequestError(f"the body is larger than {max_bytes} bytes", status=413)
    announced = header(scope, b"content-length")
    if announced is not None and int(announced) > max_bytes:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected("the client went away before its request was complete")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(pieces)
