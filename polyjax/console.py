"""What a server says on its terminal: progress, one line when ready, statistics under load."""

from __future__ import annotations

import asyncio
import sys
import time

from polyjax.engine.client import EngineClient
from polyjax.engine.messages import Progress
from polyjax.engine.types import EngineInfo, EngineStats
from polyjax.server.config import ServerConfig

REPEAT_S = 2.0  # between two lines about the same phase


class Console:
    """Prints to standard error."""

    def __init__(self, config: ServerConfig, client: EngineClient):
        self._config = config
        self._client = client
        self._started_s = time.monotonic()
        self._phase = ""
        self._phase_started_s = self._next_line_s = self._started_s
        self._reporter: asyncio.Task[None] | None = None
        client.on_progress = self.progress

    def listening(self) -> None:
        say(f"listening at {base_url(self._config)} and getting ready")

    def fetch_progress(self, what: str, done: int, total: int) -> None:
        """Progress of opening the model, in bytes."""
        share = f" {100 * done // total} % of {total / 1e6:.0f} MB" if total else ""
        self._show_phase(what, share)

    def progress(self, progress: Progress) -> None:
        share = f" {progress.done}/{progress.total}" if progress.total else ""
        self._show_phase(progress.what, share)

    def ready(self) -> None:
        info = self._client.info
        assert info is not None
        self._finish_phase()
        say(describe(info, self._config, time.monotonic() - self._started_s))
        self._reporter = asyncio.create_task(self._report_load())

    def draining(self, num_open: int) -> None:
        limit_s = self._config.shutdown_timeout_s
        say(f"shutting down: {num_open} requests have up to {limit_s:g} s to finish")

    def _show_phase(self, phase: str, share: str) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._finish_phase()
            self._phase, self._phase_started_s = phase, now
        elif now < self._next_line_s:
            return
        self._next_line_s = now + REPEAT_S
        say(f"{phase}{share} ...")

    def _finish_phase(self) -> None:
        if self._phase:
            say(f"{self._phase}: {time.monotonic() - self._phase_started_s:.1f} s")
            self._phase = ""

    async def _report_load(self) -> None:
        before, before_s = self._client.stats, time.monotonic()
        while True:
            await asyncio.sleep(self._config.log_interval_s)
            after, after_s = self._client.stats, time.monotonic()
            if after.running or after.waiting or _tokens(after) != _tokens(before):
                say(load_line(before, after, after_s - before_s))
            before, before_s = after, after_s


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} polyjax: {line}", file=sys.stderr, flush=True)


def base_url(config: ServerConfig) -> str:
    """A URL that works on this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://[{host}]:{config.port}" if ":" in host else f"http://{host}:{config.port}"


def describe(info: EngineInfo, config: ServerConfig, elapsed_s: float) -> str:
    """The line of a server that is ready."""
    return (
        f"ready at {base_url(config)}/v1: {info.model_name} ({info.dtype}) on "
        f"{info.device}, {info.max_model_len:,} tokens of context, {info.kv_capacity_tokens:,} in "
        f"{info.num_kv_pages:,} KV pages, {info.num_programs} step programs, epoch {info.epoch}; "
        f"took {elapsed_s:.1f} s (load {info.load_s:.1f}, compile {info.compile_s:.1f})"
    )


def _tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens + stats.generation_tokens


def load_line(before: EngineStats, after: EngineStats, interval_s: float) -> str:
    """What happened between two samples of the engine's statistics."""
    prompt_rate = (after.prompt_tokens - before.prompt_tokens) / interval_s
    generation_rate = (after.generation_tokens - before.generation_tokens) / interval_s
    queried = after.prefix_queries_tokens - before.prefix_queries_tokens
    hits = after.prefix_hits_tokens - before.prefix_hits_tokens
    hit_share = f"{100 * hits / queried:.0f} %" if queried else "-"
    return (
        f"prompt {prompt_rate:,.0f} tokens/s, generation {generation_rate:,.0f} tokens/s, "
        f"{after.running} running, {after.waiting} waiting, KV use {100 * after.kv_usage:.1f} %, "
        f"prefix hits {hit_share}"
    )
