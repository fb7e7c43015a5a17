"""Text to token ids and back, one token at a time where streaming needs it.

Decoding goes through the bytes each token stands for, so that a stream costs the same for every
token, and the streamed pieces always join up to what `decode` returns for the whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyjax.core.errors import ModelError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the rules of tokenizer_config.json on top.

    `backend` is the wrapped tokenizer. Immutable once built; safe to use from several threads.
    """

    def __init__(self, backend: Any, config: Mapping[str, Any]):
        self.backend = backend
        self.config = config
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._prefix, self._suffix = self._added_around_text()
        self._to_bytes, self._strip_first = _byte_rule(backend.decoder)
        self._pieces: dict[int, bytes] = {}

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names as chat templates know them ("bos_token", ...) to token texts."""
        tokens = {}
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self.config.get(role)
            if isinstance(value, Mapping):  # older files spell out an AddedToken
                value = value.get("content")
            if isinstance(value, str):
                tokens[role] = value
        return tokens

    def _added_around_text(self) -> tuple[list[int], list[int]]:
        """Ids put before and after a text: the post-processor's, unless the config overrules it."""
        encoded = self.backend.encode("a", add_special_tokens=True)
        mask = list(encoded.special_tokens_mask)
        first = mask.index(0) if 0 in mask else len(mask)
        last = len(mask) - mask[::-1].index(0) if 0 in mask else len(mask)
        prefix, suffix = encoded.ids[:first], encoded.ids[last:]
        wants_bos, wants_eos = self.config.get("add_bos_token"), self.config.get("add_eos_token")
        if isinstance(wants_bos, bool) and self.bos_token_id is not None:
            has_bos = self.bos_token_id in prefix
            if wants_bos and not has_bos:
                prefix = [self.bos_token_id, *prefix]
            elif has_bos and not wants_bos:
                prefix = [i for i in prefix if i != self.bos_token_id]
        if isinstance(wants_eos, bool) and self.eos_token_id is not None:
            has_eos = self.eos_token_id in suffix
            if wants_eos and not has_eos:
                suffix = [*suffix, self.eos_token_id]
            elif has_eos and not wants_eos:
                suffix = [i for i in suffix if i != self.eos_token_id]
        return prefix, suffix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids. Raises RequestError if `text` holds half a surrogate pair."""
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "the text is not valid Unicode: it holds half a surrogate pair"
            ) from error
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`. Ids outside the vocabulary decode to nothing."""
        stream = self.detokenizer(skip_special_tokens, at_start=True)
        return "".join(map(stream.push, ids)) + stream.finish()

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Returns the decoder of one stream. `at_start` is False where text precedes its tokens.

        Special tokens of `shown_ids` are not skipped.
        """
        hidden = self.special_ids - shown_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.token_bytes, hidden, self._strip_first if at_start else 0)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; b"" for an id outside the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
            piece = b"" if token is None else self._to_bytes(token)
            self._pieces[token_id] = piece
        return piece

    def token_text(self, token_id: int) -> str:
        """One token on its own as text; a part of a UTF-8 character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class Detokenizer:
    """Turns one stream of token ids into text; never emits a part of a UTF-8 character.

    Bytes that can begin a character are held back until it is complete or cannot be. An ill-formed
    sequence becomes one U+FFFD, as Unicode recommends (chapter 3.9).
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], hidden: frozenset[int], strip_first: int = 0
    ):
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._strip = strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token, often that of the token alone."""
        if token_id in self._hidden:
            return ""
        piece = self._token_bytes(token_id)
        if self._strip and piece:
            kept = piece.lstrip(b" ")
            piece = piece[min(self._strip, len(piece) - len(kept)) :]
            self._strip = 0
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Returns what is left at the end: U+FFFD if a character stayed incomplete, else ""."""
        return self._decoder.decode(b"", final=True)


def _byte_rule(decoder: Any) -> tuple[Callable[[str], bytes], int]:
    """Returns (token text to bytes, leading spaces a text loses) for a tokenizer's decoder.

    Raises ModelError for a decoder that is neither byte-level nor SentencePiece's.
    """
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, 0
    space, strip, has_byte_tokens = "", 0, False
    for step in steps:
        if step["type"] == "Replace" and step["content"] == " ":
            space = step["pattern"].get("String", "")
        elif step["type"] == "Metaspace":
            space = step["replacement"]
            strip = 0 if step.get("prepend_scheme") == "never" else 1
        elif step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0:
            strip = step["start"]
        elif step["type"] == "ByteFallback":
            has_byte_tokens = True
        elif step["type"] != "Fuse":
            raise ModelError("tokenizer.json", [f"decoder {' + '.join(kinds)} is not supported"])
    return lambda token: _sentencepiece_bytes(token, space, has_byte_tokens), strip


def _sentencepiece_bytes(token: str, space: str, has_byte_tokens: bool) -> bytes:
    if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return (token.replace(space, " ") if space else token).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token outside the alphabet (an added one with a space, say) stands for its own text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
