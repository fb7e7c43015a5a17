"""Answers a file of requests without a server: `python -m polyjax.batch --input=... --output=...`.

Results are appended as requests finish. Started again after it was killed, a run asks only for the
lines that have no result yet.

    python -m polyjax.batch --input=requests.jsonl --output=results.jsonl
    python -m polyjax.batch --merge=results.0.jsonl,results.1.jsonl --output=results.jsonl
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from absl import app
from absl import flags as absl_flags

from polyjax import flags
from polyjax.batch_file import (
    RequestLine,
    ResultFile,
    Shard,
    merge,
    read_requests,
    result_line,
)
from polyjax.children import Child, start_child
from polyjax.console import say
from polyjax.core.errors import ConfigError, EngineDead, PolyjaxError, RequestError
from polyjax.engine.client import EngineClient
from polyjax.engine.process import Launch
from polyjax.engine.scripted import read_script
from polyjax.engine.types import EngineConfig
from polyjax.packages import refuse_foreign_packages
from polyjax.progress import ShownProgress
from polyjax.runtime_folder import make_runtime_folder
from polyjax.server.completions import Prepare, prepare_chat, prepare_text
from polyjax.server.config import ServerConfig
from polyjax.server.errors import error_body
from polyjax.server.process import configure_logging, open_served, run_event_loop
from polyjax.server.service import ServedModel
from polyjax.server.stream import collect

ROUTES: dict[str, Prepare] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_text,
}
# What a launcher calls the number of this process and their count; jax reads the same variables
# for jax.process_index() and jax.process_count(), but would take the devices to answer.
_LAUNCHERS = (
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
PROGRESS_S = 2.0
STOP_TIMEOUT_S = 10.0
EXIT_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, slots=True)
class BatchConfig:
    input: str | None = dataclasses.field(
        default=None, metadata={"help": "Requests, one JSON object a line (OpenAI batch format)."}
    )
    output: str | None = dataclasses.field(
        default=None, metadata={"help": "Results are appended here; an earlier run is resumed."}
    )
    shard: str | None = dataclasses.field(
        default=None,
        metadata={"help": "i/n: only every n-th line, from line i; default: as launched."},
    )
    merge: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"help": "Result files of all shards to write to --output, in order."}
    )
    concurrency: int = dataclasses.field(
        default=0, metadata={"help": "Requests in the engine at once; 0: twice what a step takes."}
    )
    chat_template: str | None = dataclasses.field(
        default=None, metadata={"help": "File with a chat template to use in place of the model's."}
    )
    tool_call_parser: str = dataclasses.field(
        default="auto", metadata={"help": "How the model writes tool calls, as for a server."}
    )
    scripted_engine: str | None = dataclasses.field(
        default=None, metadata={"help": "JSON settings of an engine without a model, for tests."}
    )


def main(argv: Sequence[str]) -> None:
    try:
        refuse_foreign_packages()
        code = run(flags.read(BatchConfig), flags.read_engine(argv[1:]))
    except PolyjaxError as error:
        print(f"polyjax: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def run(config: BatchConfig, engine: EngineConfig) -> int:
    """Answers or merges; returns the exit code. Raises ConfigError for unusable settings."""
    if config.output is None:
        raise ConfigError("--output is needed: the file that results are appended to")
    if config.merge:
        say(f"{merge(config.merge, config.output)} results -> {config.output}")
        return 0
    if config.input is None:
        raise ConfigError("--input is needed: a file with one request a line")
    shard = Shard.parse(config.shard) if config.shard else launched_shard(os.environ)
    total = sum(1 for _ in read_requests(config.input, shard))
    results = ResultFile(config.output)
    folder = make_runtime_folder()
    configure_logging()
    try:
        left = (x for x in read_requests(config.input, shard) if x.number not in results.done)
        batch = Batch(config, engine, left, results, Progress(total, len(results.done)))
        return run_event_loop(batch.run(folder))
    finally:
        results.close()
        shutil.rmtree(folder, ignore_errors=True)


def launched_shard(environment: Any) -> Shard:
    """Returns this process's share where a launcher numbered it, else everything."""
    for index, count in _LAUNCHERS:
        if environment.get(index) and environment.get(count):
            return Shard.parse(f"{environment[index]}/{environment[count]}")
    return Shard()


