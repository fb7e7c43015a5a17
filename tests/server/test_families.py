"""Every model family behind the HTTP server: streamed, preempted and from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from models import FAMILIES
from tests.goldens import Golden, golden
from tests.server.serving import Server, running, wait_for

CASES = (
    ("llama", "gqa"),
    ("mistral", "full"),  # of windows alone a pool is never short; gemma3 has both kinds
    ("smollm3", "nope"),
    ("qwen2", "untied"),
    ("qwen3", "untied"),
    ("qwen3_moe", "normalized"),
    ("gemma3", "local_global"),
    ("mixtral", "full"),
    ("deepseek_v3", "grouped"),
    ("kimi_k2", "k2"),
    ("minimax_m2", "partial_rope"),
)
# Built of the same blocks as another of the list; their goldens run by default, without a server.
ALIKE = ("mistral", "qwen2", "qwen3", "qwen3_moe", "kimi_k2", "minimax_m2")
# Room for the longest sequence alone, and not for all three: the last ones must be preempted.
PAGE_TOKENS, NUM_PAGES, MAX_MODEL_LEN = 4, 28, 112
FLAGS = (
    *(f"--block_size={PAGE_TOKENS}", f"--num_kv_pages={NUM_PAGES}"),
    *(f"--max_model_len={MAX_MODEL_LEN}", "--max_num_seqs=3", "--max_num_batched_tokens=32"),
    *("--max_programs=4", "--dtype=float32"),
)
READY_LIMIT_S = 300.0  # to compile the programs on a machine that is busy with other tests


def body(truth: Golden, rows: Sequence[int]) -> dict[str, object]:
    [num_tokens] = {len(truth.continuation(row)) for row in rows}
    return {
        "prompt": [truth.prompt(row) for row in rows],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def streamed(server: Server, truth: Golden) -> list[list[int]]:
    """The tokens of all rows, which run side by side: they come in one request."""
    tokens: list[list[int]] = [[] for _ in range(truth.num_rows)]
    for event in server.stream("/v1/completions", body(truth, range(truth.num_rows))):
        for choice in event["choices"]:
            tokens[choice["index"]] += choice.get("token_ids", [])
    return tokens


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(*c, marks=[pytest.mark.slow] if c[0] in ALIKE else []) for c in CASES],
)
def test_a_family_is_served_with_the_golden_tokens(family: str, case: str) -> None:
    truth = golden(family, case)
    assert sum(truth.lens) > PAGE_TOKENS * NUM_PAGES > max(truth.lens)
    with running(truth.path, FLAGS, ready_limit_s=READY_LIMIT_S) as server:
        assert streamed(server, truth) == [truth.continuation(r) for r in range(truth.num_rows)]
        wait_for(lambda: server.metric("vllm:num_preemptions_total") > 0, "a preemption")
        for _ in range(2):  # after the first run, which others do not disturb, it is cached
            again = server.post("/v1/completions", body(truth, range(1))).json()
            assert again["choices"][0]["token_ids"] == truth.continuation(0)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < len(truth.prompt(0)) and cached % PAGE_TOKENS == 0
        assert server.metric("polyjax_compiles_after_ready_total") == 0


def test_every_family_is_among_the_cases() -> None:
    assert {f"models.{family}" for family, _ in CASES} | {"models.llama"} >= set(FAMILIES.values())
