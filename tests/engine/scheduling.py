"""The engine's loop for tests: scheduler, and a device that checks what it is told."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from polyjax.core.buckets import BucketLadder
from polyjax.core.kv import KVGroup
from polyjax.engine.pages import PageAllocator
from polyjax.engine.scheduler import Scheduler
from polyjax.engine.sequence import Sequence
from polyjax.engine.step import LaunchResult, ScheduledStep, SchedulerLimits
from polyjax.engine.types import FinishReason, Request, RequestOutput, SamplingParams
from tests.engine.audit import audit
from tests.engine.paged_device import (
    PagedDevice,
    full_group,
    generate_alone,
    ladder,
)

VOCAB = 50
EOS = (0,)
SMALL_LADDER = ladder(
    decode=[(1, 8), (4, 8), (8, 8), (2, 64), (8, 64)],
    prefill=[(4, 1, 8), (4, 4, 8), (16, 1, 64), (16, 2, 64), (64, 1, 64)],
)


class Serving:
    """Scheduler and device in the engine's loop: `depth` steps in flight while one is scheduled."""

    def __init__(
        self,
        groups: SequenceOf[KVGroup] = (full_group(),),
        page_size: int = 4,
        num_pages: int = 64,
        num_slots: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        buckets: BucketLadder = SMALL_LADDER,
        prefix_caching: bool = True,
        depth: int = 1,
    ):
        self.groups = groups
        self.depth = depth
        self.limits = SchedulerLimits(num_slots, max_num_batched_tokens, max_model_len)
        pools = [num_pages] * len(groups)
        self.allocator = PageAllocator(groups, page_size, pools, 2, prefix_caching)
        self.scheduler = Scheduler(self.limits, buckets, self.allocator, num_slots, EOS)
        widest = -(-max_model_len // page_size)
        self.device = PagedDevice(groups, page_size, pools, num_slots, widest, VOCAB)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.ended_at: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.in_flight: list[tuple[ScheduledStep, list[LaunchResult]]] = []
        self.steps: list[ScheduledStep] = []

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler._roster.running

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler._roster.waiting

    def step(self) -> ScheduledStep | None:
        step = self.scheduler.next_batch()
        if step:
            self.check(step)
            self.in_flight.append((step, self.device.run(step)))
            self.steps.append(step)
        if self.in_flight and (step is None or len(self.in_flight) > self.depth):
            self.commit_oldest()
        living = [sequence.pages for sequence in (*self.running, *self.waiting)]
        audit(self.allocator, living)
        return step

    def commit_oldest(self) -> None:
        self.keep(self.scheduler.commit(*self.in_flight.pop(0)))

    def fail(self) -> list[RequestOutput]:
        """The oldest step in flight fails; the engine rebuilds the pools."""
        outputs = self.scheduler.fail_step(self.in_flight[0][0], "scripted")
        self.in_flight.clear()
        self.device.rebuild()
        return outputs

    def check(self, step: ScheduledStep) -> None:
        """What holds for every step."""
        buckets = self.scheduler._chooser.ladder
        assert step.launches
        assert 0 < step.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        assert step.num_tokens == sum(row.num_tokens for la in step.launches for row in la.rows)
        sequences = [s for launch in step.launches for s in launch.sequences]
        assert len(sequences) == len(set(sequences)), "a sequence twice in a step"
        assert set(step.admitted) <= set(step.extended) <= set(sequences)
        slots = [sequence.slot for sequence in self.running]
        assert len(slots) == len(set(slots)) and min(slots) >= 0
        assert set(sequences) <= set(self.running)
        for launch in step.launches:
            assert launch.bucket in (buckets.decode if launch.decode else buckets.prefill)
            assert len(launch.sequences) <= launch.bucket.sequences
            assert max(launch.num_tokens) <= launch.bucket.tokens
            ends = [row.start + row.num_tokens for row in launch.rows]
            columns = max(map(self.allocator.columns, launch.starts, ends))
            assert columns <= launch.bucket.pages

    def keep(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert self.reason(output.request_id) is None, "an output after the last"
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason:
                self.ended_at[output.request_id] = len(self.steps)

    def serve(self, *requests: Request) -> None:
        for one in requests:
            self.scheduler.add(one)
        self.finish()

    def finish(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def abort(self, request_id: str | None) -> None:
        if request_id is not None:
            self.scheduler.abort(request_id)
            self.aborted.add(request_id)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish_reason if outputs else None

    def alone(self, request: Request) -> list[int]:
        longest = self.scheduler.max_total_tokens
        return generate_alone(request, self.groups, VOCAB, EOS, longest)


def request(id: str, prompt: SequenceOf[int], priority: int = 0, **params: Any) -> Request:
    fields = {"max_tokens": 8, "temperature": 0.0, **params}
    return Request(id, list(prompt), SamplingParams(**fields), priority=priority)


def prompt_logprobs(serving: Serving, request_id: str) -> list[int | None]:
    """The tokens that the device's log-probabilities belong to."""
    entries = serving.outputs[request_id][0].prompt_logprobs
    assert entries is not None
    assert all(entry is None or entry.logprob == -entry.token_id for entry in entries)
    return [None if entry is None else entry.token_id for entry in entries]