class Progress:
    """How far a run is: lines, rate and time left, said every few seconds."""

    def __init__(self, total: int, done: int):
        self.total = total
        self.done = done
        self.failed = 0
        self.tokens = 0
        self._resumed = done
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Requests are answered from now on: neither rate nor time left counts the start-up."""
        self._started_s = time.monotonic()

    def describe(self) -> str:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rate = (self.done - self._resumed) / elapsed_s
        left = f"{(self.total - self.done) / rate:.0f} s left" if rate else "time left unknown"
        failed = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.done}/{self.total} requests{failed}, {rate:.1f} requests/s, "
            f"{self.tokens / elapsed_s:,.0f} output tokens/s, {left}"
        )


class Batch:
    """One run: an engine process, and as many requests in it as keep it full."""

    def __init__(
        self,
        config: BatchConfig,
        engine: EngineConfig,
        lines: Iterator[RequestLine],
        results: ResultFile,
        progress: Progress,
    ):
        self._config = config
        self._engine_config = engine
        self._lines = lines
        self._results = results
        self._progress = progress

    async def run(self, folder: Path) -> int:
        """Returns 0 once every line has an answer, 130 when interrupted. Raises PolyjaxError."""
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(self._work(folder))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            say(f"interrupted; the same command goes on from here ({self._progress.describe()})")
            return EXIT_INTERRUPTED
        say(f"done: {self._progress.describe()}")
        return 0

    async def _work(self, folder: Path) -> None:
        config, fetching = self._engine_config, ShownProgress()
        files = await asyncio.to_thread(open_served, config.model, config.tokenizer, fetching)
        tokenizer = await asyncio.to_thread(files.load_tokenizer)
        name = config.served_model_name or files.name
        config = dataclasses.replace(config, model=str(files.path), served_model_name=name)
        self._client = EngineClient(f"ipc://{folder}/engine", "batch")
        self._client.on_progress = lambda p: fetching(p.what, p.done, p.total)
        self._client.connect()
        script = read_script(self._config.scripted_engine)
        serving = ServerConfig(
            chat_template=self._config.chat_template, tool_call_parser=self._config.tool_call_parser
        )
        launch = Launch(f"ipc://{folder}/engine", config, script)
        child = await start_child("polyjax.engine.process", msgspec.json.encode(launch))
        try:
            info = await _first(self._client.ready(), child.wait())
            model = ServedModel.build(files, tokenizer, info, serving)
            # Only a model that was asked for by name can be asked for wrongly.
            self._model = dataclasses.replace(model, any_name=self._engine_config.model is None)
            await self._answer_all(2 * info.max_num_seqs)
        finally:
            await self._end(child)

    async def _answer_all(self, most: int) -> None:
        self._progress.start()
        reporter = asyncio.create_task(self._report())
        workers = [
            asyncio.create_task(self._answer_some())
            for _ in range(self._config.concurrency or most)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in (*workers, reporter):
                task.cancel()
            await asyncio.gather(*workers, reporter, return_exceptions=True)

    async def _answer_some(self) -> None:
        for line in self._lines:
            status, body = await self._answer(line)
            self._results.append(line, result_line(line, status, body))
            self._progress.done += 1
            self._progress.failed += status != 200
            await asyncio.sleep(0)  # a file of nothing but bad lines must not hold the loop

    async def _answer(self, line: RequestLine) -> tuple[int, Any]:
        """Returns status and body. Raises EngineDead; a request's own fault is an answer."""
        try:
            return 200, await self._generate(line)
        except EngineDead:
            raise
        except PolyjaxError as error:
            status, body = error_body(error)
            return status, msgspec.json.decode(body)

    async def _generate(self, line: RequestLine) -> Any:
        if line.error is not None:
            raise line.error
        if line.url not in ROUTES:
            raise RequestError(f"url must be one of {', '.join(ROUTES)}", "url", 404)
        prepared = ROUTES[line.url](self._model, line.body)
        if prepared.body.stream:
            raise RequestError("a batch has no streams; leave stream out", "stream")
        generation = prepared.generation(
            self._client, self._model, lambda choice, before_s: None, self._count_tokens
        )
        head = prepared.head(line.id, self._model)
        generation.start()
        try:
            return await collect(generation, head, prepared.make_format(generation.choices))
        finally:
            generation.cancel(RequestError("the batch was interrupted"))

    def _count_tokens(self, choice: Any) -> None:
        self._progress.tokens += choice.num_tokens

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            say(self._progress.describe())

    async def _end(self, child: Child) -> None:
        self._client.stop_engine()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
        if child.returncode is None:
            child.kill()
            await child.wait()
        self._client.close()


async def _first(ready: Any, ended: Any) -> Any:
    """Returns what `ready` brings. Raises EngineDead if the engine process ends before."""
    tasks = [asyncio.ensure_future(ready), asyncio.ensure_future(ended)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise EngineDead(f"the engine process ended with code {tasks[1].result()}")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    flags.define(EngineConfig, flags.ENGINE_HELP)
    flags.define(BatchConfig)
    absl_flags.adopt_module_key_flags(flags)  # so that --help lists them
    app.run(main, flags_parser=flags.parse)
