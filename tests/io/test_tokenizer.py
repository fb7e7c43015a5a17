"""Tokenizers: agreement with the library, and streams that never show half a character."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.core.errors import ModelError, RequestError
from polyjax.io.files import open_model
from polyjax.io.gguf_tokenizer import build_tokenizer, tokenizer_config
from polyjax.io.tokenizer import Tokenizer
from tests.goldens import ROOT, real_golden
from tests.io.tiny_gguf import sentencepiece_metadata


def sentencepiece(**more: Any) -> Tokenizer:
    metadata = sentencepiece_metadata(**more)
    return Tokenizer(build_tokenizer(metadata, "test"), tokenizer_config(metadata))


SMOLLM2 = open_model(None).load_tokenizer()
BYTES = open_model(ROOT / "llama" / "gqa").load_tokenizer()  # token i is byte i
SENTENCEPIECE = sentencepiece()
GEMMA_LIKE = sentencepiece(add_space_prefix=False)
EVERY = {
    "smollm2": SMOLLM2,
    "bytes": BYTES,
    "sentencepiece": SENTENCEPIECE,
    "gemma-like": GEMMA_LIKE,
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SOME_TEXTS = [
    "",
    " ",
    "  two",
    "hey hey",
    "naïve café",
    "日本語 🦜🏽",
    "a\n\n\tb",
    "\u2581",
    "e\u0301",
]


def well_formed_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_encode_and_decode_are_the_librarys(name: str, text: str) -> None:
    tokenizer = EVERY[name]
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("name", ["smollm2", "bytes", "gemma-like"])
@pytest.mark.parametrize("text", SOME_TEXTS)
def test_text_survives(name: str, text: str) -> None:
    kept = text.replace("\u2581", " ") if name == "gemma-like" else text
    assert EVERY[name].decode(EVERY[name].encode(text)) == kept


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stream_joins_to_decode_and_never_splits_a_character(name: str, data: Any) -> None:
    """Over arbitrary ids, so over ill-formed UTF-8 too: invalid bytes, cut characters, specials."""
    tokenizer = EVERY[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    stream = tokenizer.detokenizer(skip, at_start=True)
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    raw = b"".join(
        tokenizer.token_bytes(i) for i in ids if not (skip and i in tokenizer.special_ids)
    )
    text = raw.decode("utf-8", "replace")
    assert "".join(pieces).lstrip(" ") == text.lstrip(" ")


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_stream_of_bytes_emits_whole_characters_at_once(text: str) -> None:
    stream = BYTES.detokenizer()
    pieces = [stream.push(byte) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.finish() == ""


def test_invalid_bytes_do_not_hold_the_stream_back() -> None:
    stream = BYTES.detokenizer()
    assert stream.push(0xFF) == "\ufffd"
    assert stream.push(0xE2) == "" and stream.push(0x82) == ""
    assert stream.push(ord("x")) == "\ufffdx"
    assert stream.push(0xF0) == "" and stream.finish() == "\ufffd"


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [65, 257, 66]
    assert BYTES.decode(ids) == "AB"
    assert BYTES.decode(ids, skip_special_tokens=False) == "A<|end|>B"


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    assert BYTES.decode([65, 263, 10**6, -1, 66]) == "AB"
    assert BYTES.token_bytes(-1) == b""


def test_a_stream_after_other_text_keeps_its_leading_space() -> None:
    ids = well_formed_ids(SENTENCEPIECE, "hey hey")
    assert SENTENCEPIECE.decode(ids) == "hey hey"
    stream = SENTENCEPIECE.detokenizer()
    assert "".join(map(stream.push, ids)) == " hey hey"


def test_token_text_and_bytes_for_logprobs() -> None:
    assert (BYTES.token_bytes(0xC3), BYTES.token_text(0xC3)) == (b"\xc3", "\ufffd")
    (token,) = well_formed_ids(SMOLLM2, " Paris")
    assert (SMOLLM2.token_bytes(token), SMOLLM2.token_text(token)) == (b" Paris", " Paris")
    assert SENTENCEPIECE.token_bytes(3 + 0xE9) == b"\xe9"


def test_half_a_surrogate_pair_is_the_clients_mistake() -> None:
    for tokenizer in EVERY.values():
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode(json.loads('"a\\ud800b"'))


def test_smollm2_tokens_are_those_of_transformers() -> None:
    """The golden prompts were tokenized by transformers from a converted directory."""
    expected = real_golden("smollm2")
    for row, text in [(1, "Water boils at a temperature of"), (2, "def fibonacci(n):\n")]:
        assert SMOLLM2.encode(text) == expected.prompt(row)
    assert (SMOLLM2.bos_token_id, SMOLLM2.eos_token_id, SMOLLM2.vocab_size) == (1, 2, 49152)


# bos and eos around a text


def with_settings(**config: Any) -> Tokenizer:
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(BYTES.backend, {**tokens, **config})


def with_post_processor(**config: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<|begin|>", "$A", "<|end|>"],
        pair=["$A", "$B"],
        special_tokens=[("<|begin|>", 256), ("<|end|>", 257)],
    )
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    return Tokenizer(backend, {**tokens, **config})


@pytest.mark.parametrize(
    "tokenizer, expected",
    [
        (with_settings(), [65]),
        (with_settings(add_bos_token=True), [256, 65]),
        (with_settings(add_bos_token=True, add_eos_token=True), [256, 65, 257]),
        (with_post_processor(), [256, 65, 257]),
        (with_post_processor(add_bos_token=True, add_eos_token=None), [256, 65, 257]),
        (with_post_processor(add_eos_token=False), [256, 65]),
        (with_post_processor(add_bos_token=False, add_eos_token=False), [65]),
        (SENTENCEPIECE, [1, 259, 3 + 65]),
        (sentencepiece(add_bos_token=False, add_eos_token=True), [259, 3 + 65, 2]),
    ],
)
def test_bos_and_eos(tokenizer: Tokenizer, expected: list[int]) -> None:
    assert tokenizer.encode("A") == expected
    bare = [i for i in expected if i not in tokenizer.special_ids]
    assert tokenizer.encode("A", add_special_tokens=False) == bare


def test_special_tokens_named_for_templates() -> None:
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "unk_token": None}
    tokenizer = Tokenizer(BYTES.backend, config)
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


# Rebuilt from GGUF


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("hey hey", ["\u2581hey", "\u2581hey"]),
        ("eh", ["\u2581", "e", "h"]),
        ("abc", ["\u2581", "a", "bc"]),  # both ab and bc are tokens; bc has the better score
    ],
)
def test_sentencepiece_merges_follow_the_scores(text: str, pieces: list[str]) -> None:
    assert SENTENCEPIECE.backend.encode(text, add_special_tokens=False).tokens == pieces


def test_unsupported_decoder_is_named() -> None:
    backend = tokenizers.Tokenizer.from_str(BYTES.backend.to_str())
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend, {})


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
        ({"tokenizer.ggml.scores": None}, "scores is missing"),
        ({"tokenizer.ggml.model": "gpt2"}, "merges is missing"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.pre": "?",
            },
            "pre-tokenizer '\\?' is not known",
        ),
    ],
)
def test_unreadable_gguf_tokenizers(change: dict[str, Any], complaint: str) -> None:
    metadata = {**sentencepiece_metadata(), **change}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ModelError, match=complaint):
        build_tokenizer(metadata, "test")
