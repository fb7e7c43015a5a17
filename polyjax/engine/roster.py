"""Who waits, who runs, and what the running ones hold: a slot each, and pages."""

from __future__ import annotations

import operator
import time
from bisect import insort

from polyjax.engine.pages import PageAllocator
from polyjax.engine.sequence import Sequence, SequenceStatus

_by_key = operator.attrgetter("key")


class Roster:
    """All living sequences. `waiting` and `running` are sorted: priority first, then arrival.

    `suspect` is a running sequence that was part of a failed step and has got through none since.
    """

    def __init__(self, allocator: PageAllocator, num_slots: int):
        self.allocator = allocator
        self.by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.suspect: Sequence | None = None

    def enqueue(self, sequence: Sequence) -> None:
        self.by_id[sequence.id] = sequence
        insort(self.waiting, sequence, key=_by_key)

    def first_ready(self) -> Sequence | None:
        """The first waiting sequence whose grammar, if it has one, is compiled."""
        return next((sequence for sequence in self.waiting if sequence.ready), None)

    def start(self, sequence: Sequence, computed: int) -> None:
        """Runs a waiting sequence, which has its pages and `computed` tokens in them."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_by_key)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self.free_slots.pop()
        sequence.num_computed = computed
        if sequence.failed_steps:
            self.suspect = sequence
        if not sequence.admitted_s:
            sequence.admitted_s = time.monotonic()
            sequence.num_cached = computed

    def requeue_last(self) -> None:
        """Takes everything from the running sequence last in order and lets it wait again."""
        sequence = self.running.pop()
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=_by_key)

    def requeue_all(self) -> None:
        """Like `requeue_last` for all, and forgets the tokens in flight and every cached page."""
        while self.running:
            self.requeue_last()
        for sequence in self.waiting:
            sequence.num_total = len(sequence.token_ids)
        self.allocator.forget_all()

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence. Rows of it in flight are discarded when they are committed."""
        if sequence.status is SequenceStatus.RUNNING:
            self.register(sequence)
            self.running.remove(sequence)
            self._give_back(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.by_id[sequence.id]

    def register(self, sequence: Sequence) -> None:
        """Offers the full pages of a sequence, if it runs, to the prefix cache."""
        if sequence.status is SequenceStatus.RUNNING:
            self.allocator.register(
                sequence.pages,
                sequence.token_ids,
                min(sequence.num_computed, len(sequence.token_ids)),
                sequence.request.cache_salt,
            )

    def _give_back(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        if sequence is self.suspect:
            self.suspect = None
