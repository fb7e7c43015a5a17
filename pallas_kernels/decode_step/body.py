"""The body of the persistent decode step: what every thread of every block does.

Roles of a block's warps: `warpgroups` x 4 consumer warps multiply and do everything that depends on
other blocks; then one warp streams weight tiles and one streams pages of keys and values. The
streams run ahead of the consumers, across phases and layers, so that memory stays busy while blocks
wait for each other.

A layer is six exchanges between blocks: x -> qkv -> attention -> combine -> o -> gate/up -> down,
back to x. There is no grid barrier: a reader polls the words themselves, which start as NOTHING.
RMSNorm is applied in two halves: the producer of x sends bf16(x * norm weight), the consumer scales
its float32 products by 1/rms. The residual stream stays in float32 in the block that owns its rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.decode_step import device as d
from pallas_kernels.decode_step.attention import Attention
from pallas_kernels.decode_step.device import Scalar
from pallas_kernels.decode_step.layout import (
    BF16_BYTES,
    FOLD_COLUMNS,
    GROUP_ROWS,
    WORD_BYTES,
    Exchange,
    Phase,
    SharedMemory,
    Step,
    tile_number,
)

CONSUMERS = 1  # hardware barrier of the consumer warps (0 is the whole block's)
WEIGHTS = ("qkv", "o", "gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Byte addresses in global memory."""

    x: Scalar
    norms: tuple[
        Scalar, ...
    ]  # attention and MLP norm of every layer alternately, then the final one
    weights: dict[str, tuple[Scalar, ...]]
    kv: tuple[Scalar, ...]
    cos_sin: Scalar
    page_table: Scalar
    context_lens: Scalar
    head: Scalar | None
    exchange: Scalar
    x_out: Scalar
    tokens: Scalar | None


