"""Offline generation: prompts in, texts out, by the engine that also serves.

llm = LLM()                                   # the default model
for result in llm.generate(["Once upon", "The answer is"], SamplingParams(max_tokens=32)):
    print(result.text)
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.engine.engine import Engine
from polyjax.engine.types import (
    EngineConfig,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from polyjax.io.files import no_progress, open_model
from polyjax.io.grammar import check
from polyjax.io.tokenizer import Tokenizer
from polyjax.progress import ShownProgress
from polyjax.server.stop import StopStrings

DEFAULT_PARAMS = SamplingParams()

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """One finished generation.

    `text` ends before a stop string unless the parameters include it; `token_ids` are all tokens
    generated. `finish_reason` is "stop" or "length". `index` tells the `n` results of one prompt
    apart.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0


class LLM:
    """An engine in this process. Takes the fields of EngineConfig, by name.

    `progress` shows on standard error what loading, compiling and generating is at. Use it as a
    context manager, or call `close`, to free the devices. Raises ConfigError or ModelError where
    the model cannot be served.
    """

    def __init__(self, model: str | None = None, *, progress: bool = True, **config: Any):
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := set(config) - known:
            raise ConfigError(f"LLM has no option {', '.join(sorted(unknown))}")
        self._show = ShownProgress() if progress else no_progress
        engine_config = EngineConfig(model=model, **config)
        self.engine = Engine(engine_config, self._show)
        files = open_model(engine_config.tokenizer or model)
        self.tokenizer: Tokenizer = files.load_tokenizer()
        self._chat_template = files.chat_template
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
    ) -> list[Generation]:
        """Returns `n` generations for each prompt, in order. A prompt is a text or token ids.

        `params` is for all prompts, or one for each. Raises RequestError, before anything is
        computed, where a prompt cannot be served, and PolyjaxError where one failed.
        """
        batch = _as_list(prompts)
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise ConfigError(f"{len(batch)} prompts came with {len(each)} SamplingParams")
        running: dict[str, _Running] = {}
        try:
            for prompt, one in zip(batch, each, strict=True):
                if one.grammar is not None:
                    check(one.grammar.kind, one.grammar.text)
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                for index in range(one.n):
                    self._add(running, prompt, ids, _nth(one, index), index)
            self._run(running)
        except BaseException:
            for request_id in running:
                self.engine.abort(request_id)
            raise
        return [stream.result() for stream in running.values()]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
    ) -> list[Generation]:
        """`generate` on conversations, each a list of {"role", "content"} messages.

        Raises ConfigError if the model has no chat template.
        """
        from polyjax.io.chat import ChatTemplate

        if self._chat_template is None:
            raise ConfigError("this model has no chat template: use generate()")
        template = ChatTemplate(self._chat_template, self.tokenizer.special_tokens)
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [
            self.tokenizer.encode(template.render(conversation), add_special_tokens=False)
            for conversation in conversations
        ]
        return self.generate(prompts, params)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(
        self,
        running: dict[str, _Running],
        prompt: Prompt,
        ids: list[int],
        params: SamplingParams,
        index: int,
    ) -> None:
        request = Request(f"llm-{next(self._numbers)}", ids, params, time.monotonic())
        self.engine.add(request)
        text = prompt if isinstance(prompt, str) else None
        running[request.id] = _Running(text, request, index, self.tokenizer)

    def _run(self, running: dict[str, _Running]) -> None:
        done = 0
        while done < len(running):
            for output in self.engine.step():
                stream = running.get(output.request_id)
                if stream is not None and stream.push(output):
                    done += 1
                    self.engine.abort(output.request_id)  # a stop string is news to the engine
                    self._show("generating", done, len(running))


class _Running:
    """One generation under way."""

    def __init__(self, prompt: str | None, request: Request, index: int, tokenizer: Tokenizer):
        params = request.params
        self._prompt, self._request, self._index = prompt, request, index
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._cached_tokens = 0
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> bool:
        """Takes in what a step made; returns whether that finished the generation."""
        if self.finish_reason is not None:
            return False
        if output.finish_reason is FinishReason.ERROR:
            raise PolyjaxError(f"a request failed: {output.error}")
        self._logprobs += output.logprobs or []
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self._cached_tokens = self._cached_tokens or output.cached_tokens  # told once
        self._token_ids += output.token_ids
        for token in output.token_ids:
            if self._ends_with(self._detokenizer.push(token)):
                return True
        if output.finish_reason is None:
            return False
        if not self._ends_with(self._detokenizer.finish()):
            self._text.append(self._stops.finish() if self._request.params.stop else "")
            self.finish_reason = output.finish_reason.value
        return True

    def result(self) -> Generation:
        assert self.finish_reason is not None
        params = self._request.params
        return Generation(
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self.finish_reason,
            index=self._index,
            logprobs=None if params.logprobs is None else self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=self._cached_tokens,
        )

    def _ends_with(self, piece: str) -> bool:
        """Adds a piece of text; returns whether it completed a stop string."""
        if not self._request.params.stop:
            self._text.append(piece)
            return False
        stopped = self._stops.push(piece)
        self._text.append(stopped.text)
        if stopped.stop is None:
            return False
        self.finish_reason = FinishReason.STOP.value
        return True


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, a text or a list of token ids, is a batch of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of the index-th of `n` generations: each has a seed of its own."""
    seed = None if params.seed is None else params.seed + index
    return dataclasses.replace(params, n=1, seed=seed)
