"""/tokenize, /detokenize and /tokenizer_info: the tokenizer, for clients that have none."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import RequestError
from polyjax.server.conversation import render
from polyjax.server.endpoint import read_body
from polyjax.server.errors import send_json
from polyjax.server.protocol import DetokenizeBody, TokenizeBody, parse
from polyjax.server.service import ServedModel, Service, off_loop
from polyjax.server.tools import read_functions


async def tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    model = service.ready_model()
    raw = await read_body(scope, receive, service.config.max_body_bytes)
    await send_json(send, 200, await off_loop(raw, _tokenize, model, raw))


def _tokenize(model: ServedModel, raw: bytes) -> bytes:
    body = parse(TokenizeBody, raw)
    model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        text, adds_special = body.prompt, body.add_special_tokens is not False
    else:
        read_functions(body.tools)
        text, adds_special = render(model, body), bool(body.add_special_tokens)
    ids = model.tokenizer.encode(text, adds_special)
    answer: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.info.max_model_len,
    }
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.token_text(token_id) for token_id in ids]
    return msgspec.json.encode(answer)


async def detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    model = service.ready_model()
    raw = await read_body(scope, receive, service.config.max_body_bytes)
    await send_json(send, 200, await off_loop(raw, _detokenize, model, raw))


def _detokenize(model: ServedModel, raw: bytes) -> bytes:
    body = parse(DetokenizeBody, raw)
    model.check_name(body.model)
    vocab_size = model.info.vocab_size
    if outside := [token_id for token_id in body.tokens if token_id >= vocab_size]:
        raise RequestError(
            f"tokens: token id {outside[0]} is outside the vocabulary of {vocab_size}", "tokens"
        )
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return msgspec.json.encode({"prompt": text})


async def tokenizer_info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    model = service.ready_model()
    special = model.tokenizer.special_tokens
    answer = {
        **{
            name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        },
        "tokenizer_class": "polyjax",
        "vocab_size": model.info.vocab_size,
        "model_max_length": model.info.max_model_len,
        "chat_template": model.template_source,
    }
    await send_json(send, 200, msgspec.json.encode(answer))
