"""Grammar masks: every document sampled under one is valid, bad grammars are named."""

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyjax.core.errors import RequestError
from polyjax.io.grammar import GrammarCompiler, check
from tests.schemas import bounded_schema

PADDING = 10  # a model's vocabulary is often larger than its tokenizer's


def byte_tokenizer() -> Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*symbols, '{"', '":', "true", "null", '","', '"}', "red", "<eos>"]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    size = tokenizer.get_vocab_size()
    return GrammarCompiler(tokenizer.to_str(), size + PADDING, [tokenizer.token_to_id("<eos>")])


def allowed(matcher, compiler) -> np.ndarray:
    row = np.zeros(compiler.num_mask_words, np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def random_document(matcher, compiler, tokenizer, seed: int, limit: int = 1000) -> tuple[str, bool]:
    """Walks at random through what the masks allow; returns the text and whether it ended."""
    rng, eos, ids = random.Random(seed), tokenizer.token_to_id("<eos>"), []
    while len(ids) < limit:
        options = allowed(matcher, compiler)
        assert options.size, "a mask must always leave a way on"
        assert options.max() < tokenizer.get_vocab_size(), "padding ids are no tokens"
        token = int(rng.choice(options))
        if token == eos:
            return tokenizer.decode(ids), True
        matcher.consume([token])
        ids.append(token)
    return tokenizer.decode(ids), False


def test_every_document_of_200_schemas_is_valid_and_compact(compiler, tokenizer):
    for seed in range(200):
        schema = bounded_schema(seed)
        matcher = compiler.matcher("json_schema", json.dumps(schema))
        text, ended = random_document(matcher, compiler, tokenizer, seed)
        assert ended, f"seed {seed} is not bounded: {schema}"
        document = json.loads(text)
        jsonschema.validate(document, schema)
        outside_strings = "".join(text.split('"')[::2])
        assert not any(c.isspace() for c in outside_strings), (
            f"seed {seed}: {text!r} is not compact"
        )


@pytest.mark.parametrize(
    ("kind", "text", "matches"),
    [
        ("regex", "[a-c]{2,4}", lambda t: 2 <= len(t) <= 4 and set(t) <= set("abc")),
        ("choice", '["yes", "no"]', lambda t: t in ("yes", "no")),
        ("grammar", 'start: "a" "b"+', lambda t: t.startswith("ab") and set(t[1:]) == {"b"}),
        ("grammar", 'root ::= "x" ("y" | "z")', lambda t: t in ("xy", "xz")),
    ],
)
def test_other_kinds(compiler, tokenizer, kind, text, matches):
    check(kind, text)
    for seed in range(5):
        document, ended = random_document(compiler.matcher(kind, text), compiler, tokenizer, seed)
        assert ended and matches(document), document


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", "{"),
        ("json_schema", "3"),
        ("regex", "("),
        ("choice", "[]"),
        ("choice", '"ab"'),
        ("choice", '["", "a"]'),
        ("grammar", "start: nowhere"),
        ("unheard_of", "x"),
    ],
)
def test_a_bad_grammar_is_refused_with_a_reason(compiler, kind, text):
    with pytest.raises(RequestError) as refused:
        check(kind, text)
    assert refused.value.status == 400
    assert len(str(refused.value)) > len(kind) + 5
    with pytest.raises(RequestError):
        compiler.matcher(kind, text)


def test_a_token_outside_the_grammar_is_an_error(compiler, tokenizer):
    matcher = compiler.matcher("choice", '["yes"]')
    with pytest.raises(RequestError):
        matcher.consume([tokenizer.token_to_id("n")])
