"""The two shapes an answer can have: chat completion and text completion, whole and in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from polyjax.engine.types import TokenLogprobs
from polyjax.server.answers import (
    Json,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from polyjax.server.choice import Choice, Delta


class AnswerFormat(Protocol):
    """Spells choices as JSON. `object_name` and `chunk_object_name` are OpenAI's `object`."""

    @property
    def object_name(self) -> str: ...

    @property
    def chunk_object_name(self) -> str: ...

    @property
    def has_plain_pieces(self) -> bool:
        """Whether pieces between a choice's first and last differ by their text alone."""

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> Json:
        """One finished choice of an answer that is not streamed."""

    def piece(self, choice: Choice, delta: Delta) -> Json:
        """One token of a choice of a stream."""

    def opening(self, choice: Choice) -> Json | None:
        """What goes into the stream just before a choice's first token, if anything does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """Fields that the engine's clients ask for and OpenAI's API does not have."""

    token_ids: bool
    prompt_logprobs: bool

    def of_prompt(self, choice: Choice, scored: Choice, names: TokenNames) -> Json:
        """`scored` is the choice of the same prompt that carries the prompt's scores."""
        extras: Json = {}
        if self.prompt_logprobs and scored.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(scored.prompt_logprobs, names)
        if self.token_ids:
            extras["prompt_token_ids"] = choice.prompt_token_ids
        return extras

    def of_tokens(self, deltas: Sequence[Delta]) -> Json:
        if not self.token_ids:
            return {}
        return {"token_ids": [d.token_id for d in deltas if d.token_id is not None]}


def _ending(last: Delta) -> Json:
    return {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}


def _scores(deltas: Sequence[Delta]) -> list[TokenLogprobs]:
    return [delta.logprobs for delta in deltas if delta.logprobs is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class ChatFormat:
    names: TokenNames
    choices: Sequence[Choice]
    extras: Extras
    wants_logprobs: bool
    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"

    @property
    def has_plain_pieces(self) -> bool:
        return not (self.wants_logprobs or self.extras.token_ids)

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> Json:
        content = "".join(delta.text for delta in deltas)
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._logprobs(deltas),
            **_ending(deltas[-1]),
            **self.extras.of_prompt(choice, self.choices[0], self.names),
            **self.extras.of_tokens(deltas),
        }

    def piece(self, choice: Choice, delta: Delta) -> Json:
        role = {"role": "assistant"} if delta.is_first else {}
        prompt = self.extras.of_prompt(choice, choice, self.names) if delta.is_first else {}
        return {
            "index": choice.index,
            "delta": {**role, "content": delta.text},
            "logprobs": self._logprobs([delta]),
            **_ending(delta),
            **prompt,
            **self.extras.of_tokens([delta]),
        }

    def opening(self, choice: Choice) -> Json | None:
        return None

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        return chat_logprobs(_scores(deltas), self.names) if self.wants_logprobs else None


@dataclasses.dataclass(slots=True)
class TextFormat:
    """With `echo` a choice begins with its prompt, whose text is `prompt_texts` by prompt."""

    names: TokenNames
    choices: Sequence[Choice]
    extras: Extras
    num_logprobs: int | None
    choices_per_prompt: int
    prompt_texts: Sequence[str] | None
    object_name: str = "text_completion"
    chunk_object_name: str = "text_completion"
    _offsets: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def has_plain_pieces(self) -> bool:
        return self.num_logprobs is None and not self.extras.token_ids

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        token_ids = [delta.token_id for delta in deltas if delta.token_id is not None]
        scores: list[TokenLogprobs | None] = [*_scores(deltas)]
        if self.prompt_texts is not None:
            text = self._prompt_text(choice) + text
            token_ids = choice.prompt_token_ids + token_ids
            scores = [*self._prompt_scores(choice), *scores]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, token_ids, scores),
            **_ending(deltas[-1]),
            **self.extras.of_prompt(choice, self._scored(choice), self.names),
            **self.extras.of_tokens(deltas),
        }

    def piece(self, choice: Choice, delta: Delta) -> Json:
        token_ids = [] if delta.token_id is None else [delta.token_id]
        prompt = (
            self.extras.of_prompt(choice, self._scored(choice), self.names)
            if delta.is_first
            else {}
        )
        return {
            "index": choice.index,
            "text": delta.text,
            "logprobs": self._logprobs(choice, token_ids, _scores([delta])),
            **_ending(delta),
            **prompt,
            **self.extras.of_tokens([delta]),
        }

    def opening(self, choice: Choice) -> Json | None:
        if self.prompt_texts is None:
            return None
        scores = self._prompt_scores(choice)
        return {
            "index": choice.index,
            "text": self._prompt_text(choice),
            "logprobs": self._logprobs(choice, choice.prompt_token_ids, scores),
            "finish_reason": None,
            "stop_reason": None,
        }

    def _logprobs(
        self, choice: Choice, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> Json | None:
        """A choice's offsets go on where its previous piece ended."""
        if self.num_logprobs is None:
            return None
        offset = self._offsets.get(choice.index, 0)
        logprobs = text_logprobs(token_ids, scores, self.names, offset)
        self._offsets[choice.index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs

    def _scored(self, choice: Choice) -> Choice:
        return self.choices[choice.index - choice.index % self.choices_per_prompt]

    def _prompt_text(self, choice: Choice) -> str:
        assert self.prompt_texts is not None
        return self.prompt_texts[choice.index // self.choices_per_prompt]

    def _prompt_scores(self, choice: Choice) -> Sequence[TokenLogprobs | None]:
        """The prompt's scores with as many alternatives as are wanted of generated tokens."""
        scores = self._scored(choice).prompt_logprobs or []
        return [s and dataclasses.replace(s, top=s.top[: self.num_logprobs]) for s in scores]
