"""The persistent decode step in numpy: the same blocks, tiles, splits and roundings, in sequence.

Mosaic GPU's interpreter knows neither inline PTX nor blocks that wait for each other, so this is
the plain path that CPU tests run: it walks the address functions of `layout` that the kernel emits
(ownership of rows, order of tiles, fold of a weight row, split of pages) and rounds where the
kernel rounds. It differs in the order of float32 sums within a tile. Meant for small shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.decode_step.layout import GROUP_ROWS, Phase, Step, stream_order

f32 = np.float32
CORE_COLUMNS, FOLD = 64, 8  # a wgmma core matrix holds 64 values of one weight row, in 8 rows of 8


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(f32)


def folded_product(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One tile [8, columns] times activations [B, columns], as the tensor core is fed: [8, B].

    Both operands are cut into core matrices of 64 values, 8 rows of 8; the product of the folded
    matrices holds the dot products as traces of its 8 x 8 blocks.
    """
    fold = lambda m: m.reshape(len(m), -1, FOLD, CORE_COLUMNS // FOLD).transpose(0, 2, 1, 3)  # noqa: E731
    a = fold(weights).reshape(len(weights) * FOLD, -1)
    b = fold(x).reshape(len(x) * FOLD, -1)
    blocks = (a @ b.T).reshape(len(weights), FOLD, len(x), FOLD)
    return np.einsum("neme->nm", blocks)


class Emulation:
    """One decode step; `run` takes the arguments of DENSE_DECODE_STACK or DENSE_DECODE_GREEDY."""

    def __init__(self, step: Step):
        self.step = step

    def run(self, *args: Any) -> dict[str, Any]:
        """Returns x [B,D] and pools, and tokens [B] where there is a head; float32, rounded."""
        as_f32 = lambda a: np.asarray(a).astype(f32)  # noqa: E731
        s = self.step
        x, attn_norm, qkv, o, mlp_norm, gate_up, down, kv = args[:8]
        self.cos_sin, self.page_table, self.context_lens = map(np.asarray, args[8:11])
        residual = as_f32(x)
        pools = []
        for layer in range(s.layers):
            flat = lambda w: as_f32(w).reshape(-1, np.shape(w)[-1])  # noqa: E731
            pool = as_f32(kv[layer]).copy()
            normed, scale = self._norm(residual, as_f32(attn_norm[layer]))
            heads = self._project("qkv", flat(qkv[layer]), normed) * scale
            attended = self._attend(heads, pool)
            residual = residual + self._project("o", flat(o[layer]), attended)
            normed, scale = self._norm(residual, as_f32(mlp_norm[layer]))
            both = self._project("gate_up", flat(gate_up[layer]), normed) * scale
            gate, up = both[:, : s.ffw_dim], both[:, s.ffw_dim :]
            hidden = rounded(gate / (1 + np.exp(-gate)) * up)
            residual = residual + self._project("down", flat(down[layer]), hidden)
            pools.append(pool)
        out: dict[str, Any] = {"x": rounded(residual), "pools": pools}
        if s.vocab:
            normed, _ = self._norm(residual, as_f32(args[11]))
            out["tokens"] = self._choose(as_f32(args[12]), normed)
        return out

    def _norm(self, residual: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(bf16 x * weight, 1/rms [B,1]): the two halves of RMSNorm."""
        squares = (residual * residual).reshape(len(residual), self.step.schedule.blocks, -1)
        mean = squares.sum(-1).sum(-1, keepdims=True) / self.step.embed_dim
        return rounded(residual * weight), (1 / np.sqrt(mean + self.step.eps)).astype(f32)

    def _project(self, name: str, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        """x [B,K] @ weight[N,K].T, tile by tile in the order of every block's stream."""
        out = np.full((len(x), len(weight)), np.nan, f32)
        parts = self.step.phases()[name]
        for block in range(self.step.schedule.blocks):
            sums = self._block_sums(name, parts, weight, x, block)
            for group, partials in enumerate(sums):
                row = self.step.weight_row(name, block, group)
                assert np.isnan(out[:, row : row + GROUP_ROWS]).all(), "a row computed twice"
                out[:, row : row + GROUP_ROWS] = sum(partials[1:], partials[0]).T
        return out

    def _block_sums(
        self, name: str, parts: Sequence[Phase], weight: np.ndarray, x: np.ndarray, block: int
    ) -> list[list[np.ndarray]]:
        """[group][partial] sums [8, B]."""
        chunk, width = self.step.schedule.chunk, self.step.schedule.warpgroups
        partials = sum(p.split for p in parts)
        sums = [[np.zeros((GROUP_ROWS, len(x)), f32)] * partials for _ in range(parts[0].groups)]
        for part in parts:
            for _, group, number in stream_order(part, width):
                row = self.step.weight_row(name, block, group)
                columns = slice(number * chunk, (number + 1) * chunk)
                product = folded_product(weight[row : row + GROUP_ROWS, columns], x[:, columns])
                index = part.first_partial + (number - part.first_chunk) // part.item_chunks
                sums[group][index] = sums[group][index] + product
        return sums

    # Attention -----------------------------------------------------------------------------

    def _attend(self, qkv: np.ndarray, pool: np.ndarray) -> np.ndarray:
        """Rotates, writes the new token into the pool, attends; bf16 outputs [B,N]."""
        s = self.step
        out = np.zeros((s.batch, s.query_dim), f32)
        for pair in range(s.pairs):
            row, head = divmod(pair, s.kv_heads)
            context = int(self.context_lens[row])
            if context == 0:
                continue
            per_head = s.heads_per_kv * s.head_dim
            mine = qkv[row, head * per_head :][:per_head].reshape(s.heads_per_kv, s.head_dim)
            rotated = self._rotate(mine[: s.group + 1], self.cos_sin[row])
            page = self.page_table[row, (context - 1) // s.page_size]
            offset = (context - 1) % s.page_size
            pool[page, 0, head, offset] = rounded(rotated[s.group])
            pool[page, 1, head, offset] = rounded(mine[s.group + 1])
            states = [
                self._split_state(rotated[: s.group], pool[:, :, head], row, split)
                for split in range(min(s.splits, -(-context // s.page_size)))
            ]
            peak = np.max([p for p, _, _ in states], axis=0)
            weights = [np.exp(p - peak) for p, _, _ in states]
            total = sum(w * t for w, (_, t, _) in zip(weights, states, strict=True))
            mixed = sum(w[:, None] * o for w, (_, _, o) in zip(weights, states, strict=True))
            columns = slice(head * s.group_dim, (head + 1) * s.group_dim)
            out[row, columns] = rounded((mixed / total[:, None]).reshape(-1))
        return out

    def _rotate(self, heads: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
        cos, sin = np.split(cos_sin, 2)
        a, b = np.split(heads, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _split_state(
        self, queries: np.ndarray, pool: np.ndarray, row: int, split: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(maximum [G], denominator [G], output [G,H]) of every splits-th page from `split`."""
        s = self.step
        context = int(self.context_lens[row])
        columns = np.arange(split, -(-context // s.page_size), s.splits)
        pages = pool[self.page_table[row, columns]]
        keys, values = (pages[:, plane].reshape(-1, s.head_dim) for plane in (0, 1))
        position = (columns[:, None] * s.page_size + np.arange(s.page_size)).reshape(-1)
        seen = position < context
        scores = queries @ keys[seen].T * f32(s.scale)
        peak = scores.max(-1)
        weights = np.exp(scores - peak[:, None])
        return peak, weights.sum(-1), weights @ values[seen]

    # LM head -------------------------------------------------------------------------------

    def _choose(self, head: np.ndarray, normed: np.ndarray) -> np.ndarray:
        """Arg-max over blocks' ranges of row groups; ties go to the lowest id."""
        s = self.step
        best = np.full(s.batch, -np.inf, f32)
        tokens = np.zeros(s.batch, np.int32)
        for block in range(s.schedule.blocks):
            low, high = s.vocab_range(block)
            for group in range(low, high):
                rows = slice(group * GROUP_ROWS, (group + 1) * GROUP_ROWS)
                logits = folded_product(head[rows], normed)
                value, token = logits.max(0), logits.argmax(0) + group * GROUP_ROWS
                wins = value > best
                best, tokens = np.where(wins, value, best), np.where(wins, token, tokens)
        return tokens
