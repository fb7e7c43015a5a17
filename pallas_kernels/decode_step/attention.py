"""Decode attention inside the persistent step: RoPE, KV write, split attention, combine.

Block c works for (row, kv head) pair c // splits and takes every `splits`-th page of its context.
A warp reads 512 contiguous bytes at a time: `token_lanes` lanes hold one token, 8 dims each. Every
such lane group keeps a softmax state of its own (maximum, denominator, output of all query heads of
the kv head), so nothing synchronises until the end. Then states merge: lane groups by shuffles,
warps through shared memory, blocks through the exchange buffer. All sums have a fixed order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pallas_kernels.decode_step import device as d
from pallas_kernels.decode_step.device import Scalar
from pallas_kernels.decode_step.layout import BF16_BYTES, COMBINE_DIMS, WORD_BYTES

if TYPE_CHECKING:
    from pallas_kernels.decode_step.body import Body

LOWEST = -1.0e30  # score of a masked token; finite, so that differences stay defined
LOG2_E = 1.4426950408889634
VECTOR = 8  # dims a lane holds: 16 bytes of bf16


class Attention:
    """Emits the attention phases of `Body`."""

    def __init__(self, body: Body):
        self.body, self.step = body, body.step
        s = self.step
        self.pair = body.block // s.splits
        self.split = body.block % s.splits
        self.row, self.kv_head = self.pair // s.kv_heads, self.pair % s.kv_heads
        self.busy = self.pair < s.pairs
        self.token_lanes = s.token_lanes
        self.tokens_per_warp = 32 // self.token_lanes
        self.rounds = -(-s.page_size // (s.warps * self.tokens_per_warp))

    def start(self) -> None:
        """Values all roles need."""
        s, body = self.step, self.body
        row = d.minimum(self.row, d.i32(s.batch - 1))
        self.context = d.load_global(body.args.context_lens + d.i64(row * 4))
        self.context = d.select(self.busy, self.context, 0)
        self.live_pages = (self.context + (s.page_size - 1)) // s.page_size
        beyond = self.live_pages - self.split + (s.splits - 1)
        self.my_pages = d.select(self.split < self.live_pages, beyond // s.splits, 0)
        self.table = body.args.page_table + d.i64(row * (s.pages * 4))

    def load_rotation(self) -> None:
        """Brings in the row's cosines and sines."""
        s, body = self.step, self.body
        row = d.minimum(self.row, d.i32(s.batch - 1))

        @body.each(body.consumers, s.head_dim)
        def _(i: Scalar) -> None:
            where = body.args.cos_sin + d.i64((row * s.head_dim + i) * WORD_BYTES)
            target = body.smem(body.memory.cos_sin) + i * WORD_BYTES
            d.store_shared(target, d.load_global(where, "f32"))

    # Pages ---------------------------------------------------------------------------------

    def _plane(self, page: Scalar, plane: int) -> Scalar:
        """Byte offset in a pool of this kv head's keys (0) or values (1) of a page."""
        s = self.step
        return d.i64((page * 2 + plane) * s.kv_heads + self.kv_head) * s.page_plane_bytes

    def _slot(self, count: Scalar) -> tuple[Scalar, Scalar]:
        stages = self.step.schedule.kv_stages
        return count % stages, count // stages % 2

    def _page(self, number: Scalar) -> Scalar:
        """Page id of this block's number-th page."""
        column = self.split + number * self.step.splits
        return d.load_global(self.table + d.i64(column * 4))

    def stream_pages(self) -> None:
        """The producer warp: brings in this block's pages of every layer, ahead of their use."""
        s, m, body = self.step, self.body.memory, self.body

        @d.loop(0, s.layers)
        def _(layer: Scalar) -> None:
            pool = d.load_shared(body.pointer_slot("kv", layer), "i64")

            @d.loop(0, self.my_pages)
            def _(number: Scalar) -> None:
                slot, parity = self._slot(layer * self.my_pages + number)
                page = self._page(number)
                full = body.smem(m.kv_full) + slot * 8
                d.barrier_wait(body.smem(m.kv_empty) + slot * 8, parity ^ 1)
                with d.when(body.lane.equals(0)):
                    size = s.page_plane_bytes
                    d.barrier_expect(full, 2 * size)
                    target = body.smem(m.kv) + slot * (2 * size)
                    for plane in (0, 1):
                        source = pool + self._plane(page, plane)
                        d.copy_in(target + plane * size, source, size, full, None)
                d.sync_warp()

    # One layer -----------------------------------------------------------------------------

    def attend(self, layer: Scalar) -> None:
        s = self.step
        with d.when(self.my_pages > 0):
            self._gather_heads(layer)
            self._rotate()
            state = self._pages_of_layer(layer)
            self._merge_lanes(state)
            self.body.sync()
            self._send_merged(layer)
        if s.splits > 1:
            self._combine(layer)
        else:
            with d.when(self.busy & self.my_pages.equals(0)):
                self._send_zeros(layer)

    def _gather_heads(self, layer: Scalar) -> None:
        """Copies the pair's query heads, key and value (float32), once sent, to shared memory."""
        body, s = self.body, self.step
        words = s.heads_per_kv * s.head_dim
        start = body.exchange.at("qkv", layer) + self.pair * words

        @body.each(body.consumers, words // 4)
        def _(i: Scalar) -> None:
            received = d.poll(lambda: d.receive_4(body.word(start + i * 4)), 4)
            d.store_shared_4(body.smem(body.memory.heads) + i * 16, received)

        d.sync_warp()
        body.sync()

    def _rotate(self) -> None:
        """RoPE on query heads and key, in place; queries also take the softmax scale."""
        body, s = self.body, self.step
        half = s.head_dim // 2

        @body.each(body.consumers, (s.group + 1) * half)
        def _(i: Scalar) -> None:
            head, pair = i // half, i % half
            low = body.smem(body.memory.heads) + (head * s.head_dim + pair) * WORD_BYTES
            high = low + half * WORD_BYTES
            table = body.smem(body.memory.cos_sin) + pair * WORD_BYTES
            cos = d.load_shared(table, "f32")
            sin = d.load_shared(table + half * WORD_BYTES, "f32")
            a, b = d.load_shared(low, "f32"), d.load_shared(high, "f32")
            scale = d.select(head < s.group, s.scale * LOG2_E, d.f32(1.0))
            d.store_shared(low, (a * cos - b * sin) * scale)
            d.store_shared(high, (b * cos + a * sin) * scale)

        body.sync()

    def _pages_of_layer(self, layer: Scalar) -> list[Scalar]:
        """This lane group's softmax state: maxima [G], denominators [G], outputs [G, 8]."""
        body, s, m = self.body, self.step, self.body.memory
        chunk = body.lane % self.token_lanes
        queries = []
        for g in range(s.group):
            base = body.smem(m.heads) + (chunk * VECTOR + g * s.head_dim) * WORD_BYTES
            queries.append(d.load_shared_4(base, "f32") + d.load_shared_4(base + 16, "f32"))
        zeros = [d.f32(0.0)] * (s.group * (1 + VECTOR))
        start = [d.f32(LOWEST)] * s.group + zeros
        newest_here = ((self.live_pages - 1) % s.splits).equals(self.split)

        @d.loop(0, self.my_pages, *start)
        def state(number: Scalar, *state: Scalar) -> list[Scalar]:
            slot, parity = self._slot(layer * self.my_pages + number)
            d.barrier_wait(body.smem(m.kv_full) + slot * 8, parity)
            tile = body.smem(m.kv) + slot * (2 * s.page_plane_bytes)
            fresh = newest_here & number.equals(self.my_pages - 1)
            with d.when(fresh):
                self._write_token(layer, tile, number)
                body.sync()
            first = (self.split + number * s.splits) * s.page_size
            out = self._page_update(tile, first, queries, list(state), chunk)
            d.sync_warp()
            with d.when(body.lane.equals(0)):
                d.barrier_arrive(body.smem(m.kv_empty) + slot * 8)
            return out

        return list(state)

    def _write_token(self, layer: Scalar, tile: Scalar, number: Scalar) -> None:
        """Writes the new key and value, rounded to bf16, to the pool and to the page's copy."""
        body, s = self.body, self.step
        half = s.head_dim // 2
        pool = d.load_shared(body.pointer_slot("kv", layer), "i64")
        page = self._page(number)
        offset = (self.context - 1) % s.page_size * (s.head_dim * BF16_BYTES)

        @body.each(body.consumers, 2 * half)
        def _(i: Scalar) -> None:
            plane, pair = i // half, i % half
            source = body.smem(body.memory.heads) + i * (2 * WORD_BYTES)
            source = source + s.group_dim * WORD_BYTES
            word = d.pack_bf16(
                d.load_shared(source, "f32"), d.load_shared(source + WORD_BYTES, "f32")
            )
            where = offset + pair * WORD_BYTES
            d.store_shared(tile + plane * s.page_plane_bytes + where, word)
            target = pool + d.select(plane.equals(0), self._plane(page, 0), self._plane(page, 1))
            d.store_global(target + d.i64(where), word)

        d.fence_async_proxy()  # the copy engine overwrites the tile later

    def _page_update(
        self, tile: Scalar, first: Scalar, queries: list[list[Scalar]], state: list[Scalar],
        chunk: Scalar,
    ) -> list[Scalar]:  # fmt: skip
        """The state after this page, whose token 0 sits at position `first`."""
        body, s = self.body, self.step
        group = s.group
        peak, total, out = state[:group], state[group : 2 * group], state[2 * group :]
        lane_token = body.lane // self.token_lanes
        scores, values = [], []
        for r in range(self.rounds):
            token = (body.warp + r * s.warps) * self.tokens_per_warp + lane_token
            valid = (token < s.page_size) & (first + token < self.context)
            # Unowned slots may hold NaN: masked lanes read token 0, which a live page always has.
            token = d.select(valid, token, 0)
            where = tile + token * (s.head_dim * BF16_BYTES) + chunk * 16
            keys = [x for w in d.load_shared_4(where) for x in d.unpack_bf16(w)]
            dots = [_dot(keys, q) for q in queries]
            for distance in _powers(self.token_lanes):
                dots = [x + d.shuffle_xor(x, distance) for x in dots]
            scores.append([d.select(valid, x, LOWEST) for x in dots])
            values.append((valid, where + s.page_plane_bytes))
        new_peak = [
            functools.reduce(d.maximum, (sc[g] for sc in scores), peak[g]) for g in range(group)
        ]
        fade = [d.exp2(a - b) for a, b in zip(peak, new_peak, strict=True)]
        total = [t * f for t, f in zip(total, fade, strict=True)]
        out = [x * fade[i // VECTOR] for i, x in enumerate(out)]
        for score, (valid, where) in zip(scores, values, strict=True):
            row = [x for w in d.load_shared_4(where) for x in d.unpack_bf16(w)]
            for g in range(group):
                weight = d.select(valid, d.exp2(score[g] - new_peak[g]), 0.0)
                total[g] = total[g] + weight
                for k in range(VECTOR):
                    i = g * VECTOR + k
                    out[i] = d.fma(weight, row[k], out[i])
        return [*new_peak, *total, *out]

    # Merging -------------------------------------------------------------------------------

    def _merge_area(self) -> tuple[Scalar, Scalar]:
        """Addresses of the warps' outputs [warps, G*H] and (maximum, denominator) [warps, G]."""
        s = self.step
        outputs = self.body.smem(self.body.memory.activations)
        return outputs, outputs + s.warps * s.group_dim * WORD_BYTES

    def _merge_lanes(self, state: list[Scalar]) -> None:
        """Merges the lane groups of a warp and leaves the warp's state in shared memory."""
        body, s = self.body, self.step
        group = s.group
        peak, total, out = state[:group], state[group : 2 * group], state[2 * group :]
        distances = tuple(x for x in (16, 8, 4, 2, 1) if x >= self.token_lanes)
        top = list(peak)
        for distance in distances:
            top = [d.maximum(x, d.shuffle_xor(x, distance)) for x in top]
        fade = [d.exp2(a - b) for a, b in zip(peak, top, strict=True)]
        total = [t * f for t, f in zip(total, fade, strict=True)]
        for distance in distances:
            total = [x + d.shuffle_xor(x, distance) for x in total]
        held = d.fold(body.lane, [x * fade[i // VECTOR] for i, x in enumerate(out)], distances)
        outputs, softmax = self._merge_area()
        first = body.lane // self.token_lanes * len(held)
        chunk = body.lane % self.token_lanes
        for k, value in enumerate(held):
            i = first + k
            dim = i // VECTOR * s.head_dim + chunk * VECTOR + i % VECTOR
            d.store_shared(outputs + (body.warp * s.group_dim + dim) * WORD_BYTES, value)
        with d.when(body.lane.equals(0)):
            for g in range(group):
                where = softmax + (body.warp * group + g) * (2 * WORD_BYTES)
                d.store_shared(where, top[g])
                d.store_shared(where + WORD_BYTES, total[g])

    def _send_merged(self, layer: Scalar) -> None:
        """Merges the warps; sends the block's state, or the attention output if it is alone."""
        body, s = self.body, self.step
        outputs, softmax = self._merge_area()

        @body.each(body.consumers, s.group_dim // 2)
        def _(i: Scalar) -> None:
            head = i // (s.head_dim // 2)
            peaks, totals = [], []
            for warp in range(s.warps):
                where = softmax + (head + warp * s.group) * (2 * WORD_BYTES)
                peaks.append(d.load_shared(where, "f32"))
                totals.append(d.load_shared(where + WORD_BYTES, "f32"))
            top = functools.reduce(d.maximum, peaks)
            low = high = total = d.f32(0.0)
            for warp in range(s.warps):
                weight = d.exp2(peaks[warp] - top)
                total = d.fma(weight, totals[warp], total)
                where = outputs + (i * 2 + warp * s.group_dim) * WORD_BYTES
                low = d.fma(weight, d.load_shared(where, "f32"), low)
                high = d.fma(weight, d.load_shared(where + WORD_BYTES, "f32"), high)
            if s.splits == 1:
                scale = d.reciprocal(total)
                self._send_output(layer, i, d.pack_bf16(low * scale, high * scale))
                self._send_hint(layer, i)
                return
            start = self._partial_word(layer, self.split)
            d.send(body.word(start + i * 2), low)
            d.send(body.word(start + i * 2 + 1), high)
            with d.when((i % (s.head_dim // 2)).equals(0)):
                d.send(body.word(start + s.group_dim + head * 2), top)
                d.send(body.word(start + s.group_dim + head * 2 + 1), total)

    def _partial_word(self, layer: Scalar, split: Scalar) -> Scalar:
        """First word of what block `split` of this pair sends."""
        exchange = self.body.exchange
        block = self.pair * self.step.splits + split
        return exchange.at("partial", layer) + block * exchange.partial_words

    def _send_output(self, layer: Scalar, pair_of_dims: Scalar, word: Scalar) -> None:
        """Sends two bf16 of the pair's attention output."""
        s, body = self.step, self.body
        start = body.exchange.at("heads", layer)
        row_words = s.query_dim // 2
        where = start + self.row * row_words + self.kv_head * (s.group_dim // 2)
        d.send(body.word(where + pair_of_dims), word)

    def _send_zeros(self, layer: Scalar) -> None:
        @self.body.each(self.body.consumers, self.step.group_dim // 2)
        def _(i: Scalar) -> None:
            self._send_output(layer, i, d.i32(0))
            self._send_hint(layer, i)

    def _send_hint(self, layer: Scalar, pair_of_dims: Scalar) -> None:
        """The block's last 32 pairs of dims also send its hint."""
        first = self.step.group_dim // 2 - 32
        with d.when(pair_of_dims >= first):
            self.body.send_hints("heads", layer, pair_of_dims - first, 32)

    def _combine(self, layer: Scalar) -> None:
        """Combines the splits of this block's share of the pair's output dims, a warp each 128."""
        body, s = self.body, self.step
        share = s.group_dim // s.splits
        warp_dims = min(share, COMBINE_DIMS)
        quads = warp_dims // 4
        lanes = 32 // quads  # lane groups, each taking every lanes-th split
        quad, lane_group = body.lane % quads, body.lane // quads
        dim = self.split * share + body.warp * warp_dims + quad * 4
        live = d.minimum(self.live_pages, d.i32(s.splits))
        with d.when(self.busy & (body.warp < share // warp_dims)):
            words = d.choose(
                live > 0,
                lambda: self._combined(layer, dim, live, lane_group, lanes, quads),
                [d.i32(0), d.i32(0)],
            )
            with d.when(lane_group.equals(0)):
                for k, word in enumerate(words):
                    self._send_output(layer, dim // 2 + k, word)
            with d.when(body.warp.equals(share // warp_dims - 1)):
                body.send_hints("heads", layer, body.lane, 32)

    def _combined(
        self, layer: Scalar, dim: Scalar, live: Scalar, lane_group: Scalar, lanes: int, quads: int
    ) -> list[Scalar]:
        """Four dims of the attention output as two words of bf16."""
        body, s = self.body, self.step
        head = dim // s.head_dim
        rounds = -(-s.splits // lanes)
        splits = [lane_group + r * lanes for r in range(rounds)]
        valid = [x < live for x in splits]
        starts = [
            self._partial_word(layer, d.select(v, x, 0)) for x, v in zip(splits, valid, strict=True)
        ]

        def receive() -> list[Scalar]:
            out = []
            for start in starts:
                out += d.receive_4(body.word(start + dim))
                out += d.receive_2(body.word(start + s.group_dim + head * 2))
            return out

        words = [d.as_f32(w) for w in d.poll(receive, 6 * rounds)]
        parts = [words[6 * r : 6 * r + 6] for r in range(rounds)]
        peaks = [d.select(v, p[4], LOWEST) for p, v in zip(parts, valid, strict=True)]
        top = functools.reduce(d.maximum, peaks)
        distances = [x for x in (16, 8, 4, 2, 1) if x >= quads]
        for distance in distances:
            top = d.maximum(top, d.shuffle_xor(top, distance))
        sums = [d.f32(0.0)] * 5
        for part, peak, v in zip(parts, peaks, valid, strict=True):
            weight = d.select(v, d.exp2(peak - top), 0.0)
            sums = [d.fma(weight, x, y) for x, y in zip((*part[:4], part[5]), sums, strict=True)]
        for distance in distances:
            sums = [x + d.shuffle_xor(x, distance) for x in sums]
        scale = d.reciprocal(sums[4])
        out = [x * scale for x in sums[:4]]
        return [d.pack_bf16(out[0], out[1]), d.pack_bf16(out[2], out[3])]


def _dot(a: list[Scalar], b: list[Scalar]) -> Scalar:
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = d.fma(x, y, total)
    return total


def _powers(count: int) -> list[int]:
    return [1 << i for i in range(count.bit_length() - 1)]
