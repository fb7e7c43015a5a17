"""Which tokens of which sequences the next step computes. Policy only: pure Python, no jax.

A step is scheduled while the one before it still runs, so the token a sequence sampled last may be
known to the device only. That a sequence ends by length is known ahead; that it ends by a stop
token is found at `commit`, one step late, and the row computed meanwhile is discarded.

Policy, in this order:
1. Running sequences that need one token (decode) go first, by priority, then arrival.
2. The rest of the token budget goes to prompts, in chunks, in the same order. While others wait,
   each chunk takes at most half of what is left, so that a short prompt passes a long one.
3. Waiting sequences are admitted strictly in order, when their known tokens fit into free pages.
   One whose grammar is still being compiled is passed by.
4. A sequence that needs a page when there is none takes those of the running sequence that is last
   in order, unless that one is in this step already; it is computed again later. Each sequence fits
   alone, so in every step the first in order progresses, or one that it waits for. Nobody is
   admitted while a running sequence lacks pages, so those it waits for end: no livelock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as SequenceOf

from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import ConfigError, RequestError
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.commit import Committer, error_output
from polyjax.engine.launches import Chunk, DecodeRows, decode_launches, prefill_launches
from polyjax.engine.pages import PageAllocator
from polyjax.engine.roster import Roster
from polyjax.engine.sequence import Sequence, SequenceStatus
from polyjax.engine.step import LaunchResult, ScheduledStep, SchedulerCounters, SchedulerLimits
from polyjax.engine.types import FinishReason, Request, RequestOutput

# A sequence whose step failed this often in a row is taken for the cause and ends with an error.
MAX_FAILED_STEPS = 2


class Scheduler:
    """Queues, admits, schedules, preempts and finishes sequences. One thread calls it.

    `num_slots` is how many sequences the device's per-slot state has room for. Raises ConfigError
    where limits, ladder and pages contradict each other.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        ladder: BucketLadder,
        allocator: PageAllocator,
        num_slots: int,
        eos_token_ids: tuple[int, ...] = (),
    ):
        self.allocator = allocator
        self.num_slots = num_slots
        self.eos_token_ids = tuple(eos_token_ids)
        self.counters = SchedulerCounters()
        self._roster = Roster(allocator, num_slots)
        self._outstanding: list[ScheduledStep] = []
        # Of the step being scheduled; admission waits while a running sequence lacks pages.
        self._admitted: list[Sequence] = []
        self._extended: list[Sequence] = []
        self._short_of_pages = False
        self._arrivals = itertools.count()
        self._steps = itertools.count()
        self._check_slots(limits)
        self.limits = limits
        self._chooser = BucketChooser(ladder, self._max_pages(limits))

    # -- what the outside sees and changes ---------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._roster.running or self._roster.waiting or self._outstanding)

    @property
    def max_pages(self) -> int:
        """Page table columns that a ladder has to reach."""
        return self._max_pages(self.limits)

    def counting_on_more(self, numerics: str) -> list[Sequence]:
        """The living sequences whose requests asked for another numerics class than this one."""
        living = self._roster.by_id.values()
        return [s for s in living if s.params.numerics not in (None, numerics)]

    @property
    def max_total_tokens(self) -> int:
        """Longest sequence that can be served; its last token is never written to the cache."""
        return min(self.limits.max_model_len, self.allocator.capacity_tokens + 1)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Applies from the next step on; sequences already accepted keep what they were promised.

        Raises ConfigError, changing nothing, for limits that slots or ladder cannot serve."""
        self._check_slots(limits)
        self._chooser = BucketChooser(self._chooser.ladder, self._max_pages(limits))
        self.limits = limits

    def set_ladder(self, ladder: BucketLadder) -> None:
        """Applies from the next step on. Raises ConfigError, changing nothing, if too short."""
        self._chooser = BucketChooser(ladder, self._max_pages(self.limits))

    def add(self, request: Request) -> Sequence:
        """Queues a request. Raises RequestError where it can never be served, or not now (503)."""
        prompt_tokens = len(request.prompt_token_ids)
        if request.id in self._roster.by_id:
            raise RequestError(f"a request with id {request.id!r} is being served", "request_id")
        if not prompt_tokens:
            raise RequestError("the prompt has no tokens", "prompt")
        max_total = self._bounded_total(prompt_tokens, request.params.max_tokens)
        if len(self._roster.waiting) >= self.limits.max_queued_requests:
            raise RequestError(
                f"{len(self._roster.waiting)} requests are waiting, the most that "
                "max_queued_requests allows: try again later",
                status=503,
            )
        pages = self.allocator.new_pages()
        sequence = Sequence(request, next(self._arrivals), max_total, self.eos_token_ids, pages)
        self._roster.enqueue(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        """Forgets a request; its pages are free for the next step. Unknown ids are ignored.

        Rows of it that are in flight write to those pages before any later step does."""
        sequence = self._roster.by_id.get(request_id)
        if sequence is not None:
            self._roster.finish(sequence)

    def refuse(self, sequence: Sequence, error: RequestError) -> RequestOutput:
        """Ends a living sequence, whose request turned out to be wrong, with that error."""
        self._roster.finish(sequence)
        return error_output(sequence, error)

    # -- one step ----------------------------------------------------------------------------

    def next_batch(self) -> ScheduledStep | None:
        """The next step, which the caller must launch; None if there is nothing to do now."""
        self._admitted = []
        self._extended = []
        self._short_of_pages = False
        budget = self.limits.max_num_batched_tokens
        decodes, prefilling = self._take_decodes(budget)
        chunks = self._take_chunks(prefilling, decodes.sequences, budget)
        prefills = []
        for chunk in chunks:
            self._advance(chunk)
            if chunk.length == 1 and not chunk.prompt_logprobs:
                decodes.add(chunk)
            else:
                prefills.append(chunk)
        launches = [
            *decode_launches(decodes, self._chooser, self.allocator),
            *prefill_launches(prefills, self._chooser, self.allocator),
        ]
        if not launches:
            return None
        for chunk in chunks:  # only now: no launch of this step may read what it computes
            self._roster.register(chunk.sequence)
        num_tokens = sum(sum(launch.num_tokens) for launch in launches)
        step = ScheduledStep(
            next(self._steps), tuple(launches), self._admitted, self._extended, num_tokens
        )
        self._outstanding.append(step)
        return step

    def commit(
        self,
        step: ScheduledStep,
        results: SequenceOf[LaunchResult],
        epoch: int = 0,
        now_s: float | None = None,
    ) -> list[RequestOutput]:
        """Takes in what a step sampled, oldest step first; returns what is new for each request."""
        if not self._outstanding or self._outstanding[0] is not step:
            raise ValueError(f"step {step.number} is not the oldest step in flight")
        del self._outstanding[0]
        now_s = time.monotonic() if now_s is None else now_s
        committer = Committer(self._roster, self.counters, epoch, now_s)
        outputs: list[RequestOutput] = []
        for launch, result in zip(step.launches, results, strict=True):
            outputs += committer.commit(launch, result)
        suspect = self._roster.suspect
        if suspect and any(suspect in launch.sequences for launch in step.launches):
            suspect.failed_steps = 0
            self._roster.suspect = None
        return outputs

    def requeue_all(self) -> None:
        """Lets everything wait again, to be computed from its tokens; the prefix cache is empty.

        No step may be in flight.
        """
        if self._outstanding:
            raise ValueError(f"{len(self._outstanding)} steps are in flight")
        self._roster.requeue_all()
        for sequence in self._roster.waiting:
            if sequence.prompt_logprobs_due:
                sequence.prompt_logprobs = []  # those so far were another state's

    def drop_started(self, error: str, status: int) -> list[RequestOutput]:
        """Ends every request that was ever admitted, after `requeue_all`; returns their ends."""
        started = [sequence for sequence in self._roster.waiting if sequence.admitted_s]
        for sequence in started:
            self._roster.finish(sequence)
        return [
            RequestOutput(s.id, [], FinishReason.ERROR, error=error, error_status=status)
            for s in started
        ]

    def fail_step(
        self, step: ScheduledStep, error: str, blames_sequences: bool = True
    ) -> list[RequestOutput]:
        """Re-queues everything after `step` failed and the page pools were rebuilt, empty.

        Steps launched after it are void, too. A sequence that failed repeatedly ends with an error,
        returned here. Those that failed once are readmitted one at a time, each after the one
        before has got through a step: so the one to blame is found, and only that one ends. With
        `blames_sequences` False a program is known to be the cause, and nothing is held against
        sequences.
        """
        if not any(step is other for other in self._outstanding):
            raise ValueError(f"step {step.number} is not in flight")
        self._outstanding.clear()
        for launch in step.launches:
            for sequence in launch.sequences:
                sequence.failed_steps += blames_sequences
        self._roster.requeue_all()
        outputs = []
        for sequence in list(self._roster.waiting):
            if sequence.failed_steps >= MAX_FAILED_STEPS:
                self._roster.finish(sequence)
                output = RequestOutput(sequence.id, [], FinishReason.ERROR, error=error)
                outputs.append(output)
        return outputs

    # -- choosing rows -----------------------------------------------------------------------

    def _take_decodes(self, budget: int) -> tuple[DecodeRows, list[Sequence]]:
        """Rows of the running sequences that lack one token; the sequences that lack more."""
        sequences: list[Sequence] = []
        starts: list[int] = []
        prefilling: list[Sequence] = []
        for sequence in self._roster.running:  # preemption shortens the list from its end
            start = sequence.num_computed
            total = sequence.num_total
            if start + 1 == total < sequence.max_total:
                if len(sequences) == budget:
                    continue
                if start >= sequence.pages.end_tokens and not self._extend(
                    sequence, start, total, sequences
                ):
                    continue
                sequences.append(sequence)
                starts.append(start)
                sequence.num_computed = total
                sequence.num_total = total + 1
            elif start < total <= sequence.prompt_tokens or start + 1 < total:
                prefilling.append(sequence)
        return DecodeRows(sequences, starts), prefilling

    def _extend(self, sequence: Sequence, start: int, end: int, scheduled: list[Sequence]) -> bool:
        """Gets pages for positions [start, end), if need be those of the last in order.

        False if it has to wait: for those before it, or because the last is `scheduled` already.
        """
        running = self._roster.running
        while not self.allocator.extend(sequence.pages, start, end):
            self._short_of_pages = True
            if running[-1] is sequence or running[-1] in scheduled:
                return False
            self._roster.requeue_last()
            self.counters.preemptions += 1
        self._extended.append(sequence)
        return True

    def _take_chunks(
        self, prefilling: list[Sequence], decodes: list[Sequence], budget: int
    ) -> list[Chunk]:
        """Chunks of prompts for the rest of the budget, of running sequences, then of new ones."""
        chunks: list[Chunk] = []
        roster = self._roster
        budget -= len(decodes)
        others = len(prefilling) + min(len(roster.waiting), len(roster.free_slots))
        for sequence in prefilling:
            others -= 1
            if budget <= 0 or sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            chunk = self._continue(sequence, self._share(budget, others), decodes)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.length
        while budget > 0 and not self._short_of_pages and roster.free_slots:
            first = roster.first_ready()
            if first is None:
                break
            others -= 1
            admitted = self._admit(first, self._share(budget, others))
            if admitted is None:
                break
            chunks.append(admitted)
            budget -= admitted.length
        for chunk in chunks:
            if budget > 0:  # more than the others wanted
                budget -= self._lengthen(chunk, budget)
        return chunks

    def _share(self, budget: int, others: int) -> int:
        """Most tokens a chunk may take of `budget` while `others` want some."""
        if others <= 0:
            return budget
        return min(budget, max(budget // 2, self._chooser.smallest_chunk))

    def _chunk_tokens(self, sequence: Sequence, start: int, allowed: int) -> int:
        remaining = sequence.num_total - start
        allowed = min(allowed, self.allocator.max_chunk_tokens)
        end = start + min(remaining, allowed)
        return self._chooser.chunk_tokens(remaining, allowed, self.allocator.columns(start, end))

    def _continue(self, sequence: Sequence, allowed: int, decodes: list[Sequence]) -> Chunk | None:
        """The next chunk of a running sequence's prompt, None if it has to wait for pages."""
        start = sequence.num_computed
        chunk = Chunk(sequence, start, self._chunk_tokens(sequence, start, allowed))
        if self.allocator.extend(sequence.pages, start, chunk.end):
            self._extended.append(sequence)
            return chunk
        # Windows are short of pages: take few tokens rather than none.
        few = min(allowed, self._chooser.smallest_chunk)
        chunk.length = self._chunk_tokens(sequence, start, few)
        return chunk if self._extend(sequence, start, chunk.end, decodes) else None

    def _lengthen(self, chunk: Chunk, budget: int) -> int:
        """Lets a chunk take up to `budget` tokens more; returns how many it took."""
        length = self._chunk_tokens(chunk.sequence, chunk.start, chunk.length + budget)
        more = length - chunk.length
        end = chunk.start + length
        if more <= 0 or not self.allocator.extend(chunk.sequence.pages, chunk.start, end):
            return 0
        chunk.length = length
        return more

    def _admit(self, sequence: Sequence, allowed: int) -> Chunk | None:
        """Gives a waiting sequence a slot, pages and a first chunk, or returns None."""
        if sequence.num_in_flight or len(self._roster.running) >= self.limits.max_num_seqs:
            return None
        if sequence.failed_steps and self._roster.suspect:
            return None
        allocator = self.allocator
        known = len(sequence.token_ids)
        hit_pages = 0
        if not sequence.prompt_logprobs_due:  # those need every prompt position computed
            hit_pages = allocator.match(
                sequence.pages, sequence.token_ids, sequence.request.cache_salt
            )
        start = hit_pages * allocator.page_size
        length = self._chunk_tokens(sequence, start, allowed)
        watermark = self.limits.watermark if self._roster.running else 0.0
        if not allocator.admit(sequence.pages, hit_pages, start + length, known, watermark):
            return None
        if allocator.enable_prefix_caching:
            self.counters.prefix_queries_tokens += known
            self.counters.prefix_hits_tokens += start
        self._roster.start(sequence, computed=start)
        self._admitted.append(sequence)
        self._extended.append(sequence)
        return Chunk(sequence, start, length)

    def _advance(self, chunk: Chunk) -> None:
        """Counts a chunk as computed, and the token it samples if it reaches the end."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        chunk.samples = sequence.num_total == chunk.end < sequence.max_total
        sequence.num_total += chunk.samples

    # -- checks ------------------------------------------------------------------------------

    def _check_slots(self, limits: SchedulerLimits) -> None:
        if limits.max_num_seqs > self.num_slots:
            raise ConfigError(
                f"max_num_seqs is {limits.max_num_seqs} and the engine was started with state for "
                f"{self.num_slots} sequences: restart it with a larger --max_num_seqs"
            )

    def _max_pages(self, limits: SchedulerLimits) -> int:
        """Page table columns of the longest sequence there is or may be."""
        living = [sequence.max_total for sequence in self._roster.by_id.values()]
        return -(-max([limits.max_model_len, *living]) // self.allocator.page_size)

    def _bounded_total(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Tokens a sequence may grow to. Raises RequestError if more than can be served."""
        # The token sampled last is never written to the cache; a prompt is written whole.
        unwritten = 0 if max_tokens == 0 else 1
        limit = min(self.limits.max_model_len, self.allocator.capacity_tokens + unwritten)
        allows = (
            f"max_model_len allows {limit} in all"
            if limit == self.limits.max_model_len
            else f"the KV cache holds {limit} (num_kv_pages, gpu_memory_utilization)"
        )
        if prompt_tokens + unwritten > limit:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and {allows}, output included", "prompt"
            )
        if max_tokens is None:
            return limit
        if prompt_tokens + max_tokens > limit:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and max_tokens asks for {max_tokens} more, "
                f"but {allows}",
                "max_tokens",
            )
        return prompt_tokens + max_tokens
