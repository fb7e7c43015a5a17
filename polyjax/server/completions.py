"""POST /v1/completions and /v1/chat/completions: from body to prompts, and the answer back."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from polyjax.core.errors import RequestError
from polyjax.engine.client import EngineClient
from polyjax.engine.types import SamplingParams
from polyjax.io.tokenizer import Detokenizer
from polyjax.server.answers import Head, TokenNames
from polyjax.server.choice import Choice
from polyjax.server.conversation import render
from polyjax.server.endpoint import header, read_body
from polyjax.server.errors import send_json
from polyjax.server.formats import AnswerFormat, ChatFormat, Extras, TextFormat
from polyjax.server.generation import Admission, Generation, check_prompt
from polyjax.server.protocol import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    Prompt,
    parse,
    sampling_params,
)
from polyjax.server.service import ServedModel, Service, off_loop
from polyjax.server.stream import ChunkWriter, cancelled_on_disconnect, collect, send_stream
from polyjax.server.tool_answers import ToolChatFormat
from polyjax.server.tools import requested

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for text completions


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is checked and tokenized. `make_format` takes the generation's choices."""

    body: GenerationBody
    prompts: list[list[int]]
    params: SamplingParams
    id_prefix: str
    make_format: Callable[[Sequence[Choice]], AnswerFormat]
    shown_ids: frozenset[int] = frozenset()  # special tokens that the format has to see

    def generation(
        self,
        client: EngineClient,
        model: ServedModel,
        on_token: Callable[[Choice, float], None],
        on_finished: Callable[[Choice], None],
    ) -> Generation:
        """The request on its way through an engine; not started yet."""
        admission = Admission(self.body.priority, self.body.cache_salt or "")

        def new_detokenizer() -> Detokenizer:
            skips = self.params.skip_special_tokens
            return model.tokenizer.detokenizer(skips, shown_ids=self.shown_ids)

        return Generation(
            client, new_detokenizer, self.prompts, self.params, admission, on_token, on_finished
        )

    def head(self, name: str, model: ServedModel) -> Head:
        """What all objects of the answer called `name` share."""
        return Head(
            id=f"{self.id_prefix}-{name}",
            created_s=int(time.time()),
            model=model.info.model_name,
            numerics=self.params.numerics or model.info.numerics,
        )


Prepare = Callable[[ServedModel, bytes], Prepared]


