"""A device for scheduler tests: its KV pages hold token ids, its next token is a checksum of them.

It sees only what a real one sees, the packed array of each launch and the slot state it keeps, and
reads every context back through the page tables. A wrong page, position, slot or token anywhere
changes what it samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as SequenceOf

import numpy as np

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.kv import KVGroup
from polyjax.engine import batch as packing
from polyjax.engine.batch import BatchPacker
from polyjax.engine.step import LaunchResult, ScheduledStep
from polyjax.engine.types import Request, TokenLogprobs

UNWRITTEN = -1


def full_group(name: str = "full") -> KVGroup:
    return KVGroup(name, layers=(0,), heads=1, head_dim=1)


def window_group(window: int, name: str = "window") -> KVGroup:
    return KVGroup(name, layers=(1,), heads=1, head_dim=1, window=window)


def ladder(
    decode: SequenceOf[tuple[int, int]], prefill: SequenceOf[tuple[int, int, int]]
) -> BucketLadder:
    """From (sequences, pages) and (tokens, sequences, pages)."""
    return BucketLadder(
        decode=tuple(Bucket(1, *sizes) for sizes in decode),
        prefill=tuple(Bucket(*sizes) for sizes in prefill),
        sampler_sequences=tuple({sizes[-2] for sizes in (*decode, *prefill)}),
    )


def next_token(contexts: SequenceOf[SequenceOf[int]], vocab: int, banned: frozenset[int]) -> int:
    """A deterministic token that depends on every token of what each KV group sees."""
    checksum = 0
    for context in contexts:
        checksum = zlib.crc32(np.asarray(context, np.int32).tobytes(), checksum)
    token = checksum % vocab
    while token in banned:
        token = (token + 1) % vocab
    return token


def generate_alone(
    request: Request, groups: SequenceOf[KVGroup], vocab: int, eos: tuple[int, ...], max_total: int
) -> list[int]:
    """What the request must get, whatever else is served: by definition, without pages."""
    params = request.params
    tokens = list(request.prompt_token_ids)
    end = max_total if params.max_tokens is None else len(tokens) + params.max_tokens
    stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos)
    while len(tokens) < end:
        contexts = [tokens[-group.window :] if group.window else tokens for group in groups]
        outputs = len(tokens) - len(request.prompt_token_ids)
        banned = stops if outputs < params.min_tokens else frozenset()
        tokens.append(next_token(contexts, vocab, banned))
        if tokens[-1] in stops:
            break
    return tokens[len(request.prompt_token_ids) :]


class PagedDevice:
    """Runs steps at once, in order, as a device's queue does; results are read whenever."""

    def __init__(
        self,
        groups: SequenceOf[KVGroup],
        page_size: int,
        num_pages: SequenceOf[int],
        num_slots: int,
        max_pages: int,
        vocab: int,
    ):
        self.groups = tuple(groups)
        self.page_size = page_size
        self.vocab = vocab
        self.packer = BatchPacker(num_slots, len(groups), max_pages)
        self.last_token = [UNWRITTEN] * (num_slots + 1)
        self.stop_ids: list[frozenset[int]] = [frozenset()] * (num_slots + 1)
        self._num_pages = tuple(num_pages)
        self.continued = 0  # launches that were the one before, one token further
        self.rebuild()

    def rebuild(self) -> None:
        """Empties the pools, as after a failed step."""
        self.pools = [np.full(pages * self.page_size, UNWRITTEN) for pages in self._num_pages]

    def run(self, step: ScheduledStep) -> list[LaunchResult]:
        self.packer.update(step)
        for sequence in step.admitted:
            self.stop_ids[sequence.slot] = sequence.stop_ids
            self.last_token[sequence.slot] = UNWRITTEN
        results = []
        for launch in step.launches:
            flat, continues = self.packer.pack(launch)
            if continues:
                self.continued += 1
                assert np.array_equal(flat, self.packer._packed(launch)), "not what it stands for"
            layout = self.packer.layout(launch.bucket)
            assert flat.shape == (layout.size,) and flat.dtype == np.int32
            batch = layout.split(flat)
            rows = range(launch.bucket.sequences)
            tokens = [self._run_row(batch, row) for row in rows]
            logprobs = None
            if launch.num_logprobs is not None:
                logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in tokens]
            prompt_logprobs = (
                [self._prompt_logprobs(batch, row) for row in rows]
                if launch.prompt_logprobs
                else None
            )
            results.append(LaunchResult(tokens, logprobs, prompt_logprobs))
        return results

    def _run_row(self, batch: packing.PackedBatch, row: int) -> int:
        count, end = int(batch.query_lens[row]), int(batch.context_lens[row])
        slot, flags = int(batch.slots[row]), int(batch.flags[row])
        if not count:
            assert slot == self.packer.sink_slot and not flags
            assert not batch.page_tables[:, row].any()
            return UNWRITTEN
        tokens = batch.tokens[row, :count].tolist()
        if flags & packing.FROM_SLOT:
            assert count == 1
            tokens = [self.last_token[slot]]
        assert UNWRITTEN not in tokens
        contexts = []
        for index, group in enumerate(self.groups):
            table, first = batch.page_tables[index, row], int(batch.first_pages[index, row])
            pool = self.pools[index]
            for position, token in enumerate(tokens, start=end - count):
                pool[self._place(table, first, position)] = token
            begin = max(0, end - group.window) if group.window else 0
            contexts.append([pool[self._place(table, first, p)] for p in range(begin, end)])
        assert all(UNWRITTEN not in context for context in contexts), "reads what nobody wrote"
        if not flags & packing.SAMPLES:
            return UNWRITTEN
        banned = self.stop_ids[slot] if flags & packing.BANS_STOP else frozenset()
        self.last_token[slot] = next_token(contexts, self.vocab, banned)
        return self.last_token[slot]

    def _place(self, table: np.ndarray, first: int, position: int) -> int:
        column = position // self.page_size - first
        assert 0 <= column < len(table)
        assert table[column] != 0, "an active row uses the sink page"
        return int(table[column]) * self.page_size + position % self.page_size

    def _prompt_logprobs(self, batch: packing.PackedBatch, row: int) -> list[TokenLogprobs] | None:
        """A token's log-probability is minus its id, so that a test can tell where it came from."""
        count = int(batch.query_lens[row])
        tokens = [*batch.tokens[row, 1:count].tolist(), int(batch.next_tokens[row])]
        return [TokenLogprobs(token, -float(token), 1, []) for token in tokens] if count else None
