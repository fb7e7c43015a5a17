"""Request bodies of the OpenAI-compatible API and the engine's extras; all use of pydantic is here.

Unknown fields are accepted, as clients of other servers send them. Known fields that are not
supported are in `UNSUPPORTED` and refused where ignoring them would change the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import pydantic

from polyjax.core.errors import RequestError
from polyjax.engine.types import MAX_LOGPROBS, SamplingParams
from polyjax.server.structured import requested_grammar

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 2048  # prompts times n of one request
MAX_REMEMBERED_FIELDS = 256

Int64 = Annotated[int, pydantic.Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, pydantic.Field(ge=0, le=2**31 - 1)]
Prompt = str | list[int]

log = logging.getLogger("polyjax.server")


class Body(pydantic.BaseModel):
    """Strict types, finite numbers, unknown fields kept aside."""

    model_config = pydantic.ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _stop_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_CHARACTERS for s in strings):
        raise ValueError(
            f"takes at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters"
        )
    if "" in strings:
        raise ValueError("must not contain an empty string")
    return strings


class GenerationBody(Body):
    """What chat and text completions share. None stands for the model's or server's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    n: Int64 | None = None
    seed: Int64 | None = None
    stop: Annotated[list[str], pydantic.PlainValidator(_stop_strings)] = []
    stop_token_ids: list[TokenId] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Int64 | None = None
    truncate_prompt_tokens: Int64 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 = 0
    request_id: Annotated[str, pydantic.Field(max_length=256)] | None = None
    cache_salt: Annotated[str, pydantic.Field(min_length=1, max_length=256)] | None = None
    numerics: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @pydantic.model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def _is_list_of(kind: type, value: list[Any]) -> bool:
    return all(type(item) is kind for item in value)


def _prompts(value: Any) -> list[Prompt]:
    """The four forms of a prompt as one list of texts and token id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, or a list, not empty, of strings or of token ids")
    if _is_list_of(int, value):
        return [value]
    if _is_list_of(str, value):
        return list(value)
    if _is_list_of(list, value) and all(_is_list_of(int, ids) for ids in value):
        return list(value)
    raise ValueError("must be a string, a list of strings, of token ids, or of lists of token ids")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], pydantic.PlainValidator(_prompts)]
    logprobs: Int64 | None = None
    echo: bool | None = None
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: of a text, or of a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


def _is_off(value: Any) -> bool:
    return value in (None, False, 0, "", [], {})


Harmless = Callable[[Any, Mapping[str, Any]], bool]

# Fields that clients send and that are not supported, with when they ask for nothing.
UNSUPPORTED: dict[str, Harmless] = {
    "tools": lambda value, _: _is_off(value),  # of text completions; chat has them
    "tool_choice": lambda value, _: value in (None, "none"),
    "functions": lambda value, _: _is_off(value),
    "function_call": lambda value, _: value in (None, "none"),
    "guided_whitespace_pattern": lambda value, _: value is None,
    "suffix": lambda value, _: _is_off(value),
    "best_of": lambda value, body: value in (None, 1) or value == body.get("n"),
    "use_beam_search": lambda value, _: _is_off(value),
    "audio": lambda value, _: value is None,
    "modalities": lambda value, _: value is None or value == ["text"],
    "web_search_options": lambda value, _: value is None,
    "allowed_token_ids": lambda value, _: _is_off(value),
    "bad_words": lambda value, _: _is_off(value),
    "logits_processors": lambda value, _: _is_off(value),
    "mm_processor_kwargs": lambda value, _: _is_off(value),
    "documents": lambda value, _: _is_off(value),
    "prompt_embeds": lambda value, _: _is_off(value),
    "echo": lambda value, _: _is_off(value),  # of chat; text completions have it
    "chat_template": lambda value, _: value is None,
}
_WHY_UNSUPPORTED = {
    "tools": "tools is not supported here; /v1/chat/completions takes it",
    "tool_choice": "tool_choice is not supported here; /v1/chat/completions takes it",
    "functions": "functions is not supported; use tools, which replaced it",
    "function_call": "function_call is not supported; use tool_choice, which replaced it",
    "best_of": "best_of is not supported; ask for n choices and rank them",
    "chat_template": "templates come from the server's --chat_template, not from requests",
}

_unknown_fields: set[str] = set()


def parse[B: Body](kind: type[B], raw: bytes) -> B:
    """Returns the validated body. Raises RequestError naming the field that is wrong."""
    try:
        body = kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise _as_request_error(error) from None
    _check_extra(body.model_extra or {}, {**body.__dict__})
    return body


def _as_request_error(error: pydantic.ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    reason = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{path}: {reason}" if path else reason, path or None)


def _check_extra(extra: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in UNSUPPORTED:
            if not UNSUPPORTED[name](value, body):
                raise RequestError(_WHY_UNSUPPORTED.get(name, f"{name} is not supported"), name)
        elif name not in _unknown_fields and len(_unknown_fields) < MAX_REMEMBERED_FIELDS:
            _unknown_fields.add(name)
            log.info("ignored the unknown request field %.100r, here and from now on", name)


def sampling_params(
    body: GenerationBody, defaults: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """Returns how to sample. Fields that `body` leaves open come from `defaults`.

    Raises RequestError naming the field that is out of range.
    """
    chosen: dict[str, Any] = {
        name: defaults[name] if getattr(body, name) is None else getattr(body, name)
        for name in _OPEN_FIELDS
        if getattr(body, name) is not None or defaults.get(name) is not None
    }
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        seed=body.seed,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        logit_bias=_logit_bias(body.logit_bias or {}),
        prompt_logprobs=body.prompt_logprobs,
        logprobs=num_logprobs(body),
        numerics=body.numerics,
        grammar=requested_grammar(body),
    )


_OPEN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
)


def num_logprobs(body: GenerationBody) -> int | None:
    """How many alternatives per generated token are wanted; None if no logprobs are."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must be in [0, {MAX_LOGPROBS}]", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _logit_bias(bias_of_token: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), bias) for token, bias in bias_of_token.items())
    except ValueError as error:
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias") from error
