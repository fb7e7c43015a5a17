"""The main process: HTTP, and the engine process and further HTTP processes as its children.

However one of them ends, the others end too: children notice their parent's end by themselves, and
this process watches its children. The tuner is the exception: it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from polyjax.children import Child, start_child
from polyjax.console import Console
from polyjax.core.errors import EngineDead, PolyjaxError
from polyjax.engine.client import EngineClient
from polyjax.engine.process import Launch
from polyjax.engine.scripted import Script
from polyjax.engine.types import EngineConfig
from polyjax.io.files import ModelFiles
from polyjax.server.config import ServerConfig
from polyjax.server.process import DRAIN, HttpServer, WorkerLaunch, listen, open_served
from polyjax.tuner import EXIT_REFUSED, TunerConfig, TunerLaunch

STOP_TIMEOUT_S = 10.0  # for children to end once they have nothing left to do
EXIT_INTERRUPTED = 130  # as shells report Ctrl-C
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0  # between two tuners, doubled each time
SOUND_AFTER_S = 600.0  # a tuner that lived so long begins with the first back-off again

log = logging.getLogger("polyjax.serve")


class Supervisor:
    """Runs one server. `folder`, private to it, holds the sockets between its processes."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        tuner: TunerConfig,
        script: Script | None,
        folder: Path,
    ):
        self._config = config
        self._engine_config = engine
        self._tuner_config = tuner
        self._script = script
        self._has_random_weights = engine.load_format == "dummy"
        self._folder = folder
        self._address = f"ipc://{folder}/engine"
        self._engine: Child | None = None
        self._tuner: Child | None = None
        self._tuning: asyncio.Task[None] | None = None
        self._workers: list[Child] = []
        self._workers_ready = asyncio.Event()
        self._shutdown: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serves until a signal or a failure. Returns the exit code: 0 after a drain.

        Raises ConfigError if the address cannot be listened on.
        """
        shares_port = self._config.api_server_count > 1
        listener = listen(self._config.host, self._config.port, shares_port)
        self._config = dataclasses.replace(self._config, port=listener.getsockname()[1])
        self._client = EngineClient(self._address, "http0")
        self._client.connect()
        self._console = Console(self._config, self._client)
        self._http = HttpServer(self._config, self._client, listener)
        self._console.listening()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._serve()
        finally:
            await self._end_children()

    async def _serve(self) -> int:
        files = asyncio.create_task(self._open_files())
        serving = asyncio.create_task(
            self._http.run(asyncio.shield(files), self._on_ready, self._workers_ready)
        )
        failing = asyncio.create_task(self._start_and_watch(files))
        await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
        if self._shutdown is not None:
            await self._shutdown
            return 0
        try:
            if failing.done() and (reason := failing.result()):
                self._client.fail(reason)
            await serving
        except PolyjaxError as error:
            log.error("%s", error)
        return 1

    async def _open_files(self) -> ModelFiles:
        config = self._engine_config
        return await asyncio.to_thread(
            open_served,
            config.model,
            config.tokenizer,
            self._console.fetch_progress,
            self._has_random_weights,
        )

    async def _start_and_watch(self, opening: asyncio.Task[ModelFiles]) -> str:
        """Starts the children; returns why, once one of them has ended."""
        files = await opening
        name = self._engine_config.served_model_name or files.name
        config = dataclasses.replace(
            self._engine_config, model=str(files.path), served_model_name=name
        )
        launch = Launch(self._address, config, self._script)
        self._engine = await start_child("polyjax.engine.process", msgspec.json.encode(launch))
        for number in range(1, self._config.api_server_count):
            worker = WorkerLaunch(
                self._config,
                self._address,
                f"http{number}",
                str(files.path),
                config.tokenizer,
                self._has_random_weights,
            )
            first_line = msgspec.json.encode(worker)
            self._workers.append(
                await start_child("polyjax.server.process", first_line, pipes_output=True)
            )
        waiting = asyncio.create_task(self._wait_for_workers())
        self._tuning = asyncio.create_task(self._keep_tuner(config))
        ends = {
            asyncio.create_task(child.wait()): name
            for child, name in [
                (self._engine, "the engine process"),
                *((worker, "an HTTP process") for worker in self._workers),
            ]
        }
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        first = done.pop()
        return f"{ends[first]} ended with code {first.result()}"

    async def _wait_for_workers(self) -> None:
        for worker in self._workers:
            assert worker.stdout is not None
            if not await worker.stdout.readline():
                return  # it has ended, which is noticed elsewhere
        self._workers_ready.set()

    async def _keep_tuner(self, config: EngineConfig) -> None:
        """Starts the tuner, and another one whenever it ends. Nothing here ends the server."""
        if self._tuner_config.tune != "background" or self._script is not None:
            return
        launch = TunerLaunch(self._address, config, self._tuner_config, str(self._folder))
        with contextlib.suppress(EngineDead):  # then there is nothing to tune, which others tell
            await self._client.ready()  # it competes with nothing that a start has to wait for
        backoff_s = FIRST_BACKOFF_S
        while not self._client.is_dead:
            started_s = time.monotonic()
            try:
                self._tuner = await start_child("polyjax.tuner", msgspec.json.encode(launch))
                code: int | str = await self._tuner.wait()
            except OSError as error:
                code = str(error)
            if code == EXIT_REFUSED:
                log.error("tuning in the background is off: the tuner cannot be used like this")
                return
            if time.monotonic() - started_s > SOUND_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            log.warning("the tuner ended with %s; another one in %g s", code, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    def _on_ready(self) -> None:
        self._console.ready()
        if not self._workers and self._tuner_config.tune == "off":
            # Everybody is connected: the folder need not outlive a kill -9.
            shutil.rmtree(self._folder, ignore_errors=True)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._shut_down())
        elif number == signal.SIGINT:
            for child in self._children():
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(EXIT_INTERRUPTED)

    def _stop_tuner(self) -> None:
        if self._tuning is not None:
            self._tuning.cancel()
        if self._tuner is not None and self._tuner.returncode is None:
            self._tuner.kill()

    async def _shut_down(self) -> None:
        """Lets running requests finish within the timeout, in all HTTP processes."""
        self._stop_tuner()
        if self._http.service.model is None:
            self._http.stop()
            return
        self._console.draining(self._http.service.num_open)
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(DRAIN + b"\n")
        waits: list[Coroutine[Any, Any, Any]] = [worker.wait() for worker in self._workers]
        limit_s = self._config.shutdown_timeout_s + STOP_TIMEOUT_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self._http.drain(), *waits), limit_s)

    async def _end_children(self) -> None:
        """Stops the engine in order if it can be; kills what is left."""
        self._stop_tuner()
        in_order = self._shutdown is not None and self._client.info is not None
        if in_order and self._engine is not None and self._engine.returncode is None:
            self._client.stop_engine()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.wait(), STOP_TIMEOUT_S)
        for child in self._children():
            if child.returncode is None:
                child.kill()
                await child.wait()

    def _children(self) -> list[Child]:
        others = (self._engine, self._tuner)
        return self._workers + [child for child in others if child is not None]
