"""The HTTP processes' end of the engine: requests in, outputs out, on an asyncio loop. No jax."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from polyjax.core.errors import EngineDead, PolyjaxError, RequestError
from polyjax.engine import messages
from polyjax.engine.messages import ToEngine
from polyjax.engine.types import EngineInfo, EngineStats, FinishReason, Request, RequestOutput

Sink = Callable[[RequestOutput | PolyjaxError], None]
"""Gets a request's outputs as they arrive, or the one error that ends it."""

MESSAGES_AT_ONCE = 16  # then others on the event loop get their turn

log = logging.getLogger("polyjax.client")


class EngineClient:
    """One HTTP process's connection to the engine process.

    Everything runs on the event loop that `connect` is called on; nothing here blocks. When the
    engine's end of the socket closes, every request and call in flight gets EngineDead at once.
    """

    def __init__(self, address: str, name: str):
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.progress: messages.Progress | None = None
        self.on_progress: Callable[[messages.Progress], None] = lambda progress: None
        self._address = address
        self._name = name
        self._sinks: dict[str, Sink] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = itertools.count()
        self._heartbeat_s = time.monotonic()
        self._death: EngineDead | None = None

    def connect(self) -> None:
        """Opens the connection. The engine process need not exist yet."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead: asyncio.Future[None] = self._loop.create_future()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._name.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)  # ms; until the engine process has bound
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._address)
        for socket in (self._socket, self._monitor):
            self._loop.add_reader(socket.fileno(), self._drain)
        self._send(messages.Hello())

    async def ready(self) -> EngineInfo:
        """Waits until the engine serves. Raises EngineDead if it never will."""
        return await asyncio.shield(self._ready)

    async def died(self) -> None:
        """Waits for the end of the engine. Raises EngineDead then, never returns."""
        await asyncio.shield(self._dead)

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last said, between two steps, that it is alive."""
        return time.monotonic() - self._heartbeat_s

    @property
    def num_in_flight(self) -> int:
        return len(self._sinks)

    def submit(self, request: Request, sink: Sink) -> None:
        """Sends a request whose outputs go to `sink`. Raises EngineDead."""
        if self._death is not None:
            raise self._death
        self._sinks[request.id] = sink
        self._send(messages.Add(request))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forgets requests; their pages are free before the next step. Unknown ids are ignored."""
        known = [i for i in request_ids if self._sinks.pop(i, None) is not None]
        if known and self._death is None:
            self._send(messages.Abort(known))

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yields a request's outputs; leaving early aborts it. Raises RequestError, EngineDead."""
        arrived: asyncio.Queue[RequestOutput | PolyjaxError] = asyncio.Queue()
        self.submit(request, arrived.put_nowait)
        try:
            while True:
                output = await arrived.get()
                if isinstance(output, PolyjaxError):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort([request.id])

    async def admin(self, command: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Runs an admin command in the engine. Raises RequestError, EngineDead."""
        if self._death is not None:
            raise self._death
        call_id = next(self._call_ids)
        call = self._calls[call_id] = self._loop.create_future()
        self._send(messages.Admin(call_id, command, payload))
        try:
            return await call
        finally:
            self._calls.pop(call_id, None)

    def stop_engine(self) -> None:
        """Asks the engine process to close the engine and end."""
        if self._death is None:
            self._send(messages.Stop())

    def fail(self, reason: str) -> None:
        """Declares the engine dead: everything in flight and everything later gets EngineDead."""
        if self._death is not None:
            return
        self._death = EngineDead(reason)
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            self._deliver(request_id, sink, self._death)
        futures: list[asyncio.Future[Any]] = [self._ready, self._dead, *self._calls.values()]
        for future in futures:
            if not future.done():
                future.set_exception(self._death)
                future.exception()  # it may be that nobody waits for this one

    def close(self) -> None:
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _send(self, message: ToEngine) -> None:
        self._socket.send(messages.encode(message), zmq.NOBLOCK)
        # The descriptor signals edges: a message that came during the send signals no more.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._socket.closed:
            return
        for _ in range(MESSAGES_AT_ONCE):
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._receive(messages.decode_from_engine(payload))
        else:
            self._loop.call_soon(self._drain)
            return
        if not self._monitor.closed and self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self.fail("the engine process ended")

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.StepOutputs():
                for output in messages.unpack_outputs(message):
                    self._route(output)
            case messages.Heartbeat(stats):
                self.stats = stats
                self._heartbeat_s = time.monotonic()
            case messages.Refused(request_id, reason, param, status):
                if (sink := self._sinks.pop(request_id, None)) is not None:
                    self._deliver(request_id, sink, RequestError(reason, param, status))
            case messages.AdminReply():
                self._answer_call(message)
            case messages.Progress():
                self.progress = message
                self.on_progress(message)
            case messages.Ready(info):
                self.info = info
                self._heartbeat_s = time.monotonic()
                if not self._ready.done():
                    self._ready.set_result(info)
            case messages.Failed(reason):
                self.fail(reason)

    def _route(self, output: RequestOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return  # aborted meanwhile
        if output.finish_reason is not None:
            del self._sinks[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            status = output.error_status or (400 if output.error_param else 500)
            error = RequestError(output.error or "the request failed", output.error_param, status)
            self._deliver(output.request_id, sink, error)
        else:
            self._deliver(output.request_id, sink, output)

    def _deliver(self, request_id: str, sink: Sink, item: RequestOutput | PolyjaxError) -> None:
        try:
            sink(item)
        except Exception:  # one request's failure stays its own
            log.exception("request %s: its output could not be taken", request_id)
            self.abort([request_id])

    def _answer_call(self, reply: messages.AdminReply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None or call.done():
            return
        if reply.error is None:
            call.set_result(reply.result)
        else:
            call.set_exception(RequestError(reply.error, reply.param, reply.status))
