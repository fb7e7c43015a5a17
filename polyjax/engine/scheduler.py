"""Which tokens of which sequences the next step computes. Policy only: pure Python, no jax.

A step is scheduled while the one before it still runs, so the token a sequence sampled last may be
known to the device only. That a sequence ends by length is known ahead; that it ends by a stop
token is found at `commit`, one step late, and the row computed meanwhile is discarded.

Policy, in this order:
1. Running sequences that need one token (decode) go first, by priority, then arrival.
2. The rest of the token budget goes to prompts, in chunks, in the same order. While others wait,
   each chunk takes at most half of what is left, so that a short prompt passes a long one.
3. Waiting sequences are admitted strictly in order, when their known tokens fit into free pages.
4. A sequence that needs a page when there is none takes those of the running sequence that is last
   in order, which is computed again later. The first in order always gets its pages and each
   sequence fits alone, so the first always progresses: no livelock.
"""

from __future__ import annotations

import itertools
import operator
import time
from bisect import insort
from collections.abc import Sequence as SequenceOf

from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import ConfigError, RequestError
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.pages import PageAllocator
from polyjax.engine.sequence import Sequence, SequenceStatus
from polyjax.engine.step import (
    Launch,
    LaunchResult,
    ScheduledStep,
    SchedulerCounters,
    SchedulerLimits,
    make_launch,
)
from polyjax.engine.types import FinishReason, Request, RequestOutput, TokenLogprobs

# A sequence whose step failed this often in a row is taken for the cause and ends with an error.
MAX_FAILED_STEPS = 2

