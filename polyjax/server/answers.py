"""Choices as the JSON objects of the OpenAI API: bodies, log-probabilities, usage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from polyjax.engine.types import TokenLogprobs
from polyjax.io.tokenizer import Tokenizer
from polyjax.server.generation import Generation

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one answer share. `numerics` is the class its programs promise."""

    id: str
    created_s: int
    model: str
    numerics: str

    def fingerprint(self, epoch: int) -> str:
        """Changes whenever equal requests may get other bits."""
        return f"epoch-{epoch}-{self.numerics}"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are spelled in log-probabilities: as their text, or as "token_id:7"."""

    tokenizer: Tokenizer
    as_ids: bool

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token_id))


def chat_logprobs(scores: Iterable[TokenLogprobs], names: TokenNames) -> Json:
    """The `logprobs` of a chat choice."""

    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": names.text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": names.bytes(token_id),
        }

    content = [
        {
            **entry(score.token_id, score.logprob),
            "top_logprobs": [entry(*alternative) for alternative in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    names: TokenNames,
    first_offset: int,
) -> Json:
    """The `logprobs` of a text choice; the first token of an echoed prompt has no score."""
    texts = [names.text(token_id) for token_id in token_ids]
    offsets, offset = [], first_offset
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "text_offset": offsets,
        "tokens": texts,
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST_LOGPROB) for s in scores],
        "top_logprobs": [None if s is None else _top_by_text(s, names) for s in scores],
    }


def _top_by_text(score: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """The alternatives and the token itself; of tokens spelled alike the likeliest counts."""
    by_text: dict[str, float] = {}
    for token_id, logprob in [*score.top, (score.token_id, score.logprob)]:
        text = names.text(token_id)
        by_text[text] = max(logprob, by_text.get(text, LOWEST_LOGPROB))
    return by_text


def prompt_logprobs(scores: Sequence[TokenLogprobs | None], names: TokenNames) -> list[Json | None]:
    """The `prompt_logprobs` extra: per position, token ids to log-probability, rank and text."""

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {
            "logprob": max(logprob, LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": names.text(token_id),
        }

    def position(score: TokenLogprobs) -> Json:
        top = {str(t): entry(t, logprob, 1 + i) for i, (t, logprob) in enumerate(score.top)}
        own = entry(score.token_id, score.logprob, 1 + score.rank)
        return {str(score.token_id): own, **top}

    return [None if score is None else position(score) for score in scores]


def usage(generation: Generation, completion: int) -> Json:
    """Tokens spent, `completion` of them generated; a prompt counts once, whatever n is."""
    prompt = generation.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def head_fields(head: Head, object_name: str, epoch: int) -> Json:
    return {
        "id": head.id,
        "object": object_name,
        "created": head.created_s,
        "model": head.model,
        "system_fingerprint": head.fingerprint(epoch),
    }
