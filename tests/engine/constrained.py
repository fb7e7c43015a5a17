"""An engine on a tiny random Llama that has a tokenizer, for requests with a grammar."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.plan import Plan
from polyjax.engine.engine import Engine
from polyjax.engine.types import EngineConfig, Grammar, SamplingParams
from tests import tiny_llama
from tests.engine.serving import Stream, give_clear_weights

EOS = 2
CONTEXT = 1024
MAX_NUM_SEQS = 16
PAGES = CONTEXT // tiny_llama.PAGE_SIZE
LADDER = BucketLadder(
    decode=(Bucket(1, MAX_NUM_SEQS, PAGES),),
    prefill=(Bucket(16, 4, PAGES),),
    sampler_sequences=(4, MAX_NUM_SEQS),
)
WORDS = ('{"', '":', "true", "false", "null", '","', '"}', "red", "],", "ab")


def tokenizer() -> Tokenizer:
    """A token for each printable ASCII character and some words; fewer than the model has."""
    space = "\u0120"  # as byte-level tokenizers spell it
    characters = [space, *(chr(code) for code in range(0x21, 0x7F))]
    vocabulary = ["<pad>", "<bos>", "<eos>", *characters, *WORDS]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return made


def make_constrained_engine(folder: Path, **changes: Any) -> Engine:
    model = folder / "model"
    model.mkdir(parents=True)
    config = {**tiny_llama.HF_CONFIG, "max_position_embeddings": CONTEXT}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(model / "tokenizer.json"))
    plan = Plan(ladder=LADDER).to_json()
    del plan["mesh"]
    (folder / "plan.json").write_text(json.dumps(plan))
    engine = EngineConfig(
        model=str(model),
        load_format="dummy",
        block_size=tiny_llama.PAGE_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64,
        num_kv_pages=MAX_NUM_SEQS * PAGES // 4,
        plan=str(folder / "plan.json"),
        compile_cache_dir=str(folder / "programs"),
    )
    made = Engine(dataclasses.replace(engine, **changes))
    give_clear_weights(made)
    return made


def schema(document: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(document))


def constrained(grammar: Grammar, max_tokens: int = 100, **changes: Any) -> SamplingParams:
    fields = {"temperature": 0.0, **changes}
    return SamplingParams(max_tokens=max_tokens, grammar=grammar, **fields)


def text_of(stream: Stream) -> str:
    return str(tokenizer().decode(stream.tokens))
