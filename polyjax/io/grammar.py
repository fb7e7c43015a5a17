"""Structured output: which tokens may come next so that the text stays inside a grammar.

llguidance does the work. An HTTP process only checks a grammar (`check`), the engine process
compiles it, asks a `Matcher` for a mask before each step of a constrained row and tells it the
token that was sampled. Masks are made beside the device step, not in it. No jax here.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyjax.core.errors import ConfigError, RequestError

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
# llguidance's options of JSON without white space between its parts.
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_ANY_OBJECT = '{"type": "object"}'
COMPILED_GRAMMARS = 32  # kept: a request that repeats one of the last of them copies it


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
                return llguidance.LLMatcher.grammar_from_json_schema(_ANY_OBJECT, overrides=COMPACT)
            case "json_schema":
                if not isinstance(json.loads(text), dict | bool):
                    raise ValueError("a JSON schema is an object or a boolean")
                return from_schema(text, overrides=COMPACT)
            case "regex":
                return llguidance.grammar_from("regex", text)
            case "choice":
                choices = json.loads(text)
                is_list = isinstance(choices, list) and len(choices) > 0
                if not is_list or not all(isinstance(c, str) and c for c in choices):
                    raise ValueError("choice wants a list of strings that are not empty")
                return llguidance.grammar_from("choice", json.dumps(choices))
            case "grammar":
                return llguidance.grammar_from("grammar", text)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{kind}: {error}", kind) from error
    raise RequestError(f"unknown grammar kind {kind!r}; known: {', '.join(KINDS)}", "grammar")


@functools.lru_cache(maxsize=128)
def check(kind: str, text: str) -> None:
    """Raises RequestError (status 400) with llguidance's reason if a grammar cannot be used.

    Takes a millisecond, but up to a few hundred for what is as large as it is allowed to be.
    """
    compiled = compile_text(kind, text)
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(
        compiled, limits=_limits()
    )
    if is_error:
        raise RequestError(f"{kind}: {messages[0]}", kind)


def _limits() -> Any:
    """llguidance's own limits on what a grammar may cost; its errors without the parser's state."""
    return _llguidance().LLParserLimits(verbose_errors=False)


class Matcher:
    """The state of one constrained sequence. Not thread-safe; owned by the engine loop."""

    def __init__(self, matcher: Any, num_words: int):
        self._matcher = matcher
        self._num_words = num_words

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of allowed next tokens into `row`, int32 [ceil(V/32)]; bit 1: allowed.

        Raises RequestError if the grammar turns out to be too complex or leads nowhere.
        """
        assert row.dtype == np.int32 and row.size == self._num_words and row.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise RequestError(f"structured output: {_reason(self._matcher)}", "grammar")

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advances over sampled tokens. Raises RequestError if the grammar does not allow one."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise RequestError(f"structured output: {_reason(self._matcher)}", "grammar")

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole document of the grammar."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether nothing but end-of-sequence may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Makes matchers for one tokenizer, given as the text of its tokenizer.json.

    Building one holds the interpreter for some tenths of a second; `matcher` does not, and may be
    called from several threads. Raises ConfigError where llguidance is missing or cannot use the
    tokenizer. Without `eos_token_ids` the tokenizer's own end of sequence counts.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]):
        llguidance = _llguidance()
        ends = [token for token in eos_token_ids if token < vocab_size]
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json,
                n_vocab=vocab_size,
                eos_token=ends or None,
                slices=llguidance.LLTokenizer.json_slices(),  # first masks take a quarter with them
            )
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"structured output with this tokenizer: {error}") from error
        self.eos_token_ids: tuple[int, ...] = tuple(self._tokenizer.eos_tokens)
        self.num_mask_words = -(-vocab_size // 32)
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, kind: str, text: str) -> Matcher:
        """Returns a fresh matcher. Raises RequestError with the reason for an unusable grammar."""
        key = (kind, text)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
                return Matcher(compiled.deep_copy(), self.num_mask_words)
        compiled = self._compile(kind, text)
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > COMPILED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self.num_mask_words)

    def _compile(self, kind: str, text: str) -> Any:
        """A matcher that is only copied. Its first mask, the slowest, is made for all of them."""
        grammar = compile_text(kind, text)
        made = _llguidance().LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise RequestError(f"{kind}: {_reason(made)}", kind)
        return made


def _reason(matcher: Any) -> str:
    """What is wrong with a matcher in error, in a sentence."""
    reason = str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    if reason == "NoExtensionBias":
        return "no token of the model's vocabulary continues the text"
    return reason
