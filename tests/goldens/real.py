"""Expectations of real models, for a few prompts. Imported by scripts/make_goldens: needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

GREEDY_TOKENS = 64
TOP = 64  # logits kept of the last prompt position

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
CODE = "def fibonacci(n):\n"
# A text longer than Gemma 3 270M's window of 512 tokens whose end depends on its beginning.
LONG = (
    "The password is tangerine. "
    + "".join(f"Line {i}: the quick brown fox counts {i * 7} sheep. " for i in range(48))
    + "The password is"
)
PROMPTS: dict[str, list[Any]] = {
    "smollm2": [PARIS, "Water boils at a temperature of", CODE, LONG],
    "gemma3": ["Water boils at a temperature of", CODE, LONG],
}


def expect(name: str, path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of real/<name>.npz from a converted model directory."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [_encode(tokenizer, prompt) for prompt in PROMPTS[name]]
    rows = [_greedy(model, prompt) for prompt in prompts]
    tokens = np.zeros((len(rows), max(len(row[0]) for row in rows)), np.int32)
    for i, (sequence, _, _) in enumerate(rows):
        tokens[i, : len(sequence)] = sequence
    last = np.stack([logits for _, _, logits in rows])
    top = np.argsort(-last, axis=-1)[:, :TOP]
    return {
        "tokens": tokens,
        "prompt_lens": np.array([len(prompt) for prompt in prompts], np.int32),
        "lens": np.array([len(row[0]) for row in rows], np.int32),
        "margins": np.array([row[1] for row in rows], np.float32),
        "top_ids": top.astype(np.int32),
        "top_logits": np.take_along_axis(last, top, axis=-1).astype(np.float32),
        "logit_means": last.mean(axis=-1, dtype=np.float64),
        "logit_stds": last.std(axis=-1, dtype=np.float64),
    }


def _encode(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float], np.ndarray]:
    """Returns (prompt and continuation, margins, logits at the prompt's last position)."""
    import torch

    sequence, margins, first, cache = list(prompt), [], None, None
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(GREEDY_TOKENS):
            out = model(inputs, cache=cache, use_cache=True)
            cache, last = out.cache, out.logits[0, -1].numpy()
            first = last if first is None else first
            second, best = np.partition(last, -2)[-2:]
            margins.append(float(best - second))
            sequence.append(int(last.argmax()))
            inputs = torch.tensor([[sequence[-1]]])
    assert first is not None
    return sequence, margins, first