async def complete_chat(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await _answer(service, scope, receive, send, prepare_chat)


async def complete_text(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await _answer(service, scope, receive, send, prepare_text)


async def _answer(
    service: Service, scope: Scope, receive: Receive, send: Send, prepare: Prepare
) -> None:
    model, metrics = service.model_for_work()
    service.num_open += 1
    try:
        raw = await read_body(scope, receive, service.config.max_body_bytes)
        prepared, seconds = await off_loop(raw, _timed, prepare, model, raw)
        metrics.on_request(prepared.params.n, prepared.params.max_tokens, seconds)
        generation = prepared.generation(
            service.client, model, metrics.on_token, metrics.on_finished
        )
        async with cancelled_on_disconnect(generation, receive):
            generation.start()
            head = prepared.head(_answer_name(scope, prepared), model)
            await _send_answer(generation, prepared, head, send)
    finally:
        service.num_open -= 1


def _timed(prepare: Prepare, model: ServedModel, raw: bytes) -> tuple[Prepared, float]:
    """Returns what `prepare` does, and the seconds it took."""
    started_s = time.perf_counter()
    return prepare(model, raw), time.perf_counter() - started_s


async def _send_answer(generation: Generation, prepared: Prepared, head: Head, send: Send) -> None:
    body, answer_format = prepared.body, prepared.make_format(generation.choices)
    if not body.stream:
        answer = await collect(generation, head, answer_format)
        await send_json(send, 200, msgspec.json.encode(answer))
        return
    writer = ChunkWriter(head, answer_format, generation, body.include_usage, body.continuous_usage)
    await send_stream(generation, writer, send)


def _answer_name(scope: Scope, prepared: Prepared) -> str:
    given = prepared.body.request_id or (header(scope, b"x-request-id") or b"").decode("latin-1")
    return given[:256] or uuid.uuid4().hex


def prepare_chat(model: ServedModel, raw: bytes) -> Prepared:
    """Checks, renders and tokenizes a chat request. Raises RequestError naming the wrong field."""
    body = parse(ChatBody, raw)
    model.check_name(body.model)
    max_tokens_field = (
        "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    )
    max_tokens = getattr(body, max_tokens_field)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{max_tokens_field} must be at least 1", max_tokens_field)
    params = sampling_params(body, model.defaults, max_tokens)
    use = requested(body, model.tools)
    if use is not None:
        params = use.constrain(params)
    prompt = model.tokenizer.encode(render(model, body), body.add_special_tokens)
    prompts, params = _fit_all(model, body, [prompt], params, "messages")
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    extras = Extras(bool(body.return_token_ids), body.prompt_logprobs is not None)

    def make_format(choices: Sequence[Choice]) -> AnswerFormat:
        chat = ChatFormat(names, choices, extras, bool(body.logprobs))
        return chat if use is None else ToolChatFormat(chat, use)

    shown_ids = frozenset() if use is None else model.tools.shown_ids
    return Prepared(body, prompts, params, "chatcmpl", make_format, shown_ids)


def prepare_text(model: ServedModel, raw: bytes) -> Prepared:
    """Checks and tokenizes a text request. Raises RequestError naming the wrong field."""
    body = parse(CompletionBody, raw)
    model.check_name(body.model)
    scores_prompt = bool(body.echo) or body.prompt_logprobs is not None
    if body.max_tokens == 0 and not scores_prompt:
        raise RequestError("max_tokens 0 needs echo or prompt_logprobs", "max_tokens")
    params = sampling_params(body, model.defaults, body.max_tokens)
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = dataclasses.replace(params, prompt_logprobs=wanted)
    prompts = [_tokenize(model, prompt, body.add_special_tokens) for prompt in body.prompt]
    prompts, params = _fit_all(model, body, prompts, params, "prompt")
    names = TokenNames(model.tokenizer, bool(body.return_tokens_as_token_ids))
    extras = Extras(bool(body.return_token_ids), body.prompt_logprobs is not None)
    texts = _echoed(model, body, prompts) if body.echo else None
    return Prepared(
        body,
        prompts,
        params,
        "cmpl",
        lambda choices: TextFormat(names, choices, extras, body.logprobs, params.n, texts),
    )


def _tokenize(model: ServedModel, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt, add_special_tokens)
    return prompt


def _echoed(model: ServedModel, body: CompletionBody, prompts: list[list[int]]) -> list[str]:
    """The texts of the prompts: as given, or what is left of them after truncation."""
    return [
        given
        if isinstance(given, str) and body.truncate_prompt_tokens is None
        else model.tokenizer.decode(prompt, body.skip_special_tokens)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]


def _fit_all(
    model: ServedModel,
    body: GenerationBody,
    prompts: list[list[int]],
    params: SamplingParams,
    field: str,
) -> tuple[list[list[int]], SamplingParams]:
    """Truncates prompts where asked and checks them all; settles max_tokens where left open."""
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n={params.n} are more than {MAX_CHOICES} choices", "n"
        )
    info = model.info
    longest = info.max_model_len - (params.max_tokens or 1)
    if body.truncate_prompt_tokens is not None:
        keep = body.truncate_prompt_tokens
        if keep != -1 and not 1 <= keep <= info.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or in [1, {info.max_model_len}]",
                "truncate_prompt_tokens",
            )
        keep = max(longest, 1) if keep == -1 else keep
        prompts = [prompt[-keep:] for prompt in prompts]
    for prompt in prompts:
        check_prompt(prompt, params, info.max_model_len, info.vocab_size, field)
    for name in ("logit_bias", "stop_token_ids"):
        for entry in getattr(params, name):
            token_id = entry[0] if isinstance(entry, tuple) else entry
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(f"{name}: token id {token_id} is outside the vocabulary", name)
    if params.max_tokens is None:
        params = _default_max_tokens(model, body, prompts, params)
    return prompts, params


def _default_max_tokens(
    model: ServedModel, body: GenerationBody, prompts: list[list[int]], params: SamplingParams
) -> SamplingParams:
    room = model.info.max_model_len - max(map(len, prompts))
    wanted = model.default_max_tokens
    if wanted is None and isinstance(body, CompletionBody):
        wanted = DEFAULT_COMPLETION_TOKENS
    max_tokens = room if wanted is None else min(wanted, room)
    return dataclasses.replace(params, max_tokens=max(max_tokens, params.min_tokens))
