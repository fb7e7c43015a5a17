"""The engine process: builds the engine, then turns messages into steps until told to stop.

Started by `polyjax.serve` as `python -m polyjax.engine.process`. The first line on standard input
is its `Launch` as JSON; end-of-file there means that the parent is gone.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import signal
import sys
import time
from collections import defaultdict
from typing import Protocol

import msgspec
import zmq

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.core.lifetime import kill_when_parent_ends, parent_pipe, watch_parent
from polyjax.engine import messages
from polyjax.engine.messages import ToEngine
from polyjax.engine.scripted import Script, ScriptedEngine
from polyjax.engine.types import (
    EngineConfig,
    EngineLike,
    EngineStats,
    Request,
    RequestOutput,
)

HEARTBEAT_S = 0.25
EXIT_REFUSED = 78  # EX_CONFIG of <sysexits.h>: this model or these flags cannot be served
EXIT_CRASHED = 70  # EX_SOFTWARE

log = logging.getLogger("polyjax.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """What the engine process is started with. `script` replaces the model by a scripted engine."""

    address: str
    config: EngineConfig
    script: Script | None = None


class ReportProgress(Protocol):
    def __call__(self, what: str, done: int, total: int) -> None: ...


class Channel:
    """The engine's end of the socket that all HTTP processes connect to."""

    def __init__(self, address: str):
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        # The engine neither waits for a slow HTTP process nor drops what it sent to it.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        self.clients: set[bytes] = set()

    def receive(self, timeout_s: float = 0.0) -> list[tuple[bytes, ToEngine]]:
        """Returns all messages that are there, after waiting up to `timeout_s` for a first one."""
        received: list[tuple[bytes, ToEngine]] = []
        if timeout_s and not self._socket.poll(int(timeout_s * 1000)):
            return received
        while True:
            try:
                client, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            self.clients.add(client)
            try:
                received.append((client, messages.decode_to_engine(payload)))
            except (msgspec.DecodeError, PolyjaxError):
                log.exception("dropped a message from %s that does not decode", client.decode())

    def send(self, client: bytes, message: messages.FromEngine) -> None:
        self._socket.send_multipart([client, messages.encode(message)])

    def broadcast(self, message: messages.FromEngine) -> None:
        for client in self.clients:
            self.send(client, message)

    def close(self) -> None:
        self._socket.close()
        zmq.Context.instance().term()


class EngineServer:
    """Runs an engine for the HTTP processes behind `channel`."""

    def __init__(self, engine: EngineLike, channel: Channel, max_queued_requests: int):
        self._engine = engine
        self._channel = channel
        self._max_queued_requests = max_queued_requests
        self._owners: dict[str, bytes] = {}
        self._is_stopping = False
        self._next_heartbeat_s = 0.0
        self._send_s = 0.0

    def run(self, early: list[tuple[bytes, ToEngine]]) -> None:
        """Serves until a `Stop` arrives. `early` came before the engine was ready."""
        self._channel.broadcast(messages.Ready(self._engine.info))
        for client, message in early:
            self._handle(client, message)
        while not self._is_stopping:
            idle_s = 0.0 if self._engine.has_work else HEARTBEAT_S
            for client, message in self._channel.receive(idle_s):
                self._handle(client, message)
            if self._engine.has_work and not self._is_stopping:
                self._send_outputs(self._engine.step())
            self._beat()

    def _handle(self, client: bytes, message: ToEngine) -> None:
        match message:
            case messages.Add(request):
                self._add(client, request)
            case messages.Abort(request_ids):
                for request_id in request_ids:
                    if self._owners.pop(request_id, None) is not None:
                        self._engine.abort(request_id)
            case messages.Admin():
                reply = self._admin(message)
                # Before the reply: who has it may rely on what the command changed.
                self._channel.broadcast(messages.Heartbeat(self._stats()))
                self._channel.send(client, reply)
            case messages.Hello():
                self._channel.send(client, messages.Ready(self._engine.info))
            case messages.Stop():
                self._is_stopping = True

    def _add(self, client: bytes, request: Request) -> None:
        try:
            waiting = self._engine.stats().waiting
            if waiting >= self._max_queued_requests:
                raise RequestError(f"{waiting} requests are waiting already", status=503)
            self._engine.add(request)
            self._owners[request.id] = client
        except RequestError as error:
            refusal = messages.Refused(request.id, str(error), error.param, error.status)
            self._channel.send(client, refusal)
        except Exception as error:  # one request's failure stays its own
            log.exception("request %s could not be added", request.id)
            refusal = messages.Refused(request.id, f"internal error: {error!r}", None, 500)
            self._channel.send(client, refusal)

    def _admin(self, message: messages.Admin) -> messages.AdminReply:
        try:
            result = self._engine.admin(message.command, message.payload)
            return messages.AdminReply(message.call_id, result)
        except RequestError as error:
            reason, param, status = str(error), error.param, error.status
        except PolyjaxError as error:
            reason, param, status = str(error), None, 400
        except Exception as error:
            log.exception("admin command %s failed", message.command)
            reason, param, status = f"internal error: {error!r}", None, 500
        return messages.AdminReply(message.call_id, {}, reason, param, status)

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        started_s = time.perf_counter()
        by_client: defaultdict[bytes, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue  # aborted while its step ran
            by_client[client].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for client, mine in by_client.items():
            self._channel.send(client, messages.pack_outputs(mine))
        self._send_s += time.perf_counter() - started_s

    def _stats(self) -> EngineStats:
        """The engine's, with the time that this process takes to send what the engine makes."""
        stats = self._engine.stats()
        return dataclasses.replace(stats, phase_s={**stats.phase_s, "send": self._send_s})

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + HEARTBEAT_S
            self._channel.broadcast(messages.Heartbeat(self._stats()))


def build_engine(launch: Launch, progress: ReportProgress) -> EngineLike:
    """Returns a ready engine. Raises ConfigError or ModelError where there can be none."""
    if launch.script is not None:
        return ScriptedEngine(launch.config, launch.script)
    from polyjax.engine.engine import Engine  # imports jax, which takes a second

    return Engine(launch.config, progress)


def serve(launch: Launch) -> int:
    """Builds the engine and serves until stopped; returns the exit code."""
    channel = Channel(launch.address)
    early: list[tuple[bytes, ToEngine]] = []

    def progress(what: str, done: int, total: int) -> None:
        early.extend(channel.receive())
        channel.broadcast(messages.Progress(what, done, total))

    failure, code = None, 0
    try:
        progress("starting", 0, 0)
        engine = build_engine(launch, progress)
        gc.collect()
        gc.freeze()  # what the model is made of stays: no collection needs to look at it again
        early.extend(channel.receive())
        try:
            EngineServer(engine, channel, launch.config.max_queued_requests).run(early)
        finally:
            engine.close()
    except PolyjaxError as error:
        log.error("%s", error)
        failure, code = str(error), EXIT_REFUSED
    except Exception as error:
        log.exception("the engine failed")
        failure, code = f"the engine failed: {error!r}", EXIT_CRASHED
    if failure is not None:
        channel.receive()  # learns of whoever connected meanwhile
        channel.broadcast(messages.Failed(failure))
    channel.close()
    return code


def main() -> None:
    kill_when_parent_ends()
    # Ctrl-C and a group's SIGTERM reach every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s engine: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)  # tells of every backend it does not find
    parent = parent_pipe()
    launch = msgspec.json.decode(parent.readline(), type=Launch)
    watch_parent(parent)
    sys.exit(serve(launch))


if __name__ == "__main__":
    main()
