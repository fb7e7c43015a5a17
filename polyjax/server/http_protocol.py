"""uvicorn's HTTP/1.1 connection with a limit on the size of a request's head, which it lacks."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_TOO_LARGE = b"\r\n".join(
    [
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"connection: close",
        b"content-length: 0",
        b"",
        b"",
    ]
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not end in time.

    Else they would fill the memory, as the parser keeps them until they are complete.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_complete()
