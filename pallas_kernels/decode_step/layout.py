"""Who computes what in the persistent decode step, and where everything lies.

Plain integers only: sizes, row ownership, the order of weight tiles, the words through which blocks
exchange activations, and the bytes of shared memory. The index functions accept Python ints and
`device.Scalar`s alike: the kernel emits them, tests evaluate them.

The weights [N,K] are read in place. A *tile* is 8 rows (one *group*) of `chunk` columns. In shared
memory its 8 rows lie one after the other, each contiguous. One wgmma core matrix (8 rows of 16
bytes, contiguous) is then 64 consecutive values of a single weight row, so the tensor core sees the
row folded in eighths: A[(n, e), k] = W[n, 64 c + 8 e + k]. The activation row, contiguous as well,
is folded the same way as B, and the dot product is the trace of each 8 x 8 block of A B. Eight
weight rows thus fill the 64 rows of an m64 instruction without any packing or split over blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from polyjax.core.op import Schedule, Workload

GROUP_ROWS = 8  # weight rows of one tile: 64 rows of an m64 wgmma, folded by 8
FOLD_COLUMNS = 128  # weight columns one k16 step takes: two core matrices of 64
BF16_BYTES, WORD_BYTES, BARRIER_BYTES = 2, 4, 8
COMBINE_DIMS = 128  # attention dims one warp combines: 32 lanes of 4


@dataclasses.dataclass(frozen=True)
class DecodeSchedule(Schedule):
    """Knobs of the persistent decode step.

    blocks: thread blocks, all resident at once. warpgroups: consumers of weight tiles in a block.
    chunk: columns of a tile. stages: tiles a block has room for. in_flight: tiles asked for and not
    yet there; more than memory needs to stay busy only lengthen the queue that everything else
    waits in. kv_stages: pages of keys and values there is room for. down_parts: pieces in which the
    down projection's input is brought in. evict_first: mark weights as first to leave the level-2
    cache. hint_copies: replicas of the words that blocks poll, so that a cache line has
    blocks / hint_copies readers. chains: independent accumulators a tile's products are dealt to,
    which shortens the chain of dependent tensor-core instructions.
    """

    blocks: int = 128
    warpgroups: int = 2
    chunk: int = 1024
    stages: int = 8
    in_flight: int = 3
    kv_stages: int = 1
    down_parts: int = 1
    evict_first: bool = True
    hint_copies: int = 64
    chains: int = 1


@dataclasses.dataclass(frozen=True)
class Phase:
    """The products of one projection (or one part of its columns) in one block.

    groups: row groups of the block. chunks: tiles along K. row_bytes: pitch of the weight.
    first_chunk: where the part's columns begin. split: warpgroups that share a group's chunks.
    first_partial: index of its first partial sum. first_tile: its first tile within the layer.
    """

    name: str
    groups: int
    chunks: int
    row_bytes: int
    first_chunk: int
    split: int
    first_partial: int
    first_tile: int

    @property
    def tiles(self) -> int:
        return self.groups * self.chunks

    @property
    def items(self) -> int:
        """(group, split) pairs, dealt to the warpgroups in turn."""
        return self.groups * self.split

    @property
    def item_chunks(self) -> int:
        return self.chunks // self.split

    def columns(self, chunk: int) -> int:
        return self.chunks * chunk


@dataclasses.dataclass(frozen=True)
class Step:
    """Sizes of one workload (see DENSE_DECODE_STACK; `group` counts query heads a kv head)."""

    batch: int
    embed_dim: int
    layers: int
    kv_heads: int
    group: int
    head_dim: int
    ffw_dim: int
    vocab: int  # 0: no LM head
    pages: int
    page_size: int
    eps: float
    scale: float
    schedule: DecodeSchedule

    @classmethod
    def of(cls, w: Workload, schedule: DecodeSchedule) -> Step:
        return cls(
            batch=w["B"], embed_dim=w["D"], layers=w["L"], kv_heads=w["K"], group=w["G"] - 2,
            head_dim=w["H"], ffw_dim=w["F"], vocab=w.get("V"), pages=w["C"], page_size=w["Z"],
            eps=w.option("eps"), scale=w.option("scale"), schedule=schedule,
        )  # fmt: skip

    # Ownership: block c computes these rows of each projection -----------------------------

    @property
    def query_dim(self) -> int:
        return self.kv_heads * self.group * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        """Query heads, key and value of one kv head."""
        return self.group + 2

    @property
    def qkv_rows(self) -> int:
        return self.kv_heads * self.heads_per_kv * self.head_dim // self.schedule.blocks

    @property
    def embed_rows(self) -> int:
        return self.embed_dim // self.schedule.blocks

    @property
    def ffw_rows(self) -> int:
        return self.ffw_dim // self.schedule.blocks

    @property
    def vocab_groups(self) -> int:
        return self.vocab // GROUP_ROWS

    def vocab_range(self, block: Any) -> tuple[Any, Any]:
        """First and end row group of the LM head in a block."""
        first = block * self.vocab_groups // self.schedule.blocks
        return first, (block + 1) * self.vocab_groups // self.schedule.blocks

    def weight_row(self, phase: str, block: Any, group: Any) -> Any:
        """First weight row of a row group. Gate and up groups alternate."""
        if phase == "qkv":
            return block * self.qkv_rows + group * GROUP_ROWS
        if phase == "gate_up":
            return (group % 2) * self.ffw_dim + block * self.ffw_rows + group // 2 * GROUP_ROWS
        return block * self.embed_rows + group * GROUP_ROWS

    # Tiles ---------------------------------------------------------------------------------

    def phases(self) -> dict[str, tuple[Phase, ...]]:
        """The phases of a layer, in order, each in one or more parts of its columns."""
        parts = self.schedule.down_parts
        wanted = (
            ("qkv", self.qkv_rows, self.embed_dim, 1),
            ("o", self.embed_rows, self.query_dim, 1),
            ("gate_up", 2 * self.ffw_rows, self.embed_dim, 1),
            ("down", self.embed_rows, self.ffw_dim, parts),
        )
        out, first = {}, 0
        for name, rows, columns, pieces in wanted:
            groups, chunks = rows // GROUP_ROWS, columns // self.schedule.chunk // pieces
            split = _best_split(groups, chunks, self.schedule.warpgroups)
            phases = []
            for piece in range(pieces):
                phases.append(
                    Phase(name, groups, chunks, columns * BF16_BYTES, piece * chunks, split,
                          piece * split, first)
                )  # fmt: skip
                first += groups * chunks
            out[name] = tuple(phases)
        return out

    @property
    def layer_tiles(self) -> int:
        return sum(part.tiles for parts in self.phases().values() for part in parts)

    def ring_slot(self, tile: Any) -> tuple[Any, Any]:
        """(slot, parity of its use) of a block's tile-th tile."""
        stages = self.schedule.stages
        return tile % stages, tile // stages % 2

    @property
    def head_chunks(self) -> int:
        return self.embed_dim // self.schedule.chunk

    @property
    def tile_bytes(self) -> int:
        return GROUP_ROWS * self.schedule.chunk * BF16_BYTES

    # Attention -----------------------------------------------------------------------------

    @property
    def pairs(self) -> int:
        """(row, kv head) pairs; block c works on pair c // splits."""
        return self.batch * self.kv_heads

    @property
    def splits(self) -> int:
        """Blocks that share the pages of one pair: a power of two."""
        return 1 << max(0, (self.schedule.blocks // self.pairs).bit_length() - 1)

    @property
    def warps(self) -> int:
        """Consumer warps of a block."""
        return 4 * self.schedule.warpgroups

    @property
    def token_lanes(self) -> int:
        """Lanes that hold one token's row: 16 bytes each."""
        return self.head_dim * BF16_BYTES // 16

    @property
    def group_dim(self) -> int:
        return self.group * self.head_dim

    @property
    def page_plane_bytes(self) -> int:
        """Keys (or values) of one kv head in one page."""
        return self.page_size * self.head_dim * BF16_BYTES


def _best_split(groups: int, chunks: int, warpgroups: int) -> int:
    """The K split among warpgroups with the shortest chain of tiles; the least of the best."""
    splits = [s for s in range(1, warpgroups + 1) if chunks % s == 0]
    return min(splits, key=lambda s: (-(-groups * s // warpgroups) * chunks // s, s))


def tile_number(phase: Phase, first_item: Any, items: Any, chunk: Any, warpgroup: Any) -> Any:
    """Number in the layer of a warpgroup's tile in the round of `items` from first_item on."""
    return phase.first_tile + first_item * phase.item_chunks + chunk * items + warpgroup


def stream_order(phase: Phase, warpgroups: int) -> Iterator[tuple[int, int, int]]:
    """(warpgroup, row group, chunk of the whole row) of every tile in the order of the stream."""
    for first in range(0, phase.items, warpgroups):
        for q in range(phase.item_chunks):
            for item in range(first, min(first + warpgroups, phase.items)):
                group, part = item // phase.split, item % phase.split
                yield item - first, group, phase.first_chunk + part * phase.item_chunks + q


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Where blocks leave activations for each other, in words of one buffer that starts as NOTHING.

    Every word is written once a step, so a reader needs no flag: the data themselves tell whether
    they have come. Waiting on 4 to 16 KiB of data in every block would fill the level-2 cache with
    polls, though, so a block first waits for one compact *hint* a sender, sent right after the
    data. Hints are not ordered after the data and prove nothing.
    """

    step: Step

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """name -> (copies, words of one copy)."""
        s = self.step
        norms, copies = 2 * s.layers + 1, s.schedule.hint_copies
        return {
            "normed": (norms, s.batch * s.embed_dim // 2),  # bf16 x * norm weight [B,D]
            "squares": (
                norms,
                copies * s.batch * s.schedule.blocks,
            ),  # f32 sums of x^2 [copies,B,blocks]
            "qkv": (s.layers, s.batch * s.kv_heads * s.heads_per_kv * s.head_dim),  # f32
            "partial": (s.layers, s.pairs * s.splits * self.partial_words),  # f32
            "heads": (s.layers, s.batch * s.query_dim // 2),  # bf16 attention output [B,N]
            "ffw": (s.layers, s.batch * s.ffw_dim // 2),  # bf16 [B,F]
            "heads_hint": (s.layers, copies * s.schedule.blocks),
            "ffw_hint": (s.layers, copies * s.schedule.blocks),
            "best": (1, 2 * s.batch * s.schedule.blocks if s.vocab else 0),  # f32 [B,blocks], ids
        }

    @property
    def partial_words(self) -> int:
        """One block's attention result: output [G*H], then (maximum, denominator) a head."""
        return -(-(self.step.group_dim + 2 * self.step.group) // 4) * 4

    def squares(self, norm: Any, replica: Any, row: Any) -> Any:
        """First word of the blocks' sums of squares of a row, which hint that it is complete."""
        blocks = self.step.schedule.blocks
        return self.at("squares", norm) + (replica * self.step.batch + row) * blocks

    def hints(self, name: str, copy: Any, replica: Any) -> tuple[Any, int]:
        """(first word, number) of the words of one replica that hint at `name` being complete."""
        s = self.step
        if name == "normed":
            return self.squares(copy, replica, s.batch - 1), s.schedule.blocks
        senders = s.pairs * s.splits if name == "heads" else s.schedule.blocks
        return self.at(f"{name}_hint", copy) + replica * s.schedule.blocks, senders

    @property
    def words(self) -> int:
        return sum(copies * size for copies, size in self._sizes().values())

    def at(self, name: str, copy: Any = 0) -> Any:
        """First word of a copy (a layer, or norm 2*layer, 2*layer + 1)."""
        offset = 0
        for key, (copies, size) in self._sizes().items():
            if key == name:
                return copy * size + offset
            offset += copies * size
        raise KeyError(name)


class SharedMemory:
    """Byte offsets of what lies in a block's shared memory."""

    def __init__(self, step: Step):
        self._next = 0
        s, schedule = step, step.schedule
        phases = s.phases()
        columns = [part.columns(schedule.chunk) for parts in phases.values() for part in parts]
        merge = s.warps * (s.group_dim + 2 * s.group) * WORD_BYTES
        # The attention merge reuses the activations' space: no product runs meanwhile.
        self.activations = self._take(max(s.batch * max(columns) * BF16_BYTES, merge), 1024)
        self.ring = self._take(schedule.stages * s.tile_bytes, 1024)
        self.kv = self._take(schedule.kv_stages * 2 * s.page_plane_bytes, 128)
        sums = [
            parts[0].groups * GROUP_ROWS * sum(p.split for p in parts) for parts in phases.values()
        ]
        self.sums = self._take(max(sums) * s.batch * WORD_BYTES, 16)
        self.heads = self._take(s.heads_per_kv * s.head_dim * WORD_BYTES, 16)
        self.residual = self._take(s.batch * s.embed_rows * WORD_BYTES, 16)
        self.norms = self._take((2 * s.layers + 1) * s.embed_rows * BF16_BYTES, 16)
        self.cos_sin = self._take(s.head_dim * WORD_BYTES, 16)
        self.scales = self._take(s.batch * WORD_BYTES, 16)
        self.candidates = self._take(s.batch * s.warps * 2 * 2 * WORD_BYTES, 16)
        self.pointers = self._take(7 * (s.layers + 1) * 8, 16)
        self.full = self._take(schedule.stages * BARRIER_BYTES, 8)
        self.empty = self._take(schedule.stages * BARRIER_BYTES, 8)
        self.kv_full = self._take(schedule.kv_stages * BARRIER_BYTES, 8)
        self.kv_empty = self._take(schedule.kv_stages * BARRIER_BYTES, 8)
        self.total_bytes = self._next

    def _take(self, size_bytes: int, align: int) -> int:
        start = -(-self._next // align) * align
        self._next = start + size_bytes
        return start
