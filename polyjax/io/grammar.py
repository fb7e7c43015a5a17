"""Structured output: which tokens may come next so that the text stays inside a grammar.

llguidance does the work. An HTTP process only checks a grammar (`check`), the engine process
compiles it, asks a `Matcher` for a mask before each step of a constrained row and tells it the
token that was sampled. Masks are made beside the device step, not in it. No jax here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyjax.core.errors import ConfigError, RequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_ANY_OBJECT = '{"type": "object"}'


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "structured output needs llguidance: pip install 'polyjax[grammar]'"
        ) from error
    return llguidance


def compile_text(kind: str, text: str) -> str:
    """Returns llguidance's own form of a grammar. JSON comes out compact, without white space.

    `text` is a JSON schema, a regular expression, a JSON list of strings (choice), or a Lark or
    GBNF grammar; it is ignored for json_object. Raises RequestError saying what is wrong with it.
    """
    llguidance = _llguidance()
    from_schema = llguidance.LLMatcher.grammar_from_json_schema
    try:
        match kind:
            case "json_object":
                return llguidance.LLMatcher.grammar_from_json_schema(
                    _ANY_OBJECT, overrides=_COMPACT
                )
            case "json_schema":
                if not isinstance(json.loads(text), dict | bool):
                    raise ValueError("a JSON schema is an object or a boolean")
                return from_schema(text, overrides=_COMPACT)
            case "regex":
                return llguidance.grammar_from("regex", text)
            case "choice":
                choices = json.loads(text)
                if not choices or not all(isinstance(c, str) and c for c in choices):
                    raise ValueError("choice wants a list of strings that are not empty")
                return llguidance.grammar_from("choice", json.dumps(choices))
            case "grammar":
                return llguidance.grammar_from("grammar", text)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{kind}: {error}", kind) from error
    raise RequestError(f"unknown grammar kind {kind!r}; known: {', '.join(KINDS)}", "grammar")


def check(kind: str, text: str) -> None:
    """Raises RequestError (status 400) with llguidance's reason if a grammar cannot be used."""
    compiled = compile_text(kind, text)
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(compiled)
    if is_error:
        raise RequestError(f"{kind}: {messages[0]}", kind)


class Matcher:
    """The state of one constrained sequence. Not thread-safe; owned by the engine loop."""

    def __init__(self, matcher: Any, num_words: int):
        self._matcher = matcher
        self._num_words = num_words

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of allowed next tokens into `row`, int32 [ceil(V/32)]; bit 1: allowed."""
        assert row.dtype == np.int32 and row.size == self._num_words and row.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advances over sampled tokens. Raises RequestError if the grammar does not allow one."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise RequestError(f"structured output: {self._matcher.get_error()}")

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole document of the grammar."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Makes matchers for one tokenizer, given as the text of its tokenizer.json."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        llguidance = _llguidance()
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self.num_mask_words = -(-vocab_size // 32)

    def matcher(self, kind: str, text: str) -> Matcher:
        """Returns a fresh matcher. Raises RequestError with the reason for an unusable grammar."""
        made = _llguidance().LLMatcher(self._tokenizer, compile_text(kind, text), log_level=0)
        if made.is_error():
            raise RequestError(f"{kind}: {made.get_error()}", kind)
        return Matcher(made, self.num_mask_words)
