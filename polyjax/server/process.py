"""One HTTP process: uvicorn on a listening socket, from before the engine is ready until drained.

The first HTTP process lives in `polyjax.serve`. Further ones are started by it as
`python -m polyjax.server.process`, with a `WorkerLaunch` as JSON on standard input; later lines
there are commands, end-of-file means that the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.lifetime import parent_pipe, watch_parent
from polyjax.engine.client import EngineClient
from polyjax.io.files import ModelFiles, Progress, no_progress, open_model
from polyjax.server.app import build_app
from polyjax.server.config import ServerConfig
from polyjax.server.http_protocol import BoundedHttpProtocol
from polyjax.server.placeholder_tokenizer import with_tokenizer
from polyjax.server.service import ServedModel, Service

KEEP_ALIVE_S = 75  # longer than the idle timeout of common load balancers, which close first
BACKLOG = 2048
SAMPLE_S = 0.25  # as often as the engine's heartbeat
ERROR_EVENT_S = 1.0  # what streams get to send their last event once the engine is dead
DRAIN = b"drain"  # what the parent writes to a worker ...
READY = "ready"  # ... and a worker to its parent

log = logging.getLogger("polyjax.server")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """What a further HTTP process is started with. `model` and `tokenizer` are as for --model."""

    config: ServerConfig
    address: str
    name: str
    model: str
    tokenizer: str | None
    has_random_weights: bool


class HttpServer:
    """Serves HTTP on `listener`: 503 until the engine is ready, then requests, until drained.

    Without a listener it opens one, sharing the port, when it is ready, so that no connection
    meets a process that is not while another one is.
    """

    def __init__(self, config: ServerConfig, client: EngineClient, listener: socket.socket | None):
        self.service = Service(config, client)
        self._listener = listener
        self._may_listen = asyncio.Event()
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self.service),
                http=BoundedHttpProtocol,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )

    async def run(
        self,
        files: Awaitable[ModelFiles],
        on_ready: Callable[[], None],
        others_ready: asyncio.Event | None = None,
    ) -> None:
        """Serves until `stop`. Raises PolyjaxError if the model or the engine cannot serve.

        Becomes ready once `files`, the engine and `others_ready` are. EngineDead comes after the
        running streams were told.
        """
        serving = asyncio.create_task(self._serve())
        life = asyncio.create_task(self._live(files, on_ready, others_ready))
        try:
            await asyncio.wait([serving, life], return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                await self.service.drained(ERROR_EVENT_S)
                self.stop()
                self._may_listen.set()
                await serving
                life.result()
        finally:
            life.cancel()

    async def drain(self) -> None:
        """Refuses new work, lets what runs finish within the timeout, then stops."""
        if not await self.service.drained(self.service.config.shutdown_timeout_s):
            log.warning("%d requests did not finish in time", self.service.num_open)
        self.stop()

    def stop(self) -> None:
        self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        if self._listener is None:
            await self._may_listen.wait()
        if self._listener is not None:
            await self._uvicorn.serve(sockets=[self._listener])

    async def _live(
        self,
        files: Awaitable[ModelFiles],
        on_ready: Callable[[], None],
        others_ready: asyncio.Event | None,
    ) -> None:
        """Becomes ready, then raises EngineDead some day."""
        opened = await files
        tokenizer = await asyncio.to_thread(opened.load_tokenizer)
        info = await self.service.client.ready()
        model = ServedModel.build(opened, tokenizer, info, self.service.config)
        if others_ready is not None:
            await others_ready.wait()
        self.service.become_ready(model)
        if self._listener is None:
            config = self.service.config
            self._listener = listen(config.host, config.port, shares_port=True)
            self._may_listen.set()
        on_ready()
        sampler = asyncio.create_task(self._sample())
        try:
            await self.service.client.died()
        finally:
            sampler.cancel()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.service.sample()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, shares_port: bool) -> socket.socket:
    """Returns a listening socket. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def open_served(
    model: str | None,
    tokenizer: str | None,
    progress: Progress = no_progress,
    has_random_weights: bool = False,
) -> ModelFiles:
    """Returns the model's files; tokenizer and chat template are those of `tokenizer` if named.

    A model with random weights may come without a tokenizer.
    """
    files = open_model(model, progress)
    if tokenizer is None:
        return with_tokenizer(files) if has_random_weights else files
    other = open_model(tokenizer, progress)
    return dataclasses.replace(
        files,
        open_tokenizer=other.open_tokenizer,
        tokenizer_config=other.tokenizer_config,
        chat_templates=other.chat_templates or files.chat_templates,
    )


async def work(launch: WorkerLaunch, parent: RawIOBase) -> int:
    """Runs a further HTTP process to its end; returns the exit code."""
    loop = asyncio.get_running_loop()
    client = EngineClient(launch.address, launch.name)
    client.connect()
    server = HttpServer(launch.config, client, listener=None)
    draining: list[asyncio.Task[None]] = []  # keeps the task alive

    def obey(line: bytes) -> None:
        if line == DRAIN:
            loop.call_soon_threadsafe(lambda: draining.append(loop.create_task(server.drain())))

    socket_folder = Path(launch.address.removeprefix("ipc://")).parent
    # A thread, not the kernel, ends this process, so that the sockets' folder can go with it.
    watch_parent(parent, obey, lambda: shutil.rmtree(socket_folder, ignore_errors=True))
    try:
        files = asyncio.to_thread(
            open_served,
            launch.model,
            launch.tokenizer,
            has_random_weights=launch.has_random_weights,
        )
        await server.run(files, lambda: print(READY, flush=True))
    except PolyjaxError as error:
        log.error("%s: %s", launch.name, error)
        return 1
    return 0


def main() -> None:
    # Ctrl-C and a group's SIGTERM reach every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging()
    parent = parent_pipe()
    launch = msgspec.json.decode(parent.readline(), type=WorkerLaunch)
    sys.exit(run_event_loop(work(launch, parent)))


def configure_logging() -> None:
    """Log lines look like the console's. `force`, because absl has put its own handler there."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s polyjax: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else every malformed request


def run_event_loop[T](main_task: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main_task)
    return asyncio.run(main_task, loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
    main()
