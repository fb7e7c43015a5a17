"""A tokenizer for models of random weights, whose directory may hold a config and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyjax.core.errors import ModelError
from polyjax.io.files import ModelFiles

BYTES = 256


def with_tokenizer(files: ModelFiles) -> ModelFiles:
    """Returns `files`, with a placeholder where they have no tokenizer.

    In it the first 256 tokens are the bytes, so that any text encodes; token i further on reads
    " i". Raises ModelError for a tokenizer that is there but does not parse.
    """
    if files.path.is_file() or (files.path / "tokenizer.json").exists():
        return files
    vocab_size = files.config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < BYTES:
        raise ModelError(str(files.path), ["there is neither a tokenizer nor a usable vocab_size"])
    return dataclasses.replace(files, open_tokenizer=lambda: _placeholder(vocab_size))


def _placeholder(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    space = "\u0120"  # how byte-level vocabularies spell it
    vocab |= {f"{space}{i}": i for i in range(BYTES, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
