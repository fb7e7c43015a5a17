"""What the KV cache of a model consists of. No jax: the page allocator reads it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Layers whose cache is paged together under one page table.

    A layer's pool is an array [P, planes, heads, Z, head_dim] (`planes` 2: keys and values; 1: an
    MLA latent). `window` 0 keeps the whole context; otherwise only the last `window` tokens are
    read and pages wholly before them are freed.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    planes: int = 2
    window: int = 0
    axes: tuple[str | None, ...] = ("pages", None, "kv_heads", None, "head_dim")

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return (self.planes, self.heads, page_size, self.head_dim)
