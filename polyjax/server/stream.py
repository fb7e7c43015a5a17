"""Answers as server-sent events, one token an event, and as single bodies.

A stream's headers go out with its first token: until then a refusal can still choose its status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.types import Receive, Send

from polyjax.core.errors import PolyjaxError
from polyjax.server.answers import Head, Json, head_fields, usage
from polyjax.server.choice import Delta
from polyjax.server.errors import error_body
from polyjax.server.formats import AnswerFormat
from polyjax.server.generation import Disconnected, Generation

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx kind pass events on at once
]
DONE = b"data: [DONE]\n\n"
_SENTINEL = "\x01text\x01"


class ChunkWriter:
    """Turns the deltas of one generation into events.

    Most are a text and nothing else: those are cut into a template made once per choice and epoch.
    """

    def __init__(
        self,
        head: Head,
        answer_format: AnswerFormat,
        generation: Generation,
        include_usage: bool,
        continuous_usage: bool,
    ):
        self._head = head
        self._format = answer_format
        self._generation = generation
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._uses_templates = answer_format.has_plain_pieces and not continuous_usage
        self._num_tokens = 0
        self._templates: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._event(delta) for delta in deltas])

    def last_events(self) -> bytes:
        """What follows the last token: usage if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        chunk = self._chunk([], self._generation.epoch)
        return _as_event({**chunk, "usage": self._usage()}) + DONE

    def _event(self, delta: Delta) -> bytes:
        self._num_tokens += delta.token_id is not None
        if self._uses_templates and delta.finish_reason is None and not delta.is_first:
            before, after = self._template(delta.index, delta.epoch)
            return before + msgspec.json.encode(delta.text) + after
        choice = self._generation.choices[delta.index]
        opening = self._format.opening(choice) if delta.is_first else None
        pieces = [self._format.piece(choice, delta)]
        if opening is not None:
            pieces.insert(0, opening)
        return b"".join(_as_event(self._chunk([piece], delta.epoch)) for piece in pieces)

    def _template(self, index: int, epoch: int) -> tuple[bytes, bytes]:
        template = self._templates.get((index, epoch))
        if template is None:
            choice = self._generation.choices[index]
            piece = self._format.piece(choice, Delta(index, None, _SENTINEL))
            event = _as_event(self._chunk([piece], epoch))
            before, after = event.split(msgspec.json.encode(_SENTINEL))
            template = self._templates[index, epoch] = (before, after)
        return template

    def _chunk(self, choices: list[Json], epoch: int) -> Json:
        chunk = head_fields(self._head, self._format.chunk_object_name, epoch)
        chunk["choices"] = choices
        if self._include_usage:
            chunk["usage"] = self._usage() if self._continuous_usage else None
        return chunk

    def _usage(self) -> Json:
        """Counts what the stream has said, which may be less than what has arrived."""
        return usage(self._generation, self._num_tokens)


def _as_event(data: Json) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


@contextlib.asynccontextmanager
async def cancelled_on_disconnect(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """While inside, the client's going away ends the generation, as does leaving early."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.cancel(Disconnected("the client closed the connection"))

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.cancel(Disconnected("the answer was not finished"))


async def send_stream(generation: Generation, writer: ChunkWriter, send: Send) -> None:
    """Sends the whole stream. Raises what ends the generation before its first token."""
    deltas = await generation.next_deltas()
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
    try:
        while deltas:
            await _send_body(send, writer.events(deltas))
            deltas = await generation.next_deltas()
        await _send_body(send, writer.last_events(), is_last=True)
    except Disconnected:
        return
    except PolyjaxError as error:
        _, body = error_body(error)
        await _send_body(send, b"data: " + body + b"\n\n", is_last=True)


async def _send_body(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def collect(generation: Generation, head: Head, answer_format: AnswerFormat) -> Json:
    """Returns the body of an answer that is not streamed. Raises what ended the generation."""
    by_choice: list[list[Delta]] = [[] for _ in generation.choices]
    while deltas := await generation.next_deltas():
        for delta in deltas:
            by_choice[delta.index].append(delta)
    body = head_fields(head, answer_format.object_name, generation.epoch)
    body["choices"] = [
        answer_format.whole(choice, by_choice[choice.index]) for choice in generation.choices
    ]
    body["usage"] = usage(generation, generation.completion_tokens)
    return body
