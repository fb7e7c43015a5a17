"""One API request on its way through the engine: its prompts, its choices, and what they bring."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.engine.client import EngineClient
from polyjax.engine.types import Request, RequestOutput, SamplingParams
from polyjax.io.tokenizer import Detokenizer
from polyjax.server.choice import Choice, Delta

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """How the engine is to treat a request, beside how to sample."""

    priority: int = 0
    cache_salt: str = ""


class Disconnected(PolyjaxError):
    """The client has gone; nobody is left to answer."""


class Generation:
    """Runs `params.n` choices for each prompt; prompt i's are choices i * n to i * n + n - 1.

    `on_finished` is called with each choice that ends by itself. Everything runs on the event loop.
    """

    def __init__(
        self,
        client: EngineClient,
        new_detokenizer: Callable[[], Detokenizer],
        prompts: Sequence[list[int]],
        params: SamplingParams,
        admission: Admission,
        on_token: Callable[[Choice, float], None],
        on_finished: Callable[[Choice], None],
    ):
        self._client = client
        self._admission = admission
        self._on_token = on_token
        self._on_finished = on_finished
        self._arrived: list[Delta] = []
        self._error: PolyjaxError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.arrival_s = time.monotonic()
        self.prompts = prompts
        self.params = params
        self.choices = [
            Choice(
                index,
                f"{os.getpid():x}-{next(_numbers):x}",
                prompts[index // params.n],
                _of_choice(params, index % params.n),
                new_detokenizer(),
                self.arrival_s,
            )
            for index in range(len(prompts) * params.n)
        ]
        self._num_unfinished = len(self.choices)

    def start(self) -> None:
        """Submits every prompt's first choice; its siblings follow once its pages can be shared.

        Raises EngineDead.
        """
        for choice in self.choices[:: self.params.n]:
            self._submit(choice)
            if not self._is_worth_sharing(choice):
                self._submit_siblings(choice)

    async def next_deltas(self) -> list[Delta]:
        """Waits for tokens; returns all that have arrived, [] once every choice is finished.

        Raises what ended the request: RequestError, EngineDead, Disconnected.
        """
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._num_unfinished == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, error: PolyjaxError) -> None:
        """Ends the request for `error`, freeing what it holds in the engine. Idempotent."""
        if self._error is None and self._num_unfinished:
            self._error = error
            self._client.abort([c.request_id for c in self.choices if not c.is_finished])
            self._wake()

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        return sum(choice.cached_tokens for choice in self.choices[:: self.params.n])

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def epoch(self) -> int:
        return max(choice.epoch for choice in self.choices)

    def _is_worth_sharing(self, choice: Choice) -> bool:
        info = self._client.info
        assert info is not None
        return self.params.n > 1 and len(choice.prompt_token_ids) > info.block_size

    def _submit_siblings(self, first: Choice) -> None:
        for choice in self.choices[first.index + 1 : first.index + self.params.n]:
            self._submit(choice)

    def _submit(self, choice: Choice) -> None:
        params = choice.params
        if params.max_tokens == 0:  # the engine scores a prompt on the way to a first token
            params = dataclasses.replace(params, max_tokens=1)
        request = Request(
            choice.request_id,
            choice.prompt_token_ids,
            params,
            self.arrival_s,
            self._admission.priority,
            self._admission.cache_salt,
        )
        self._client.submit(request, lambda item: self._take(choice, item))

    def _take(self, choice: Choice, item: RequestOutput | PolyjaxError) -> None:
        if self._error is not None or choice.is_finished:
            return
        if isinstance(item, PolyjaxError):
            self.cancel(item)
            return
        is_first, before_s = choice.num_tokens == 0, choice.times.last_token_s
        self._arrived += choice.push(item)
        if item.token_ids:
            self._on_token(choice, before_s)
        if is_first and self._is_worth_sharing(choice) and choice.index % self.params.n == 0:
            self._submit_siblings(choice)
        self._settle(choice, item)
        self._wake()

    def _settle(self, choice: Choice, last: RequestOutput) -> None:
        if choice.is_finished:
            self._num_unfinished -= 1
            if last.finish_reason is None:  # a stop string, which the engine does not look for
                self._client.abort([choice.request_id])
            self._on_finished(choice)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _of_choice(params: SamplingParams, number: int) -> SamplingParams:
    """One of `params.n` choices' params: a seed of its own; only the first scores the prompt."""
    if params.n == 1:
        return params
    return dataclasses.replace(
        params,
        n=1,
        seed=None if params.seed is None else _wrap_int64(params.seed + number),
        prompt_logprobs=params.prompt_logprobs if number == 0 else None,
    )


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def check_prompt(
    prompt: list[int], params: SamplingParams, max_model_len: int, vocab_size: int, field: str
) -> None:
    """Raises RequestError if the engine could not take `prompt`, naming the body's `field`."""
    if not prompt:
        raise RequestError(f"{field} has no tokens", field)
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"{field}: token id {wrong} is outside the vocabulary of {vocab_size}", field
        )
    wanted = params.max_tokens or 1
    if len(prompt) + wanted > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {len(prompt) + wanted} tokens ({len(prompt)} in the prompt and {wanted} "
            "for the completion). Shorten one of them.",
            field,
        )
