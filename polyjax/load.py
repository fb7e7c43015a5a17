"""Load on an OpenAI-compatible server: many streams at once, every event timed as it arrives.

Client processes of their own, so that a fast server is not measured by a slow client. No jax.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from polyjax.core.errors import PolyjaxError

POLL_S = 0.5  # how late the end of a load's time may be noticed
FIRST_TOKEN_ID = 100  # leaves out what most vocabularies begin with: control tokens


class LoadError(PolyjaxError):
    """The server did not answer as a server under measurement must."""


class OutOfTime(LoadError):
    """The load was given up because its time was over."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadSpec:
    """Prompts of random token ids, answered to their full length, `concurrency` at any time.

    Lengths are uniform between `range_ratio` of `isl` or `osl` (prompt and answer tokens) and it.
    """

    url: str
    model: str
    num_prompts: int
    concurrency: int
    isl: int
    osl: int
    range_ratio: float
    vocab_size: int
    seed: int = 0
    api_key: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LoadRequest:
    """An HTTP request as it is sent, and the tokens that its answer must have."""

    raw: bytes
    output_tokens: int


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One stream: time.monotonic() of its start, its token events and its end; tokens by usage."""

    start_s: float
    event_s: list[float] = dataclasses.field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.start_s

    @property
    def e2e_s(self) -> float:
        return self.event_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.event_s[-1] - self.event_s[0]) / max(1, self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Intervals between events."""
        return [b - a for a, b in zip(self.event_s, self.event_s[1:], strict=False)]


class _Stream(asyncio.Protocol):
    """One keep-alive connection. Each request's events go to its record as they arrive."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._record = RequestRecord(0.0)
        self._buffer = b""
        self._whole: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, request: LoadRequest) -> RequestRecord:
        """Sends a request and waits for the end of its response."""
        assert self._transport is not None
        self._whole = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._record = RequestRecord(time.monotonic())
        self._transport.write(request.raw)
        await self._whole
        record = self._record
        record.end_s = time.monotonic()
        if record.error is None and record.output_tokens != request.output_tokens:
            record.error = (
                f"an answer has {record.output_tokens} tokens by its usage where "
                f"{request.output_tokens} were asked for; it has to honour ignore_eos and "
                "stream_options.include_usage"
            )
        elif record.error is None and not record.event_s:
            record.error = "an answer came without a single event"
        return record

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._record.error = "the connection was closed within the response"
            self._whole.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        now_s = time.monotonic()
        *events, self._buffer = (self._buffer + body).split(b"\n\n")
        for event in events:
            self._take_event(event, now_s)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._record.error = f"status {status}: {self._buffer[:500].decode(errors='replace')}"
        self._parser = httptools.HttpResponseParser(self)
        assert self._whole is not None
        self._whole.set_result(None)

    def _take_event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data: {"):
            return  # a comment or the end mark
        if b'"choices":[{' in event or b'"choices": [{' in event:
            self._record.event_s.append(now_s)
            return
        data = json.loads(event[6:])
        if "error" in data:
            self._record.error = str(data["error"])
        elif usage := data.get("usage"):
            self._record.prompt_tokens = usage["prompt_tokens"]
            self._record.output_tokens = usage["completion_tokens"]


def make_requests(spec: LoadSpec) -> list[LoadRequest]:
    """Returns the HTTP requests of a load; equal seeds give equal requests."""
    rng = random.Random(spec.seed)
    parts = urlsplit(spec.url)
    key = f"Authorization: Bearer {spec.api_key}\r\n" if spec.api_key else ""
    vocabulary = range(min(FIRST_TOKEN_ID, spec.vocab_size // 2), spec.vocab_size)
    requests = []
    for _ in range(spec.num_prompts):
        isl = rng.randint(max(1, int(spec.isl * spec.range_ratio)), spec.isl)
        osl = rng.randint(max(1, int(spec.osl * spec.range_ratio)), spec.osl)
        body = {
            "model": spec.model,
            "prompt": rng.choices(vocabulary, k=isl),
            "max_tokens": osl,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = json.dumps(body).encode()
        head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\n{key}Content-Length: {len(raw)}\r\n\r\n"
        )
        requests.append(LoadRequest(head.encode() + raw, osl))
    return requests


def run_load(
    spec: LoadSpec, num_processes: int, deadline_s: float = math.inf
) -> list[RequestRecord]:
    """Runs the load from `num_processes` client processes that start together.

    Raises LoadError if a request fails, as the others' figures then mean nothing, and OutOfTime if
    it is not over at `deadline_s` of time.monotonic(); its connections are closed then.
    """
    num_processes = min(num_processes, spec.concurrency)
    requests = make_requests(spec)
    context = multiprocessing.get_context("spawn")  # the caller may have threads, or a device
    barrier = context.Barrier(num_processes)
    pipes, children = [], []
    for number in range(num_processes):
        mine = requests[number::num_processes]
        slots = len(range(number, spec.concurrency, num_processes))
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(
            target=_client_process, args=(spec.url, mine, slots, barrier, sender), daemon=True
        )
        child.start()
        sender.close()
        pipes.append(receiver)
        children.append(child)
    records: list[RequestRecord] = []
    try:
        for receiver, child in zip(pipes, children, strict=True):
            while not receiver.poll(POLL_S):
                if time.monotonic() > deadline_s:
                    raise OutOfTime("the load was not over in time")
            try:
                records += receiver.recv()
            except EOFError:
                raise LoadError("a client process ended before its work did") from None
            child.join()
    finally:
        for child in children:
            child.kill()
            child.join()
    if failed := [record.error for record in records if record.error]:
        raise LoadError(f"{len(failed)} of {len(records)} requests failed, e.g.: {failed[0]}")
    return records


def _client_process(
    url: str, requests: Sequence[LoadRequest], slots: int, barrier: Any, sender: Any
) -> None:
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        barrier.wait()
        sender.send(runner.run(_drive(url, requests, slots)))


async def _drive(url: str, requests: Sequence[LoadRequest], slots: int) -> list[RequestRecord]:
    """Keeps `slots` requests in flight until all are answered."""
    parts = urlsplit(url)
    waiting = list(reversed(requests))
    records: list[RequestRecord] = []

    async def slot() -> None:
        stream = _Stream()
        while waiting:
            request = waiting.pop()
            try:
                if not stream.is_open:
                    _, stream = await asyncio.get_running_loop().create_connection(
                        _Stream, parts.hostname or "127.0.0.1", parts.port or 80
                    )
                records.append(await stream.request(request))
            except OSError as error:
                records.append(RequestRecord(time.monotonic(), error=str(error)))
                return
        stream.close()

    await asyncio.gather(*(slot() for _ in range(slots)))
    return records
