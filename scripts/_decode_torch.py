"""The same decode step in PyTorch: torch.compile, one CUDA graph. Prints one JSON line.

    python scripts/_decode_torch.py 1b 1 <samples> <steps> <first context>

Runs in a process of its own, so that two frameworks do not share a device context.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as functional

SIZES = {  # layers, embedding, kv heads, query heads, head dim, feed-forward, vocabulary
    "1b": (16, 2048, 8, 32, 64, 8192, 128256),
    "8b": (32, 4096, 8, 32, 128, 14336, 128256),
}
CAPACITY, EPS, THETA = 1024, 1e-5, 500_000.0


def build(name: str, batch: int) -> tuple[Any, Any]:
    """Returns (step, caches); step(tokens, positions, caches) -> next tokens."""
    layers, d, kv, heads, h, f, vocab = SIZES[name]
    torch.manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return (0.02 * torch.randn(*size, device="cuda")).to(torch.bfloat16)

    ones = torch.ones(d, device="cuda", dtype=torch.bfloat16)
    stack = [
        (normal((heads + 2 * kv) * h, d), normal(d, heads * h), normal(2 * f, d), normal(d, f))
        for _ in range(layers)
    ]
    head = normal(vocab, d)
    frequency = THETA ** (-torch.arange(h // 2, device="cuda") / (h // 2))

    def rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position[:, None, None] * frequency
        a, b = x.float().chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def step(tokens: torch.Tensor, position: torch.Tensor, caches: Any) -> torch.Tensor:
        rows = torch.arange(batch, device="cuda")
        x = head[tokens]
        seen = (torch.arange(CAPACITY, device="cuda") <= position[:, None])[:, None, None]
        for (w_qkv, w_o, w_gate_up, w_down), (keys, values) in zip(stack, caches, strict=True):
            y = functional.rms_norm(x, (d,), ones, EPS) @ w_qkv.T
            q, k, v = y.split([heads * h, kv * h, kv * h], -1)
            q = rotate(q.view(batch, heads, h), position)
            keys[rows, :, position] = rotate(k.view(batch, kv, h), position)
            values[rows, :, position] = v.view(batch, kv, h)
            attended = functional.scaled_dot_product_attention(
                q[:, :, None], keys, values, attn_mask=seen, enable_gqa=True
            )
            x = x + attended.reshape(batch, heads * h) @ w_o.T
            gate, up = (functional.rms_norm(x, (d,), ones, EPS) @ w_gate_up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ w_down.T
        return (functional.rms_norm(x, (d,), ones, EPS) @ head.T).argmax(-1)

    caches = [
        tuple(torch.randn(batch, kv, CAPACITY, h, device="cuda").to(torch.bfloat16) for _ in "kv")
        for _ in range(layers)
    ]
    return step, caches


def main() -> None:
    name, batch, samples, steps, context = sys.argv[1], *map(int, sys.argv[2:6])
    step, caches = build(name, batch)
    tokens = torch.full((batch,), 7, device="cuda")
    position = torch.full((batch,), context - 1, device="cuda")
    with torch.no_grad():
        compiled = torch.compile(step, mode="max-autotune-no-cudagraphs", fullgraph=True)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(4):
                compiled(tokens, position, caches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens.copy_(compiled(tokens, position, caches))
            position.add_(1)
    timed = []
    for _ in range(samples):
        position.fill_(context - 1)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        timed.append((time.perf_counter() - begin) / steps * 1e6)
    print(json.dumps({"torch": torch.__version__, "samples_us": timed}), flush=True)


if __name__ == "__main__":
    main()