class Body:
    """Emits the kernel. Attributes are the values every thread computes first."""

    def __init__(self, step: Step, arguments: Arguments, shared: Scalar):
        self.step, self.args = step, arguments
        self.exchange, self.memory = Exchange(step), SharedMemory(step)
        self.shared = shared
        self.thread = d.thread_index()
        self.warp = d.uniform(self.thread // 32)
        self.lane = self.thread % 32
        self.block = d.block_index()
        self.consumers = step.warps * 32
        self.policy = d.evict_first_policy() if step.schedule.evict_first else None
        self.attention = Attention(self)

    # Addresses -----------------------------------------------------------------------------

    def smem(self, offset: int) -> Scalar:
        return self.shared + offset

    def word(self, index: Any) -> Scalar:
        """Address of a word of the exchange buffer."""
        return self.args.exchange + d.i64(d.i32(index)) * WORD_BYTES

    def pointer_slot(self, kind: str, layer: Any) -> Scalar:
        row = (*WEIGHTS, "kv", "norm", "norm2").index(kind)
        return self.smem(self.memory.pointers) + (d.i32(layer) + row * (self.step.layers + 1)) * 8

    # The whole kernel ----------------------------------------------------------------------

    def emit(self) -> None:
        self._start()
        warps = self.step.warps
        with d.when(self.warp < warps):
            self._consume()
        with d.when(self.warp.equals(warps)):
            self._stream_weights()
        with d.when(self.warp.equals(warps + 1)):
            self.attention.stream_pages()

    def _start(self) -> None:
        m, s, schedule = self.memory, self.step, self.step.schedule
        with d.when(self.thread.equals(0)):
            for i in range(schedule.stages):
                d.barrier_init(self.smem(m.full + 8 * i), 1)
                d.barrier_init(self.smem(m.empty + 8 * i), 4)
            for i in range(schedule.kv_stages):
                d.barrier_init(self.smem(m.kv_full + 8 * i), 1)
                d.barrier_init(self.smem(m.kv_empty + 8 * i), s.warps)
            d.fence_async_proxy()
        with d.when(self.thread.equals(32)):
            for kind in WEIGHTS:
                self._store_pointers(kind, self.args.weights[kind])
            self._store_pointers("kv", self.args.kv)
        with d.when(self.thread.equals(64)):
            self._store_pointers("norm", self.args.norms[0::2])
            self._store_pointers("norm2", self.args.norms[1::2])
        d.sync_block()
        self.attention.start()

    def _store_pointers(self, kind: str, pointers: tuple[Scalar, ...]) -> None:
        for layer, pointer in enumerate(pointers):
            d.store_shared(self.pointer_slot(kind, layer), pointer)

    def _load_owned(self) -> None:
        """Brings in the block's rows of all norm weights and of x."""
        m, s = self.memory, self.step
        half = s.embed_rows // 2
        first = d.i64(self.block * s.embed_rows) * BF16_BYTES

        @self.each(self.consumers, (2 * s.layers + 1) * half)
        def _(i: Scalar) -> None:
            norm, pair = i // half, i % half
            slot = d.select((norm % 2).equals(0), self.pointer_slot("norm", norm // 2),
                            self.pointer_slot("norm2", norm // 2))  # fmt: skip
            base = d.load_shared(slot, "i64")
            word = d.load_global(base + first + d.i64(pair * WORD_BYTES))
            d.store_shared(self.smem(m.norms) + i * WORD_BYTES, word)

        @self.each(self.consumers, s.batch * half)
        def _(i: Scalar) -> None:
            row, pair = i // half, i % half
            where = d.i64(row * (s.embed_dim * BF16_BYTES) + pair * WORD_BYTES)
            low, high = d.unpack_bf16(d.load_global(self.args.x + first + where))
            target = self.smem(m.residual) + i * (2 * WORD_BYTES)
            d.store_shared(target, low)
            d.store_shared(target + WORD_BYTES, high)

    def each(self, threads: int, count: int) -> Callable[[Callable[[Scalar], None]], None]:
        """`@each(threads, n)`: the first `threads` threads share i = 0 .. n-1."""

        def run(body: Callable[[Scalar], None]) -> None:
            for first in range(0, count, threads):
                index = self.thread + first
                if first + threads <= count:
                    body(index)
                else:
                    with d.when(index < count):
                        body(index)

        return run

    def sync(self) -> None:
        """Waits for all consumer warps."""
        d.sync_warp()
        d.sync_threads(CONSUMERS, self.consumers)

    # Streams -------------------------------------------------------------------------------

    def _stream_weights(self) -> None:
        s = self.step

        @d.loop(0, s.layers)
        def _(layer: Scalar) -> None:
            for name, parts in s.phases().items():
                base = d.uniform(d.load_shared(self.pointer_slot(name, layer), "i64"))
                row = functools.partial(s.weight_row, name, self.block)
                for part in parts:
                    self._stream_phase(base, row, part, layer * s.layer_tiles)

        if s.vocab:
            self._stream_head()

    def _stream_phase(
        self, base: Scalar, row: Callable[[Scalar], Scalar], phase: Phase, layer_tile: Scalar
    ) -> None:
        """`layout.stream_order`, as loops."""
        width = self.step.schedule.warpgroups

        def round_of(first_item: Scalar, items: int) -> None:
            @d.loop(0, phase.item_chunks * items)
            def _(n: Scalar) -> None:
                q, warpgroup = n // items, n % items
                item = first_item + warpgroup
                group, part = item // phase.split, item % phase.split
                chunk = part * phase.item_chunks + q + phase.first_chunk
                tile = layer_tile + tile_number(phase, first_item, items, q, warpgroup)
                self._stream_tile(tile, base, row(group), phase.row_bytes, chunk)

        @d.loop(0, phase.items // width)
        def _(number: Scalar) -> None:
            round_of(number * width, width)

        if rest := phase.items % width:
            round_of(d.i32(phase.items - rest), rest)

    def _stream_head(self) -> None:
        head = self.args.head
        assert head is not None
        s, width = self.step, self.step.schedule.warpgroups
        low, high = s.vocab_range(self.block)

        @d.loop(0, (high - low + (width - 1)) // width)
        def _(number: Scalar) -> None:
            items = d.minimum(high - low - number * width, d.i32(width))

            @d.loop(0, items * s.head_chunks)
            def _(n: Scalar) -> None:
                group = low + number * width + n % items
                tile = number * (width * s.head_chunks) + n + s.layers * s.layer_tiles
                row_bytes = s.embed_dim * BF16_BYTES
                self._stream_tile(tile, head, group * GROUP_ROWS, row_bytes, n // items)

    def _stream_tile(
        self, tile: Scalar, base: Scalar, row: Scalar, row_bytes: int, chunk: Scalar
    ) -> None:
        m, s = self.memory, self.step
        slot, parity = s.ring_slot(tile)
        full = self.smem(m.full) + slot * 8
        if s.schedule.in_flight < s.schedule.stages:
            with d.when(tile >= s.schedule.in_flight):
                arrived, use = s.ring_slot(tile - s.schedule.in_flight)
                d.barrier_wait(self.smem(m.full) + arrived * 8, use)
        d.barrier_wait(self.smem(m.empty) + slot * 8, parity ^ 1)
        with d.when(d.elected()):
            d.barrier_expect(full, s.tile_bytes)
            size = s.schedule.chunk * BF16_BYTES
            source = base + d.i64(row) * row_bytes + d.i64(chunk * size)
            target = self.smem(m.ring) + slot * s.tile_bytes
            if row_bytes == size:
                d.copy_in(target, source, s.tile_bytes, full, self.policy)
                return
            for r in range(GROUP_ROWS):
                d.copy_in(target + r * size, source + r * row_bytes, size, full, self.policy)

    def _scale(self, row: Scalar) -> Scalar:
        return d.load_shared(self.smem(self.memory.scales) + row * WORD_BYTES, "f32")

    # Consumers -----------------------------------------------------------------------------

    def _consume(self) -> None:
        s = self.step
        phases = s.phases()
        self._load_owned()
        self.attention.load_rotation()
        self.sync()
        self._send_residual(d.i32(0), None)

        @d.loop(0, s.layers)
        def _(layer: Scalar) -> None:
            first = layer * s.layer_tiles
            self._gather("normed", layer * 2, s.embed_dim // 2)
            self._multiply(phases["qkv"][0], first)
            self.sync()
            self._send_qkv(layer, phases["qkv"][0])
            self.attention.attend(layer)
            self._gather("heads", layer, s.query_dim // 2)
            self._multiply(phases["o"][0], first)
            self.sync()
            self._send_residual(layer * 2 + 1, phases["o"])
            self._gather("normed", layer * 2 + 1, s.embed_dim // 2)
            self._multiply(phases["gate_up"][0], first)
            self.sync()
            self._send_ffw(layer, phases["gate_up"][0])
            for part in phases["down"]:
                columns = part.columns(s.schedule.chunk)
                offset = part.first_chunk * s.schedule.chunk // 2
                self._gather("ffw", layer, s.ffw_dim // 2, offset, columns // 2)
                self._multiply(part, first)
                self.sync()
            self._send_residual(layer * 2 + 2, phases["down"], layer.equals(s.layers - 1))

        if s.vocab:
            self._gather("normed", 2 * s.layers, s.embed_dim // 2)
            self._choose_token()

    def _gather(
        self, name: str, copy: Any, pitch: int, offset: int = 0, words: int | None = None
    ) -> None:
        """Copies `words` words of each row, once sent, to the activation rows; synchronises."""
        words = words or pitch
        if offset == 0:
            self._await_hints(name, copy)
        row_vectors = words // 4
        vectors, at_once = self.step.batch * row_vectors, 4
        start = self.exchange.at(name, copy) + offset
        per_thread = -(-vectors // self.consumers)
        for first in range(0, per_thread, at_once):
            numbers = range(first, min(first + at_once, per_thread))
            # The last round may be partial: its idle threads repeat the last vector.
            index = [self.thread + n * self.consumers for n in numbers]
            index = [
                i if (n + 1) * self.consumers <= vectors else d.minimum(i, d.i32(vectors - 1))
                for i, n in zip(index, numbers, strict=True)
            ]
            sources = [self.word(start + self._vector_word(i, row_vectors, pitch)) for i in index]
            values = self._receive(sources)
            for n, i in enumerate(index):
                target = self.smem(self.memory.activations) + i * 16
                d.store_shared_4(target, values[4 * n : 4 * n + 4])
        d.sync_warp()
        d.fence_async_proxy()
        self.sync()

    def _receive(self, sources: list[Scalar]) -> list[Scalar]:
        """Four words from each address, once sent."""
        return d.poll(lambda: [w for a in sources for w in d.receive_4(a)], 4 * len(sources))

    def _await_hints(self, name: str, copy: Any) -> None:
        """One warp polls, the others sleep at the barrier. After x also finds every row's 1/rms."""
        replica = self.block % self.step.schedule.hint_copies
        first, count = self.exchange.hints(name, copy, replica)

        def receive(word: Scalar, count: int) -> list[Scalar]:
            vector = d.minimum(self.lane, d.i32(count // 4 - 1))
            return self._receive([self.word(word + vector * 4)])

        mine = d.choose(self.warp.equals(0), lambda: receive(d.i32(first), count), [d.i32(0)] * 4)
        self.sync()
        if name != "normed":
            return
        s = self.step
        with d.when(self.warp.equals(0)):
            self._store_scale(d.i32(s.batch - 1), mine)
        others = s.warps - 1  # the last row is warp 0's, the rest are dealt to the other warps
        for number in range(-(-(s.batch - 1) // others)):
            row = self.warp - 1 + number * others
            with d.when((self.warp > 0) & (row < s.batch - 1)):
                word = self.exchange.squares(copy, replica, row)
                self._store_scale(row, receive(word, s.schedule.blocks))

    def _store_scale(self, row: Scalar, squares: list[Scalar]) -> None:
        """1/rms of a row from the blocks' sums of squares, four a lane."""
        s = self.step
        total = functools.reduce(lambda a, b: a + b, map(d.as_f32, squares))
        total = d.select(self.lane < s.schedule.blocks // 4, total, 0.0)
        for distance in (16, 8, 4, 2, 1):
            total = total + d.shuffle_xor(total, distance)
        scale = d.rsqrt(total * (1.0 / s.embed_dim) + s.eps)
        with d.when(self.lane.equals(0)):
            d.store_shared(self.smem(self.memory.scales) + row * WORD_BYTES, scale)

    def _vector_word(self, index: Scalar, row_vectors: int, pitch: int) -> Scalar:
        """Word of the index-th vector of four, counted along rows of `row_vectors`."""
        if self.step.batch == 1:
            return index * 4
        return index // row_vectors * pitch + index % row_vectors * 4

    def _multiply(self, phase: Phase, layer_tile: Scalar) -> None:
        """Partial sums of the phase's rows into `sums` [partial, B, rows]; caller synchronises."""
        s, width = self.step, self.step.schedule.warpgroups
        warpgroup = self.warp // 4

        def round_of(first_item: Scalar, items: int) -> None:
            item = first_item + warpgroup
            group, part = item // phase.split, item % phase.split
            tile = layer_tile + tile_number(phase, first_item, items, 0, warpgroup)
            totals = self._dot(
                phase.columns(s.schedule.chunk), tile, items, part * phase.item_chunks,
                phase.item_chunks,
            )  # fmt: skip
            self._store_sums(phase, totals, group, part)

        @d.loop(0, phase.items // width)
        def _(number: Scalar) -> None:
            round_of(number * width, width)

        if rest := phase.items % width:
            with d.when(warpgroup < rest):
                round_of(d.i32(phase.items - rest), rest)

    def _dot(
        self, columns: int, tile: Scalar, tile_step: Any, chunk: Scalar | int, chunks: int
    ) -> list[Scalar]:
        """This warp's two weight rows times every activation row, summed over `chunks` tiles.

        Returns the values of `_traces`. tile, chunk: the first tile and its chunk of the
        activations; tiles of one group lie tile_step apart.
        """
        m, s, schedule = self.memory, self.step, self.step.schedule
        size = schedule.chunk * BF16_BYTES
        a_low, a_high = d.matrix_descriptor(size)
        b_low, b_high = d.matrix_descriptor(columns * BF16_BYTES)
        count = 4 * s.batch
        totals = [d.f32(0.0)] * (count * schedule.chains)

        def one(number: Any, totals: list[Scalar], accumulate: bool) -> list[Scalar]:
            slot, parity = s.ring_slot(tile + number * tile_step)
            # Parity tells a use of the slot from the one before only once that one is over: a slow
            # warpgroup may not even have seen the slot's last tile arrive.
            empty, full = self.smem(m.empty) + slot * 8, self.smem(m.full) + slot * 8
            d.barrier_wait_after(empty, parity ^ 1, full, parity)
            weights = self.smem(m.ring) + slot * s.tile_bytes
            inputs = self.smem(m.activations) + (d.i32(chunk) + number) * size
            a, b = ((x // 16) | low for x, low in ((weights, a_low), (inputs, b_low)))
            steps = schedule.chunk // FOLD_COLUMNS
            totals = d.wgmma(totals, (a, a_high), (b, b_high), steps, schedule.chains, accumulate)
            with d.when(self.lane.equals(0)):
                d.barrier_arrive(empty)
            return totals

        totals = one(d.i32(0), totals, accumulate=False)
        if chunks > 1:
            totals = list(
                d.loop(1, chunks, *totals)(lambda n, *t: one(n, list(t), accumulate=True))
            )
        chains = [totals[i : i + count] for i in range(0, len(totals), count)]
        return self._traces(
            [functools.reduce(lambda a, b: a + b, x) for x in zip(*chains, strict=False)]
        )

    def _traces(self, totals: list[Scalar]) -> list[Scalar]:
        """Sums the diagonals of the 8 x 8 blocks this warp holds; one value a lane.

        wgmma gives lane 4 e + c columns 2 c, 2 c + 1 of rows e and e + 8: the diagonal of column
        block `row` sits where e // 2 == c. Values are ordered (activation row, weight row of two)
        and dealt to the lanes by the upper lane bits: see `_owned`.
        """
        e, c = self.lane // 4, self.lane % 4
        diagonal, odd = (e // 2).equals(c), (e % 2).equals(1)
        values = []
        for i in range(0, len(totals), 2):
            value = d.select(odd, totals[i + 1], totals[i])
            values.append(d.select(diagonal, value, 0.0))
        while len(values) & (len(values) - 1):
            values.append(d.f32(0.0))
        return [d.fold(self.lane, values, (16, 8, 4, 2, 1))[0]]

    def _owned(self) -> tuple[Scalar, Scalar, Scalar]:
        """(is the first lane with its value, activation row, weight row of two) after `_traces`."""
        count = 1 << (2 * self.step.batch - 1).bit_length()
        lanes = 32 // count
        index = self.lane // lanes
        row = index // 2
        return ((self.lane % lanes).equals(0) & (row < self.step.batch)), row, index % 2

    def _store_sums(self, phase: Phase, totals: list[Scalar], group: Scalar, part: Scalar) -> None:
        first, row, half = self._owned()
        rows = phase.groups * GROUP_ROWS
        weight_row = group * GROUP_ROWS + self.warp % 4 * 2 + half
        index = ((part + phase.first_partial) * self.step.batch + row) * rows + weight_row
        with d.when(first):
            d.store_shared(self.smem(self.memory.sums) + index * WORD_BYTES, totals[0])

    def _sum(self, partials: int, rows: int, row: Scalar, weight_row: Scalar) -> Scalar:
        """A finished product, its partial sums added in order."""
        total = None
        for part in range(partials):
            index = (row + part * self.step.batch) * rows + weight_row
            value = d.load_shared(self.smem(self.memory.sums) + index * WORD_BYTES, "f32")
            total = value if total is None else total + value
        assert total is not None
        return total

    # What a block sends --------------------------------------------------------------------

    def _send_qkv(self, layer: Scalar, phase: Phase) -> None:
        s = self.step
        rows = s.qkv_rows

        @self.each(self.consumers, s.batch * rows)
        def _(i: Scalar) -> None:
            row, weight_row = i // rows, i % rows
            value = self._sum(phase.split, rows, row, weight_row) * self._scale(row)
            start = self.exchange.at("qkv", layer) + self.block * rows
            d.send(self.word(start + row * (rows * s.schedule.blocks) + weight_row), value)

    def _send_ffw(self, layer: Scalar, phase: Phase) -> None:
        """SwiGLU. Rows of `sums` come as 8 of the gate, the 8 matching ones of up, and so on."""
        s = self.step
        half = s.ffw_rows // 2

        @self.each(self.consumers, s.batch * half)
        def _(i: Scalar) -> None:
            row, pair = i // half, i % half
            scale = self._scale(row)
            out = []
            for k in (0, 1):
                gate_row = pair // 4 * (2 * GROUP_ROWS) + pair % 4 * 2 + k
                get = functools.partial(self._sum, phase.split, 2 * s.ffw_rows, row)
                gate, up = get(gate_row) * scale, get(gate_row + GROUP_ROWS) * scale
                sigmoid = d.reciprocal(d.exp2(gate * -LOG2_E) + 1.0)
                out.append(gate * sigmoid * up)
            start = self.exchange.at("ffw", layer) + self.block * half
            d.send(self.word(start + row * (s.ffw_dim // 2) + pair), d.pack_bf16(*out))
            lanes = min(32, s.batch * half)
            with d.when(i >= s.batch * half - lanes):
                self.send_hints("ffw", layer, i - (s.batch * half - lanes), lanes)

    def send_hints(self, name: str, layer: Scalar, lane: Scalar, lanes: int) -> None:
        """Sends a block's hint to every replica; `lanes` threads share the work."""
        for guard, replica in self._replicas(lane, lanes):
            word, _ = self.exchange.hints(name, layer, replica)
            with guard:
                d.send(self.word(word + self.block), d.i32(1))

    def _replicas(self, lane: Scalar, lanes: int) -> Iterator[tuple[Any, Scalar]]:
        """(guard, replica) of the replicas that fall to one of `lanes` threads."""
        copies = self.step.schedule.hint_copies
        for start in range(0, copies, lanes):
            replica = lane + start
            whole = start + lanes <= copies
            yield contextlib.nullcontext() if whole else d.when(replica < copies), replica

    def _send_residual(
        self, norm: Scalar, parts: tuple[Phase, ...] | None, last: Scalar | None = None
    ) -> None:
        """Adds the block's products to its rows of x, sends x * norm weight and the sum of x^2.

        After the last layer the rows of x themselves go to the output.
        """
        m, s = self.memory, self.step
        half = s.embed_rows // 2
        count = s.batch * half

        # Whole warps, for the shuffles: threads beyond the end repeat the last pair, silently.
        @self.each(self.consumers, -(-count // 32) * 32)
        def _(thread: Scalar) -> None:
            inside, i = thread < count, d.minimum(thread, d.i32(count - 1))
            row, pair = i // half, i % half
            address = self.smem(m.residual) + i * (2 * WORD_BYTES)
            x = [d.load_shared(address + k * WORD_BYTES, "f32") for k in (0, 1)]
            if parts is not None:
                partials = sum(p.split for p in parts)
                add = [self._sum(partials, s.embed_rows, row, pair * 2 + k) for k in (0, 1)]
                x = [a + b for a, b in zip(x, add, strict=True)]
                d.sync_warp()  # the repeating threads have read what is now overwritten
                with d.when(inside):
                    for k in (0, 1):
                        d.store_shared(address + k * WORD_BYTES, x[k])
            weights = d.load_shared(self.smem(m.norms) + (norm * half + pair) * WORD_BYTES)
            normed = [a * w for a, w in zip(x, d.unpack_bf16(weights), strict=True)]
            start = self.exchange.at("normed", norm) + self.block * half
            row_word = row * (s.embed_dim // 2) + pair
            with d.when(inside):
                d.send(self.word(start + row_word), d.pack_bf16(*normed))
            squares = x[0] * x[0] + x[1] * x[1]
            distance = half // 2
            while distance:
                squares = squares + d.shuffle_xor(squares, distance)
                distance //= 2
            with d.when(inside):
                for guard, replica in self._replicas(pair, half):
                    with guard:
                        where = self.exchange.squares(norm, replica, row) + self.block
                        d.send(self.word(where), squares)
            if last is not None:
                with d.when(inside & last):
                    where = d.i64((self.block * half + row_word) * WORD_BYTES)
                    d.store_global(self.args.x_out + where, d.pack_bf16(*x))

    # LM head -------------------------------------------------------------------------------

    def _choose_token(self) -> None:
        """The greedy token of every row. 1/rms is positive and leaves the arg-max alone."""
        s, width = self.step, self.step.schedule.warpgroups
        low, high = s.vocab_range(self.block)
        warpgroup = self.warp // 4
        first, row, half = self._owned()

        @d.loop(0, (high - low + (width - 1)) // width, d.f32(-3.0e38), d.i32(0))
        def best(number: Scalar, value: Scalar, token: Scalar) -> list[Scalar]:
            item = number * width + warpgroup
            items = d.minimum(high - low - number * width, d.i32(width))

            def better() -> list[Scalar]:
                tile = number * (width * s.head_chunks) + warpgroup + s.layers * s.layer_tiles
                logit = self._dot(s.embed_dim, tile, items, 0, s.head_chunks)[0]
                candidate = (low + item) * GROUP_ROWS + self.warp % 4 * 2 + half
                wins = logit > value
                return [d.select(wins, logit, value), d.select(wins, candidate, token)]

            return d.choose(warpgroup < items, better, [value, token])

        slot = ((row * s.warps + self.warp) * 2 + half) * (2 * WORD_BYTES)
        with d.when(first):
            address = self.smem(self.memory.candidates) + slot
            d.store_shared(address, best[0])
            d.store_shared(address + WORD_BYTES, best[1])
        self.sync()

        @self.each(self.consumers, s.batch)
        def _(i: Scalar) -> None:
            where = self.smem(self.memory.candidates) + i * (s.warps * 4 * WORD_BYTES)
            value, token = d.f32(-3.0e38), d.i32(0)
            for n in range(2 * s.warps):
                other = d.load_shared(where + n * 8, "f32")
                value, token = _better(value, token, other, d.load_shared(where + n * 8 + 4))
            at = self.exchange.at("best") + i * s.schedule.blocks + self.block
            d.send(self.word(at), value)
            d.send(self.word(at + s.batch * s.schedule.blocks), token)

        with d.when(self.block.equals(0)):
            for number in range(0, s.batch, s.warps):
                row_number = self.warp + number
                with d.when(row_number < s.batch):
                    self._finish_token(row_number)

    def _finish_token(self, row: Scalar) -> None:
        s, blocks = self.step, self.step.schedule.blocks
        vector = d.minimum(self.lane, d.i32(blocks // 4 - 1))
        where = self.exchange.at("best") + row * blocks + vector * 4
        sources = [self.word(where), self.word(where + s.batch * blocks)]
        words = self._receive(sources)
        value, token = d.as_f32(words[0]), words[4]
        for k in (1, 2, 3):
            value, token = _better(value, token, d.as_f32(words[k]), words[4 + k])
        for distance in (16, 8, 4, 2, 1):
            other = d.shuffle_xor(value, distance), d.shuffle_xor(token, distance)
            value, token = _better(value, token, *other)
        with d.when(self.lane.equals(0)):
            d.store_global(self.args.tokens + d.i64(row * 4), token)


LOG2_E = 1.4426950408889634


def _better(
    value: Scalar, token: Scalar, other_value: Scalar, other_token: Scalar
) -> tuple[Scalar, Scalar]:
    """The larger value; of equals the lower token."""
    tie = other_value.equals(value) & (other_token < token)
    wins = (other_value > value) | tie
    return d.select(wins, other_value, value), d.select(wins, other_token, token)
