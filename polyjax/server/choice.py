"""One choice of one answer: engine outputs in, text, log-probabilities and an ending out."""

from __future__ import annotations

import dataclasses
import time

from polyjax.engine.types import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from polyjax.io.tokenizer import Detokenizer
from polyjax.server.stop import StopStrings


@dataclasses.dataclass(slots=True)
class Delta:
    """What one token added to a choice; the last delta of a choice carries `finish_reason`.

    `text` is what became certain with the token, so it can be empty, or hold more than the token's
    own. `stop_reason` is the stop string or stop token id that ended the choice, if one did.
    """

    index: int
    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    epoch: int = 0
    is_first: bool = False


@dataclasses.dataclass(slots=True)
class Times:
    """time.monotonic() of a choice's milestones; 0.0 for what has not happened."""

    arrival_s: float
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    detokenise_s: float = 0.0  # no moment, but all the time spent on making text


class Choice:
    """Follows one engine request. `request_id` is its id in the engine."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        detokenizer: Detokenizer,
        arrival_s: float,
    ):
        self.index = index
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cached_tokens = 0
        self.num_tokens = 0
        self.epoch = 0
        self.finish_reason: str | None = None
        self.times = Times(arrival_s)
        self._detokenizer = detokenizer
        self._stops = (
            StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        )

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: RequestOutput) -> list[Delta]:
        """Returns a delta per token, up to the one that ends the choice."""
        now = time.monotonic()
        deltas = self._push(output, now)
        self.times.detokenise_s += time.monotonic() - now
        return deltas

    def _push(self, output: RequestOutput, now: float) -> list[Delta]:
        if self.num_tokens == 0:
            self.times.first_token_s = now
            self.times.scheduled_s = output.scheduled_s
            self.prompt_logprobs = output.prompt_logprobs
            self.cached_tokens = output.cached_tokens
        self.times.last_token_s = now
        self.epoch = output.epoch
        if self.params.max_tokens == 0:  # only the prompt's scores were wanted
            return [self._end(FinishReason.LENGTH, None)]
        deltas: list[Delta] = []
        for position, token_id in enumerate(output.token_ids):
            is_last = position == len(output.token_ids) - 1
            ending = output.finish_reason if is_last else None
            delta = self._push_token(token_id, ending, output.stop_reason)
            if output.logprobs is not None:
                delta.logprobs = output.logprobs[position]
            deltas.append(delta)
            if self.is_finished:
                return deltas
        if output.finish_reason is not None:  # ended without a token of its own
            deltas.append(self._end(output.finish_reason, output.stop_reason))
        return deltas

    def _push_token(
        self, token_id: int, ending: FinishReason | None, stop_reason: int | None
    ) -> Delta:
        params = self.params
        is_first = self.num_tokens == 0
        self.num_tokens += 1
        # A token that stops the engine is no part of the text, unless asked for.
        is_hidden = ending is FinishReason.STOP and not params.include_stop_str_in_output
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if ending is not None:
            text += self._detokenizer.finish()
        stop_string = None
        if self._stops is not None and self.num_tokens > params.min_tokens:
            stopped = self._stops.push(text)
            text, stop_string = stopped.text, stopped.stop
            if ending is not None and stop_string is None:
                text += self._stops.finish()
        if stop_string is not None:
            self.finish_reason = FinishReason.STOP.value
        elif ending is not None:
            self.finish_reason = ending.value
        return Delta(
            self.index,
            token_id,
            text,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason if stop_string is None and ending else stop_string,
            epoch=self.epoch,
            is_first=is_first,
        )

    def _end(self, ending: FinishReason, stop_reason: int | None) -> Delta:
        self.finish_reason = ending.value
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.push(text).text + self._stops.finish()
        return Delta(
            self.index,
            None,
            text,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            epoch=self.epoch,
            is_first=self.num_tokens == 0,
        )