_by_key = operator.attrgetter("key")


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
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both sorted by key: priority, then arrival
        self._running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._outstanding: list[ScheduledStep] = []
        self._suspect: Sequence | None = None  # failed once, being tried again
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
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._outstanding)

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
        if request.id in self._sequences:
            raise RequestError(f"a request with id {request.id!r} is being served", "request_id")
        if not prompt_tokens:
            raise RequestError("the prompt has no tokens", "prompt")
        max_total = self._bounded_total(prompt_tokens, request.params.max_tokens)
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting, the most that "
                "max_queued_requests allows: try again later",
                status=503,
            )
        pages = self.allocator.new_pages()
        sequence = Sequence(request, next(self._arrivals), max_total, self.eos_token_ids, pages)
        self._sequences[request.id] = sequence
        insort(self._waiting, sequence, key=_by_key)
        return sequence

    def abort(self, request_id: str) -> None:
        """Forgets a request; its pages are free for the next step. Unknown ids are ignored.

        Rows of it that are in flight write to those pages before any later step does."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)

    # -- one step ----------------------------------------------------------------------------

    def next_batch(self) -> ScheduledStep | None:
        """The next step, which the caller must launch; None if there is nothing to do now."""
        self._admitted = []
        self._extended = []
        self._short_of_pages = False
        budget = self.limits.max_num_batched_tokens
        sequences, starts, prefilling = self._take_decodes(budget)
        chunks = self._take_chunks(prefilling, budget - len(sequences))
        samples = [True] * len(sequences)
        prefill = []
        for chunk in chunks:
            chunk.samples = self._advance(chunk)
            if chunk.length == 1 and not chunk.prompt_logprobs:
                sequences.append(chunk.sequence)
                starts.append(chunk.start)
                samples.append(chunk.samples)
            else:
                prefill.append(chunk)
        if not sequences and not prefill:
            return None
        launches = self._decode_launches(sequences, starts, samples) if sequences else []
        for wants_logprobs in (False, True):
            part = [chunk for chunk in prefill if chunk.prompt_logprobs is wants_logprobs]
            launches += self._prefill_launches(part)
        for chunk in chunks:  # only now: a launch of this step must not read what it computes
            self._register(chunk.sequence)
        step = ScheduledStep(
            number=next(self._steps),
            launches=tuple(launches),
            admitted=self._admitted,
            extended=self._extended,
            num_tokens=sum(sum(launch.num_tokens) for launch in launches),
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
        outputs: list[RequestOutput] = []
        for launch, result in zip(step.launches, results, strict=True):
            if launch.prompt_logprobs:
                _collect_prompt_logprobs(launch, result)
            self._commit_launch(launch, result, epoch, now_s, outputs)
        suspect = self._suspect
        if suspect and any(suspect in launch.sequences for launch in step.launches):
            suspect.failed_steps = 0
            self._suspect = None
        return outputs

    def fail_step(self, step: ScheduledStep, error: str) -> list[RequestOutput]:
        """Re-queues everything after `step` failed and the page pools were rebuilt, empty.

        Steps launched after it are void, too. A sequence that failed repeatedly ends with an error,
        returned here. Those that failed once are readmitted one at a time, each after the one
        before has got through a step: so the one to blame is found, and only that one ends.
        """
        if step not in self._outstanding:
            raise ValueError(f"step {step.number} is not in flight")
        self._outstanding.clear()
        for sequence in [s for launch in step.launches for s in launch.sequences]:
            sequence.failed_steps += 1
        for sequence in reversed(self._running):
            self._requeue(sequence)
        self._running.clear()
        for sequence in self._waiting:  # a preempted one may have had a token in flight
            sequence.num_total = len(sequence.token_ids)
        self.allocator.forget_all()
        outputs = []
        for sequence in list(self._waiting):
            if sequence.failed_steps >= MAX_FAILED_STEPS:
                self._finish(sequence)
                outputs.append(
                    RequestOutput(
                        sequence.request.id, [], finish_reason=FinishReason.ERROR, error=error
                    )
                )
        return outputs

    # -- choosing rows -----------------------------------------------------------------------

    def _take_decodes(self, budget: int) -> tuple[list[Sequence], list[int], list[Sequence]]:
        """Schedules every running sequence that lacks one token; returns them, their positions,
        and the running sequences that lack more."""
        sequences: list[Sequence] = []
        starts: list[int] = []
        prefilling: list[Sequence] = []
        running = self._running
        index = 0
        while index < len(running):  # preemption shortens it from the end
            sequence = running[index]
            index += 1
            start = sequence.num_computed
            total = sequence.num_total
            if start + 1 == total < sequence.max_total:
                if len(sequences) == budget:
                    continue
                if start >= sequence.pages.end_tokens and not self._extend(
                    sequence, start, total, first_victim=index
                ):
                    continue
                sequences.append(sequence)
                starts.append(start)
                sequence.num_computed = total
                sequence.num_total = total + 1
            elif start < total <= sequence.prompt_tokens or start + 1 < total:
                prefilling.append(sequence)
        return sequences, starts, prefilling

    def _extend(self, sequence: Sequence, start: int, end: int, first_victim: int) -> bool:
        """Gets pages for positions [start, end), preempting running[first_victim:] from the end.

        False if it has to wait for those before it."""
        while not self.allocator.extend(sequence.pages, start, end):
            self._short_of_pages = True
            if len(self._running) <= first_victim:
                return False
            self._preempt()
        self._extended.append(sequence)
        return True

    def _preempt(self) -> None:
        """Takes the pages of the running sequence that is last in order."""
        self._requeue(self._running.pop())
        self.counters.preemptions += 1

    def _take_chunks(self, prefilling: list[Sequence], budget: int) -> list[_Chunk]:
        """Chunks of prompts for the rest of the budget, of running sequences, then of new ones."""
        chunks: list[_Chunk] = []
        others = len(prefilling) + min(len(self._waiting), len(self._free_slots))
        for sequence in prefilling:
            if budget <= 0:
                return chunks
            others -= 1
            length = self._chunk_tokens(
                sequence, sequence.num_computed, self._share(budget, others)
            )
            chunk = _Chunk(sequence, sequence.num_computed, length)
            if self._extend(sequence, chunk.start, chunk.end, first_victim=len(self._running)):
                chunks.append(chunk)
                budget -= length
        while budget > 0 and not self._short_of_pages and self._waiting and self._free_slots:
            others -= 1
            admitted = self._admit(self._waiting[0], budget, others)
            if admitted is None:
                break
            chunks.append(admitted)
            budget -= admitted.length
        for chunk in chunks:  # what nobody wanted
            length = self._chunk_tokens(chunk.sequence, chunk.start, chunk.length + budget)
            if length > chunk.length and self.allocator.extend(
                chunk.sequence.pages, chunk.start, chunk.start + length
            ):
                budget -= length - chunk.length
                chunk.length = length
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

    def _admit(self, sequence: Sequence, budget: int, others: int) -> _Chunk | None:
        """Gives the first waiting sequence a slot, pages and a first chunk, or returns None."""
        if sequence.num_in_flight or len(self._running) >= self.limits.max_num_seqs:
            return None
        if sequence.failed_steps and self._suspect:
            return None
        allocator = self.allocator
        known = len(sequence.token_ids)
        hit_pages = 0
        if not sequence.prompt_logprobs_due:  # those need every prompt position computed
            hit_pages = allocator.match(
                sequence.pages, sequence.token_ids, sequence.request.cache_salt
            )
        start = hit_pages * allocator.page_size
        length = self._chunk_tokens(sequence, start, self._share(budget, others))
        watermark = self.limits.watermark if self._running else 0.0
        if not allocator.admit(sequence.pages, hit_pages, start + length, known, watermark):
            return None
        if allocator.enable_prefix_caching:
            self.counters.prefix_queries_tokens += known
            self.counters.prefix_hits_tokens += start
        if not sequence.admitted_s:
            sequence.admitted_s = time.monotonic()
            sequence.num_cached = start
        if sequence.failed_steps:
            self._suspect = sequence
        del self._waiting[0]
        insort(self._running, sequence, key=_by_key)
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = start
        self._admitted.append(sequence)
        self._extended.append(sequence)
        return _Chunk(sequence, start, length)

    def _advance(self, chunk: _Chunk) -> bool:
        """Counts a chunk as computed; returns whether its last row samples a token."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        if chunk.end < sequence.num_total or chunk.end >= sequence.max_total:
            return False
        sequence.num_total += 1
        return True

    # -- making launches ---------------------------------------------------------------------

    def _decode_launches(
        self, sequences: list[Sequence], starts: list[int], samples: list[bool]
    ) -> list[Launch]:
        ones = [1] * len(sequences)
        bucket = self._chooser.decode(len(sequences), self._columns(sequences, starts, ones))
        if bucket is not None:
            return [make_launch(bucket, sequences, starts, ones, samples)]
        columns = [
            self._columns([sequence], [start], [1])
            for sequence, start in zip(sequences, starts, strict=True)
        ]
        return [
            make_launch(
                bucket,
                [sequences[row] for row in rows],
                [starts[row] for row in rows],
                ones[: len(rows)],
                [samples[row] for row in rows],
            )
            for bucket, rows in self._chooser.split_decode(columns)
        ]

    def _prefill_launches(self, chunks: list[_Chunk]) -> list[Launch]:
        columns = [self._columns([c.sequence], [c.start], [c.length]) for c in chunks]
        launches = []
        for bucket, rows in self._chooser.group([chunk.length for chunk in chunks], columns):
            group = [chunks[row] for row in rows]
            launches.append(
                make_launch(
                    bucket,
                    [chunk.sequence for chunk in group],
                    [chunk.start for chunk in group],
                    [chunk.length for chunk in group],
                    [chunk.samples for chunk in group],
                    group[0].prompt_logprobs,
                )
            )
        return launches

    def _columns(self, sequences: list[Sequence], starts: list[int], num_tokens: list[int]) -> int:
        """Page table columns these rows read."""
        if self.allocator.has_full_group:
            ends = map(operator.add, starts, num_tokens)
            return -(-max(ends) // self.allocator.page_size)
        return max(
            -(-(start + count) // self.allocator.page_size) - min(sequence.pages.first)
            for sequence, start, count in zip(sequences, starts, num_tokens, strict=True)
        )

    # -- taking in results -------------------------------------------------------------------

    def _commit_launch(
        self,
        launch: Launch,
        result: LaunchResult,
        epoch: int,
        now_s: float,
        outputs: list[RequestOutput],
    ) -> None:
        finished = SequenceStatus.FINISHED
        plain = result.logprobs is None
        generated = 0
        for row, (sequence, token, samples) in enumerate(
            zip(launch.sequences, result.tokens, launch.samples, strict=False)
        ):
            if sequence.status is finished:
                continue  # it ended while this row was in flight
            if samples:
                token_ids = sequence.token_ids
                token_ids.append(token)
                generated += 1
                if (
                    plain
                    and len(token_ids) < sequence.event_total
                    and token not in sequence.stop_ids
                ):
                    output = RequestOutput(sequence.request.id, [token], epoch=epoch)
                else:
                    logprobs = result.logprobs[row] if result.logprobs is not None else None
                    output = self._commit_token(sequence, token, logprobs, epoch, now_s)
            elif launch.starts[row] + launch.num_tokens[row] >= sequence.max_total:
                output = self._commit_prompt(sequence, epoch, now_s)
            else:
                continue
            outputs.append(output)
        self.counters.generation_tokens += generated

    def _commit_token(
        self,
        sequence: Sequence,
        token: int,
        logprobs: TokenLogprobs | None,
        epoch: int,
        now_s: float,
    ) -> RequestOutput:
        """The output for a token just appended, whatever it means for its sequence."""
        output = RequestOutput(sequence.request.id, [token], epoch=epoch)
        known = len(sequence.token_ids)
        if logprobs is not None and sequence.params.logprobs is not None:
            output.logprobs = [logprobs]
        if known == sequence.prompt_tokens + 1:
            self._report_prompt(sequence, output, now_s)
        if token in sequence.stop_ids and known > sequence.min_total:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if token in sequence.eos_ids else token
        elif known >= sequence.max_total:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is None:
            self._register(sequence)
            next_page = known + self.allocator.page_size - known % self.allocator.page_size
            sequence.event_total = min(sequence.max_total, next_page)
        else:
            sequence.finished_s = now_s
            self._finish(sequence)
        return output

    def _commit_prompt(self, sequence: Sequence, epoch: int, now_s: float) -> RequestOutput:
        """The output of a request with max_tokens 0, whose prompt is computed."""
        output = RequestOutput(sequence.request.id, [], FinishReason.LENGTH, epoch=epoch)
        self._report_prompt(sequence, output, now_s)
        sequence.finished_s = now_s
        self._finish(sequence)
        return output

    def _report_prompt(self, sequence: Sequence, output: RequestOutput, now_s: float) -> None:
        """Adds to a sequence's first output what is known of its prompt."""
        sequence.first_token_s = now_s
        self.counters.prompt_tokens += sequence.prompt_tokens
        output.cached_tokens = sequence.num_cached
        output.scheduled_s = sequence.admitted_s
        if sequence.prompt_logprobs_due:
            output.prompt_logprobs = sequence.prompt_logprobs or [None]
            sequence.prompt_logprobs_due = False

    def _register(self, sequence: Sequence) -> None:
        """Offers the full pages of a running sequence to the prefix cache."""
        if sequence.status is SequenceStatus.RUNNING:
            self.allocator.register(
                sequence.pages,
                sequence.token_ids,
                min(sequence.num_computed, len(sequence.token_ids)),
                sequence.request.cache_salt,
            )

    # -- leaving the running set -------------------------------------------------------------

    def _finish(self, sequence: Sequence) -> None:
        """Forgets a sequence. Rows of it in flight are discarded when they are committed."""
        if sequence.status is SequenceStatus.RUNNING:
            self._register(sequence)
            self._running.remove(sequence)
            self._give_back(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request.id]

    def _requeue(self, sequence: Sequence) -> None:
        """Puts a sequence just taken out of the running set back in the queue, in its old place."""
        self._give_back(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed = 0
        insort(self._waiting, sequence, key=_by_key)

    def _give_back(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        if sequence is self._suspect:
            self._suspect = None

    # -- checks ------------------------------------------------------------------------------

    def _check_slots(self, limits: SchedulerLimits) -> None:
        if limits.max_num_seqs > self.num_slots:
            raise ConfigError(
                f"max_num_seqs is {limits.max_num_seqs} and the engine was started with state for "
                f"{self.num_slots} sequences: restart it with a larger --max_num_seqs"
            )

    def _max_pages(self, limits: SchedulerLimits) -> int:
        """Page table columns of the longest sequence there is or may be."""
        longest = max(
            (sequence.max_total for sequence in self._sequences.values()),
            default=0,
        )
        return -(-max(longest, limits.max_model_len) // self.allocator.page_size)

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


class _Chunk:
    """A part of a prompt in the step being scheduled: positions [start, start + length)."""

    __slots__ = ("length", "prompt_logprobs", "samples", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, length: int):
        self.sequence = sequence
        self.start = start
        self.length = length
        self.samples = False
        self.prompt_logprobs = sequence.prompt_logprobs_due and start + 1 < sequence.prompt_tokens

    @property
    def end(self) -> int:
        return self.start + self.length


def _collect_prompt_logprobs(launch: Launch, result: LaunchResult) -> None:
    """Keeps those of a launch; a chunk computed again after preemption adds only what is new."""
    if result.prompt_logprobs is None:
        raise ValueError("the launch asked for prompt logprobs and its result has none")
    for row, sequence in enumerate(launch.sequences):
        entries = result.prompt_logprobs[row]
        have = sequence.prompt_logprobs or [None]  # nothing precedes the first token
        first = launch.starts[row] + 1
        if entries is not None and first <= len(have):
            have += entries[len(have) - first : sequence.prompt_tokens - first]
            sequence.prompt_logprobs = have
