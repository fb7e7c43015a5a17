"""The background tuner: a child process of a server that makes its plan better while it serves.

Started by `polyjax.serve --tune=background` as `python -m polyjax.tuner`; the first line on its
standard input is a `TunerLaunch` as JSON. It may die at any moment: the server does not notice, and
the next one goes on where the ledger stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from polyjax.core.errors import ConfigError, EngineDead
from polyjax.core.lifetime import (
    kill_when_parent_ends,
    parent_pipe,
    watch_parent,
    yield_to_serving,
)
from polyjax.engine.client import EngineClient
from polyjax.engine.types import EngineConfig, EngineInfo

EXIT_REFUSED = 78  # EX_CONFIG of <sysexits.h>: starting it again would not help

log = logging.getLogger("polyjax.tuner")


@dataclasses.dataclass(frozen=True, slots=True)
class TunerConfig:
    """What a server's flags say of its tuner. Every field is a flag of the same name."""

    tune: str = dataclasses.field(
        default="off",
        metadata={"help": "off, or background: make the plan better while serving."},
    )
    ledger: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "File in which tuning remembers every trial; its best plan is what the server "
            "starts with. Default for --tune: ledger.sqlite in --state_dir, else beside the "
            "compiled programs."
        },
    )
    tune_memory: float = dataclasses.field(
        default=0.05,
        metadata={"help": "Share of an accelerator's memory that the tuner measures in."},
    )

    def __post_init__(self) -> None:
        if self.tune not in ("off", "background"):
            raise ConfigError(f"--tune={self.tune}: must be off or background")
        if not 0.0 < self.tune_memory < 1.0:
            raise ConfigError("--tune_memory must be in (0, 1)")


@dataclasses.dataclass(frozen=True, slots=True)
class TunerLaunch:
    """What a tuner process is started with. `folder` is the server's private one."""

    address: str
    config: EngineConfig
    tuner: TunerConfig
    folder: str


class EngineCalls:
    """The engine's admin commands, for threads: a client on an event loop of its own."""

    def __init__(self, address: str):
        """Waits until the engine is ready. Raises EngineDead if it never will be."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        self._client, self.info = self._run(self._connect(address))
        asyncio.run_coroutine_threadsafe(self._end_with_engine(), self._loop)

    async def _connect(self, address: str) -> tuple[EngineClient, EngineInfo]:
        client = EngineClient(address, f"tuner-{os.getpid()}")
        client.connect()
        return client, await client.ready()

    async def _end_with_engine(self) -> None:
        """Whatever this process is at, its children end with it."""
        try:
            await self._client.died()
        except EngineDead as error:
            log.info("%s", error)
        os._exit(0)

    def call(self, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Runs an admin command. Raises RequestError, EngineDead."""
        return self._run(self._client.admin(command, dict(payload)))

    def _run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def as_served(config: EngineConfig, info: EngineInfo) -> EngineConfig:
    """The config with the limits that the engine has found instead of those it was to find.

    A measuring process has a small share of the memory: it would find others, or no room at all.
    """
    return dataclasses.replace(
        config,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        # Groups with a window have fewer pages than the longest context needs of the others.
        num_kv_pages=max(info.num_kv_pages, -(-info.max_model_len // info.block_size)),
    )


def tune(launch: TunerLaunch) -> int:
    """Tunes until the engine ends; returns the exit code."""
    try:
        calls = EngineCalls(launch.address)
    except EngineDead as error:
        log.info("%s", error)
        return 0
    # These import jax, which the server's ready state need not wait for.
    from polyjax.compiler.cache import default_cache_dir
    from polyjax.compiler.kernel_files import allow_kernel_files
    from search.background import BackgroundTuner, LedgerRefused, Setting

    allow_kernel_files()
    folder = Path(launch.folder)
    cache = Path(launch.config.compile_cache_dir or default_cache_dir())
    if launch.config.compile_cache_dir == "none":
        cache = folder / "programs"
    ledger = launch.tuner.ledger or Path(launch.config.state_dir or cache.parent) / "ledger.sqlite"
    setting = Setting(
        as_served(launch.config, calls.info),
        calls.info.block_size,
        Path(ledger),
        str(cache),
        folder,
        launch.tuner.tune_memory,
    )
    try:
        BackgroundTuner(setting, calls.call).run()
    except LedgerRefused as error:
        log.error("%s", error)
        return EXIT_REFUSED
    except EngineDead as error:
        log.info("%s", error)
    return 0


def main() -> None:
    kill_when_parent_ends()
    yield_to_serving()
    # Ctrl-C and a group's SIGTERM reach every process; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s tuner: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    parent = parent_pipe()
    launch = msgspec.json.decode(parent.readline(), type=TunerLaunch)
    watch_parent(parent)
    code = tune(launch)
    sys.stderr.flush()
    os._exit(code)  # its threads wait for nothing that matters any more


if __name__ == "__main__":
    main()
