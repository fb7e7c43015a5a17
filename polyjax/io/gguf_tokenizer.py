"""Rebuilds a tokenizer from GGUF metadata: byte-level BPE, or SentencePiece from its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # llama.cpp's token types
_PREFIX = "tokenizer.ggml."

# How each family cuts text before merging, as published in its tokenizer.json.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what tokenizer_config.json would hold."""
    tokens: Sequence[str] = metadata.get(_PREFIX + "tokens", ())
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ):
        token_id = metadata.get(_PREFIX + key)
        if token_id is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    config["add_bos_token"] = _adds_bos(metadata)
    config["add_eos_token"] = bool(metadata.get(_PREFIX + "add_eos_token", False))
    return config


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """llama.cpp's rule: SentencePiece and Llama 3 begin a text with bos unless the file says no."""
    default = (
        metadata.get(_PREFIX + "model") == "llama" or metadata.get(_PREFIX + "pre") == "llama-bpe"
    )
    return bool(metadata.get(_PREFIX + "add_bos_token", default))


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """Returns a `tokenizers.Tokenizer`. Raises ModelError where the kind is not known.

    Rebuilding 262,144 SentencePiece tokens takes about 2 s on one core.
    """
    kind = metadata.get(_PREFIX + "model")
    missing = [
        f"metadata key {_PREFIX}{key} is missing"
        for key in ("tokens", "token_type", "merges" if kind == "gpt2" else "scores")
        if _PREFIX + key not in metadata
    ]
    if kind not in ("gpt2", "llama"):
        missing = [f"tokenizer model {kind!r} is not supported (gpt2 and llama are)"]
    if missing:
        raise ModelError(where, missing)
    try:
        tokenizer = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    except ValueError as error:
        raise ModelError(where, [str(error)]) from error
    _add_special_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = metadata[_PREFIX + "tokens"]
    kind = metadata.get(_PREFIX + "pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[_PREFIX + "merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(kind: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if kind in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}.get(kind)
    if words is None:
        raise ValueError(f"pre-tokenizer {kind!r} is not known; use the model's tokenizer.json")
    split = pre_tokenizers.Split(Regex(words), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])


def _sentencepiece(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens: list[str] = metadata[_PREFIX + "tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata.get(_PREFIX + "unknown_token_id", 0)]
    merges = _merges_from_scores(vocab, metadata[_PREFIX + "scores"])
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_PREFIX + "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns BPE merges in the order SentencePiece would apply them.

    SentencePiece merges whichever adjacent pair forms the token of the best score; every way of
    cutting a token into two others is therefore a merge, ranked by the token's score, then by the
    ids of the parts.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left = vocab.get(token[:cut])
            if left is None:
                continue
            right = vocab.get(token[cut:])
            if right is not None:
                found.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    tokens: list[str] = metadata[_PREFIX + "tokens"]
    types: list[int] = metadata[_PREFIX + "token_type"]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _UNKNOWN)
    ]
    defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _add_bos_and_eos(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    from tokenizers import processors

    config = tokenizer_config(metadata)
    before = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    after = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if not before and not after:
        return
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{t}:1" for t in before),
            "$B:1",
            *(f"{t}:1" for t in after),
        ],
        special_tokens=ids,
    )
