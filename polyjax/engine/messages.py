"""Messages between HTTP processes and the engine process, and how they become bytes. No jax.

An HTTP process sends `ToEngine` messages one by one. The engine process sends `FromEngine`
messages; the tokens of one step for one HTTP process travel in one `StepOutputs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from polyjax.engine.types import EngineInfo, EngineStats, Request, RequestOutput


class Hello(msgspec.Struct, tag="hello"):
    """Introduces an HTTP process; answered with `Ready` once there is something to be ready."""


class Add(msgspec.Struct, tag="add"):
    request: Request


class Abort(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class Admin(msgspec.Struct, tag="admin"):
    call_id: int
    command: str
    payload: dict[str, Any]


class Stop(msgspec.Struct, tag="stop"):
    """Ends the engine process after closing the engine; running requests are dropped."""


class Progress(msgspec.Struct, tag="progress"):
    """What the engine does while it starts. `total` 0 means that the end is not known."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class Failed(msgspec.Struct, tag="failed"):
    """The last message of an engine process that ends with an error."""

    message: str


class StepOutputs(msgspec.Struct, tag="step"):
    """What one step made for one HTTP process.

    Most outputs are one token and nothing else: those are spelled as parallel lists. The others
    follow in `outputs`.
    """

    epoch: int
    request_ids: list[str]
    token_ids: list[int]
    outputs: list[RequestOutput]


class Refused(msgspec.Struct, tag="refused"):
    """A request the engine does not take, with the HTTP status that says why."""

    request_id: str
    message: str
    param: str | None
    status: int


class AdminReply(msgspec.Struct, tag="admin_reply"):
    """`error` is None where the command worked; `status` is the HTTP status of the answer."""

    call_id: int
    result: dict[str, Any]
    error: str | None = None
    param: str | None = None
    status: int = 200


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent between steps, a few times a second, so its absence means that a step hangs."""

    stats: EngineStats


ToEngine = Hello | Add | Abort | Admin | Stop
FromEngine = Progress | Ready | Failed | StepOutputs | Refused | AdminReply | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def pack_outputs(outputs: Iterable[RequestOutput]) -> StepOutputs:
    """Returns the message for one HTTP process's outputs of one step."""
    packed = StepOutputs(0, [], [], [])
    for output in outputs:
        # `epoch` numbers the plan of the step, so it is the same in all of a step's plain outputs.
        if _is_plain(output) and (packed.epoch == output.epoch or not packed.request_ids):
            packed.epoch = output.epoch
            packed.request_ids.append(output.request_id)
            packed.token_ids.append(output.token_ids[0])
        else:
            packed.outputs.append(output)
    return packed


def unpack_outputs(packed: StepOutputs) -> Iterable[RequestOutput]:
    """Yields the outputs that `pack_outputs` took, plain ones first."""
    for request_id, token_id in zip(packed.request_ids, packed.token_ids, strict=True):
        yield RequestOutput(request_id, [token_id], epoch=packed.epoch)
    yield from packed.outputs


def _is_plain(output: RequestOutput) -> bool:
    return (
        output.finish_reason is None
        and len(output.token_ids) == 1
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.cached_tokens == 0
        and output.scheduled_s == 0.0
        and output.error is None
    )
