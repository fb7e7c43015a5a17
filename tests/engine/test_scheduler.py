"""The scheduler, driven as the engine drives it, on a device that checks what it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.core.buckets import BucketLadder
from polyjax.core.errors import ConfigError, RequestError
from polyjax.core.kv import KVGroup
from polyjax.engine.pages import PageAllocator
from polyjax.engine.scheduler import Scheduler
from polyjax.engine.sequence import SamplerKind, Sequence
from polyjax.engine.step import LaunchResult, ScheduledStep, SchedulerLimits
from polyjax.engine.types import FinishReason, Request, RequestOutput, SamplingParams
from tests.engine.audit import audit
from tests.engine.paged_device import (
    PagedDevice,
    full_group,
    generate_alone,
    ladder,
    window_group,
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


# -- one sequence, then many, get what they would get alone ----------------------------------------


@pytest.mark.parametrize("length", range(1, 36))
def test_one_request_of_every_length(length: int) -> None:
    serving = Serving()
    asked = request("a", range(1, length + 1), max_tokens=9)
    serving.serve(asked)
    assert serving.tokens("a") == serving.alone(asked)


def test_no_row_is_computed_that_length_makes_useless() -> None:
    serving = Serving()
    serving.serve(request("a", range(1, 8), max_tokens=5, ignore_eos=True))
    assert serving.reason("a") is FinishReason.LENGTH
    assert sum(step.num_tokens for step in serving.steps) == 7 + 4


def test_a_stop_token_costs_one_discarded_row() -> None:
    serving = Serving()
    candidates = [request("a", range(i, i + 7), max_tokens=60) for i in range(20)]
    asked, expected = next(
        (one, tokens)
        for one in candidates
        if (tokens := serving.alone(one))[-1] in EOS and 3 < len(tokens) < 60
    )
    serving.serve(asked)
    assert serving.tokens("a") == expected
    assert serving.reason("a") is FinishReason.STOP
    assert serving.outputs["a"][-1].stop_reason is None
    assert sum(step.num_tokens for step in serving.steps) == 7 + len(expected)


def test_a_stop_token_id_is_named() -> None:
    free = request("a", range(1, 8), max_tokens=20, ignore_eos=True)
    fourth = Serving().alone(free)[3]
    serving = Serving()
    serving.serve(request("a", range(1, 8), max_tokens=20, stop_token_ids=(fourth,)))
    assert serving.outputs["a"][-1].stop_reason == fourth
    assert serving.tokens("a")[-1] == fourth


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    for minimum in (1, 5, 17):
        serving = Serving()
        everything = tuple(range(1, VOCAB - 1))  # whatever is sampled, it stops
        asked = request("a", [3, 4], max_tokens=40, min_tokens=minimum, stop_token_ids=everything)
        serving.serve(asked)
        assert serving.tokens("a") == serving.alone(asked)
        assert len(serving.tokens("a")) >= minimum + 1
        kinds = [launch.sampler for step in serving.steps for launch in step.launches]
        assert kinds[:minimum] == [SamplerKind.FULL] * minimum
        assert SamplerKind.FULL not in kinds[minimum:]


def test_ignore_eos_runs_to_the_model_length() -> None:
    serving = Serving(max_model_len=40)
    serving.serve(request("a", range(1, 8), max_tokens=None, ignore_eos=True))
    assert len(serving.tokens("a")) == 33
    assert serving.reason("a") is FinishReason.LENGTH


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    serving = Serving()
    serving.serve(
        request("a", range(1, 31), max_tokens=0, prompt_logprobs=0), request("b", [5], max_tokens=0)
    )
    assert serving.tokens("a") == serving.tokens("b") == []
    assert serving.reason("a") is serving.reason("b") is FinishReason.LENGTH
    assert prompt_logprobs(serving, "a") == [None, *range(2, 31)]
    kinds = {launch.sampler for step in serving.steps for launch in step.launches}
    assert kinds == {SamplerKind.NONE}


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 2),  # steps until it arrives
        st.integers(1, 60),  # prompt tokens
        st.integers(0, 40),  # of them, how many it shares with others
        st.sampled_from([None, 0, 1, 2, 6, 30]),  # max_tokens
        st.sampled_from([0, 0, 0, -1, 1]),  # priority
        st.booleans(),  # ignore_eos
        st.sampled_from([0, 0, 3]),  # min_tokens
        st.sampled_from([None, None, None, 1, 4]),  # aborted after so many steps
    ),
    min_size=1,
    max_size=14,
)


GROUPS = [
    (full_group(),),
    (full_group(), window_group(4)),
    (full_group(), window_group(9)),
    (window_group(16),),
    (window_group(5), window_group(12)),
]


@given(
    arrivals=ARRIVALS,
    groups=st.sampled_from(GROUPS),
    page_size=st.sampled_from([4, 16]),
    num_pages=st.integers(8, 40),
    num_slots=st.integers(1, 8),
    budget=st.sampled_from([8, 16, 64]),
    prefix_caching=st.booleans(),
    depth=st.sampled_from([0, 1, 1, 2]),
)
@settings(max_examples=120, deadline=None)
def test_everybody_gets_what_they_get_alone(
    arrivals: list[tuple[int, int, int, int | None, int, bool, int, int | None]],
    groups: tuple[KVGroup, ...],
    page_size: int,
    num_pages: int,
    num_slots: int,
    budget: int,
    prefix_caching: bool,
    depth: int,
) -> None:
    """Under page pressure, preemption, chunking, shared prefixes, aborts and random stops."""
    serving = Serving(
        groups, page_size, num_pages, num_slots, budget, 96, SMALL_LADDER, prefix_caching, depth
    )
    asked: dict[str, Request] = {}
    aborts: dict[int, str] = {}
    for wait, length, shared, max_tokens, priority, ignore_eos, min_tokens, abort in arrivals:
        for _ in range(wait):
            serving.step()
            serving.abort(aborts.pop(len(serving.steps), None))
        prompt = [7] * min(shared, length) + [(len(asked) + i) % 40 for i in range(length - shared)]
        one = request(
            f"r{len(asked)}",
            prompt,
            max_tokens=max_tokens,
            priority=priority,
            ignore_eos=ignore_eos,
            min_tokens=min(min_tokens, max_tokens if max_tokens is not None else min_tokens),
        )
        try:
            serving.scheduler.add(one)
        except RequestError:
            assert length + (1 if max_tokens is None else max_tokens) > min(
                96, serving.allocator.capacity_tokens
            )
            continue
        asked[one.id] = one
        if abort:
            aborts[len(serving.steps) + abort] = one.id
    for when in sorted(aborts):
        while len(serving.steps) < when and serving.scheduler.has_work:
            serving.step()
        serving.abort(aborts[when])
    serving.finish()
    for id, one in asked.items():
        if id in serving.aborted and serving.reason(id) is None:
            assert serving.tokens(id) == serving.alone(one)[: len(serving.tokens(id))]
        else:
            assert serving.tokens(id) == serving.alone(one)
    assert serving.allocator.usage == 0.0


# -- pages run out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_preempted_sequences_resume_and_lose_nothing(depth: int) -> None:
    serving = Serving(num_pages=23, depth=depth)  # twenty usable pages of four tokens
    asked = [
        request(f"r{i}", range(i + 1, i + 9), max_tokens=50, ignore_eos=True) for i in range(6)
    ]
    serving.serve(*asked)
    assert serving.scheduler.counters.preemptions > 0
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)
    ends = [serving.ended_at[one.id] for one in asked]
    assert ends == sorted(ends), "first come, first served"


def test_the_victim_is_the_last_of_the_lowest_priority() -> None:
    serving = Serving(num_pages=15, num_slots=3)  # twelve usable
    important = request("important", range(1, 9), max_tokens=30, priority=-1, ignore_eos=True)
    first = request("first", range(11, 19), max_tokens=30, ignore_eos=True)
    last = request("last", range(21, 29), max_tokens=30, ignore_eos=True)
    for one in (last, first, important):  # arrival times decide among equals, not calls of add
        serving.scheduler.add(dataclasses.replace(one, arrival_s=1.0 if one is last else 0.0))
    preempted = []
    while serving.scheduler.has_work:
        before = {s.id for s in serving.running}
        serving.step()
        waiting = {s.id for s in serving.waiting}
        preempted += sorted(before & waiting)
    assert preempted[0] == "last"
    assert "important" not in preempted
    assert serving.ended_at["important"] < serving.ended_at["first"] < serving.ended_at["last"]


def test_a_prompt_takes_what_window_pages_there_are() -> None:
    serving = Serving((window_group(16),), num_pages=20, max_num_batched_tokens=24)
    asked = [
        request("early", range(1, 17), max_tokens=40, ignore_eos=True),
        request("long", [1, 2, 3] * 30, max_tokens=2, ignore_eos=True),
        request("late", range(2, 18), max_tokens=40, ignore_eos=True),
    ]
    for one in asked:
        serving.scheduler.add(one)
    serving.step()
    while "long" not in serving.ended_at:
        before = next(s.num_computed for s in serving.running if s.id == "long")
        serving.step()
        after = next((s.num_computed for s in serving.running if s.id == "long"), 92)
        assert after > before or after >= 91
    serving.finish()
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)


@pytest.mark.parametrize("num_pages", range(12, 16))
@pytest.mark.parametrize("max_tokens", [8, 40])
def test_small_requests_do_not_keep_window_pages_from_a_prompt(
    num_pages: int, max_tokens: int
) -> None:
    buckets = ladder(decode=[(32, 64)], prefill=[(16, 2, 64)])
    serving = Serving((window_group(16),), num_pages=num_pages, num_slots=32, buckets=buckets)
    asked = [request("long", [1, 2, 3] * 30, max_tokens=2, ignore_eos=True)]
    long = serving.scheduler.add(asked[0])
    stalled = 0
    while "long" not in serving.ended_at:
        asked.append(request(f"small{len(asked)}", [len(asked)], max_tokens=max_tokens))
        serving.scheduler.add(asked[-1])
        assert len(asked) < 60
        computed = long.num_computed
        step = serving.step()
        if step and computed == long.num_computed < 90:
            stalled += 1
            assert not step.admitted, "a small one would have fitted"
    assert stalled or num_pages > 12
    serving.finish()
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_preempted_sequence_waits_for_its_tokens_in_flight(depth: int) -> None:
    """Another ends at every possible time, so also when its pages come free too early."""
    for output_tokens in range(1, 30):
        serving = Serving(num_pages=15, depth=depth)  # twelve usable
        asked = [
            request("a", range(1, 9), max_tokens=30, ignore_eos=True),
            request("b", range(2, 10), max_tokens=output_tokens, ignore_eos=True),
            request("c", range(3, 11), max_tokens=30, ignore_eos=True),
        ]
        serving.serve(*asked)
        for one in asked:
            assert serving.tokens(one.id) == serving.alone(one)


# -- fairness --------------------------------------------------------------------------------------

BIG_LADDER = ladder(
    decode=[(8, 64), (8, 2048)],
    prefill=[(64, 4, 64), (64, 4, 2048), (256, 2, 2048), (1024, 1, 2048)],
)


def big_serving() -> Serving:
    return Serving(
        page_size=16,
        num_pages=6000,
        max_num_batched_tokens=1024,
        max_model_len=32768,
        buckets=BIG_LADDER,
    )


def test_a_prompt_of_30000_tokens_does_not_starve_decodes() -> None:
    serving = big_serving()
    talking = [request(f"t{i}", [i + 1], max_tokens=100, ignore_eos=True) for i in range(3)]
    for one in talking:
        serving.scheduler.add(one)
    serving.step()
    serving.step()
    serving.scheduler.add(request("long", [3] * 30000, max_tokens=1))
    while "long" not in serving.ended_at:
        step = serving.step()
        assert step is not None
        if any(s.id == "long" for launch in step.launches for s in launch.sequences):
            decoded = {s.id for launch in step.launches for s in launch.sequences}
            assert decoded == {"t0", "t1", "t2", "long"}
    # Little of the budget is lost: 1021 tokens are left of it beside three decodes.
    assert len(serving.steps) < 2 + 30000 / 1000 + 5


def test_short_prompts_pass_long_ones() -> None:
    serving = big_serving()
    for i in range(3):
        serving.scheduler.add(request(f"long{i}", [i + 1] * 6000, max_tokens=1))
    serving.step()
    serving.scheduler.add(request("short", [9] * 60, max_tokens=1))
    for _ in range(2):
        serving.step()
    assert "short" in serving.ended_at
    serving.finish()
    ends = [serving.ended_at[f"long{i}"] for i in range(3)]
    assert ends == sorted(ends)


def test_admission_is_in_order_even_if_a_later_one_would_fit() -> None:
    serving = Serving(num_pages=23)
    serving.scheduler.add(request("holds", range(48), max_tokens=20, ignore_eos=True))
    serving.step()
    serving.scheduler.add(request("large", range(1, 49), max_tokens=1))
    serving.scheduler.add(request("small", [1], max_tokens=1))
    serving.finish()
    assert serving.ended_at["large"] <= serving.ended_at["small"]


def test_what_waiting_prompts_cannot_use_goes_to_the_running_one() -> None:
    serving = Serving(num_pages=40)
    serving.scheduler.add(request("long", range(100), max_tokens=1))
    serving.scheduler.add(request("waits for pages", range(1, 101), max_tokens=1))
    step = serving.step()
    assert step is not None
    assert [s.id for s in step.admitted] == ["long"]
    assert step.num_tokens == 64


def test_admission_leaves_pages_to_grow_into_unless_nobody_runs() -> None:
    serving = Serving(num_pages=23)  # twenty usable
    serving.scheduler.set_limits(dataclasses.replace(serving.limits, watermark=0.5))
    serving.scheduler.add(request("fills most", range(60), max_tokens=1))
    serving.scheduler.add(request("small", [1], max_tokens=1))
    first = serving.step()
    assert first is not None
    assert [s.id for s in first.admitted] == ["fills most"]
    serving.finish()
    assert serving.ended_at["fills most"] < serving.ended_at["small"]


# -- refusals, limits, changes while serving -------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "names", "param"),
    [
        (0, 1, "no tokens", "prompt"),
        (96, None, "max_model_len", "prompt"),
        (97, 0, "max_model_len", "prompt"),
        (90, 7, "max_model_len", "max_tokens"),
    ],
)
def test_requests_that_never_fit_are_refused(
    prompt_tokens: int, max_tokens: int | None, names: str, param: str
) -> None:
    serving = Serving(max_model_len=96)
    with pytest.raises(RequestError, match=names) as caught:
        serving.scheduler.add(request("a", [1] * prompt_tokens, max_tokens=max_tokens))
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert not serving.scheduler.has_work


def test_what_the_pages_cannot_hold_is_refused_and_the_limit_itself_served() -> None:
    serving = Serving(num_pages=13)  # ten usable pages, forty tokens, and the last is not written
    with pytest.raises(RequestError, match="KV cache holds 41"):
        serving.scheduler.add(request("a", [1] * 20, max_tokens=22))
    with pytest.raises(RequestError, match="KV cache holds 40"):
        serving.scheduler.add(request("a", [1] * 41, max_tokens=0))
    fits = request("a", [1] * 20, max_tokens=21, ignore_eos=True)
    serving.serve(fits)
    assert serving.tokens("a") == serving.alone(fits)


def test_the_queue_is_bounded() -> None:
    serving = Serving()
    serving.scheduler.set_limits(dataclasses.replace(serving.limits, max_queued_requests=2))
    serving.scheduler.add(request("a", [1]))
    serving.scheduler.add(request("b", [1]))
    with pytest.raises(RequestError, match="max_queued_requests") as caught:
        serving.scheduler.add(request("c", [1]))
    assert caught.value.status == 503
    with pytest.raises(RequestError, match="'a'"):
        serving.scheduler.add(request("a", [1]))
    serving.finish()
    serving.serve(request("c", [1]))


def test_abort_frees_slot_and_pages_for_the_next_step() -> None:
    serving = Serving(num_slots=1)
    serving.scheduler.add(request("a", range(1, 9), max_tokens=50, ignore_eos=True))
    for _ in range(5):
        serving.step()
    serving.scheduler.add(request("b", [4, 5], max_tokens=2, ignore_eos=True))
    serving.scheduler.abort("a")
    serving.scheduler.abort("never heard of")
    assert serving.allocator.usage == 0.0
    step = serving.step()
    assert step is not None
    assert [s.id for s in step.admitted] == ["b"]
    serving.finish()
    assert serving.reason("a") is None, "nothing is reported of an aborted request"
    assert len(serving.tokens("b")) == 2


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"max_num_seqs": 9}, "restart"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"max_model_len": 257}, "extend the ladder"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_impossible_limits_are_refused_and_change_nothing(
    changes: dict[str, int], names: str
) -> None:
    serving = Serving()
    with pytest.raises(ConfigError, match=names):
        serving.scheduler.set_limits(dataclasses.replace(serving.limits, **changes))
    assert serving.scheduler.limits is serving.limits


def test_limits_and_ladder_change_while_serving() -> None:
    serving = Serving(max_model_len=120)
    asked = [request(f"r{i}", [i + 1] * 20, max_tokens=90, ignore_eos=True) for i in range(4)]
    for one in asked:
        serving.scheduler.add(one)
    for _ in range(6):
        serving.step()
    smaller = dataclasses.replace(
        serving.limits, max_num_seqs=2, max_num_batched_tokens=2, max_model_len=24
    )
    serving.scheduler.set_limits(smaller)
    with pytest.raises(RequestError, match="max_model_len"):
        serving.scheduler.add(request("late", [1] * 20, max_tokens=5))
    too_short = ladder(decode=[(8, 8)], prefill=[(8, 1, 8)])
    with pytest.raises(ConfigError, match="lower --max_model_len"):
        serving.scheduler.set_ladder(too_short)  # those being served are longer
    serving.scheduler.set_ladder(ladder(decode=[(2, 30)], prefill=[(8, 1, 30)]))
    serving.limits = smaller
    serving.finish()
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)
    serving.scheduler.set_ladder(too_short)
    serving.serve(request("late", [1] * 20, max_tokens=4))


def test_decodes_are_split_where_no_bucket_holds_them_all() -> None:
    serving = Serving(
        buckets=ladder(decode=[(4, 4), (2, 32)], prefill=[(16, 4, 32)]), max_model_len=96
    )
    asked = [
        request(f"r{i}", [i + 1] * (70 if i % 2 else 3), max_tokens=4, ignore_eos=True)
        for i in range(8)
    ]
    serving.serve(*asked)
    assert any(sum(launch.decode for launch in step.launches) > 1 for step in serving.steps)
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)


# -- sampling needs and logprobs -------------------------------------------------------------------


def test_a_launch_needs_the_most_that_a_row_needs() -> None:
    def kinds(*params: dict[str, Any]) -> set[SamplerKind]:
        serving = Serving()
        asked = [
            request(f"r{i}", [i + 1], ignore_eos=True, **fields) for i, fields in enumerate(params)
        ]
        serving.serve(*asked)
        return {launch.sampler for step in serving.steps for launch in step.launches}

    greedy: dict[str, Any] = {}
    warm: dict[str, Any] = {"temperature": 0.5}
    assert kinds(greedy) == {SamplerKind.GREEDY}
    assert kinds(greedy, warm) == {SamplerKind.GUMBEL}
    for field in ({"top_k": 5}, {"top_p": 0.5}, {"presence_penalty": 1.0}, {"logprobs": 0}):
        assert kinds(greedy, warm, {**warm, **field}) == {SamplerKind.FULL}


def test_logprobs_go_to_those_who_asked() -> None:
    serving = Serving()
    serving.serve(request("asks", [1, 2], logprobs=3), request("does not", [3, 4]))
    launches = [launch for step in serving.steps for launch in step.launches]
    assert {launch.num_logprobs for launch in launches} == {3}
    assert all(output.logprobs is None for output in serving.outputs["does not"])
    for output in serving.outputs["asks"]:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids


@pytest.mark.parametrize("num_pages", [64, 23])
def test_prompt_logprobs_are_complete_despite_chunks_cache_and_preemption(num_pages: int) -> None:
    serving = Serving(num_pages=num_pages, max_num_batched_tokens=16)
    serving.serve(request("warms the cache", range(1, 41), max_tokens=1))
    asked = [request("asks", range(1, 41), prompt_logprobs=0, max_tokens=30, ignore_eos=True)]
    asked += [
        request(f"r{i}", range(i, i + 20), max_tokens=30, ignore_eos=True, priority=-1)
        for i in range(3)
    ]
    serving.serve(*asked)
    if num_pages == 23:
        assert serving.scheduler.counters.preemptions
    assert prompt_logprobs(serving, "asks") == [None, *range(2, 41)]
    assert all(output.prompt_logprobs is None for output in serving.outputs["asks"][1:])
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)


def test_prompt_logprobs_are_complete_a_token_at_a_time() -> None:
    serving = Serving(num_slots=1, max_num_batched_tokens=1)
    serving.serve(request("a", range(1, 8), prompt_logprobs=0))
    assert prompt_logprobs(serving, "a") == [None, *range(2, 8)]


def test_the_first_output_tells_of_cached_tokens() -> None:
    serving = Serving()
    serving.serve(request("a", range(1, 42)))
    serving.serve(request("b", range(1, 42)))
    assert serving.outputs["a"][0].cached_tokens == 0
    assert serving.outputs["b"][0].cached_tokens == 40
    assert all(output.cached_tokens == 0 for output in serving.outputs["b"][1:])
    counters = serving.scheduler.counters
    assert (counters.prefix_queries_tokens, counters.prefix_hits_tokens) == (82, 40)
    assert counters.prompt_tokens == 82
    assert counters.generation_tokens == len(serving.tokens("a")) + len(serving.tokens("b"))


@pytest.mark.parametrize("page_size", [4, 16])
def test_prefix_hits_at_every_length_around_page_boundaries_change_no_token(page_size: int) -> None:
    for length in range(1, 2 * page_size + 3):
        serving = Serving(page_size=page_size)
        serving.serve(request("first", range(1, length + 1)))
        for more in (0, 1):
            again = request(f"again{more}", range(1, length + more + 1))
            serving.serve(again)
            assert serving.tokens(again.id) == serving.alone(again)
            cached = serving.outputs[again.id][0].cached_tokens
            assert cached == (length + more - 1) // page_size * page_size


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_was_generated_is_a_prefix_for_the_next_turn(depth: int) -> None:
    for output_tokens in range(1, 14):
        serving = Serving(depth=depth)
        first = request("first turn", range(1, 8), max_tokens=output_tokens, ignore_eos=True)
        serving.serve(first)
        written = 7 + output_tokens - 1
        turn = request("second turn", [*range(1, 8), *serving.tokens("first turn"), 5])
        serving.serve(turn)
        assert serving.outputs["second turn"][0].cached_tokens == written // 4 * 4
        assert serving.tokens("second turn") == serving.alone(turn)


def test_what_is_being_generated_is_a_prefix_for_others() -> None:
    serving = Serving()
    first = serving.scheduler.add(request("a", range(1, 8), max_tokens=60, ignore_eos=True))
    for _ in range(20):
        serving.step()
    known = list(first.token_ids)
    assert len(known) > 20
    serving.scheduler.add(request("b", [*known, 5]))
    serving.finish()
    assert serving.outputs["b"][0].cached_tokens == len(known) // 4 * 4


def test_a_prefix_can_be_used_by_the_step_after_the_one_that_computes_it() -> None:
    serving = Serving()
    serving.scheduler.add(request("a", range(1, 42)))
    serving.step()
    assert serving.in_flight, "nothing is known of the first step yet"
    again = request("b", range(1, 42))
    serving.serve(again)
    assert serving.outputs["b"][0].cached_tokens == 40
    assert serving.tokens("b") == serving.tokens("a") == serving.alone(again)


# -- failed steps ----------------------------------------------------------------------------------


@given(fail_at=st.sets(st.integers(0, 80), max_size=8), num_pages=st.sampled_from([24, 64]))
@settings(max_examples=20, deadline=None)
def test_a_failed_step_costs_time_only(fail_at: set[int], num_pages: int) -> None:
    """Unless the next one fails, too, that one of its sequences is in."""
    serving = Serving(num_pages=num_pages)
    asked = [request(f"r{i}", range(i, i + 15), max_tokens=25) for i in range(5)]
    for one in asked:
        serving.scheduler.add(one)
    while serving.scheduler.has_work:
        cleared = not any(s.failed_steps for s in (*serving.running, *serving.waiting))
        if len(serving.steps) in fail_at and serving.in_flight and cleared:
            assert serving.fail() == []
        serving.step()
    for one in asked:
        assert serving.tokens(one.id) == serving.alone(one)


def test_the_request_to_blame_for_failing_steps_ends_and_no_other() -> None:
    serving = Serving()
    asked = [request(f"r{i}", range(i, i + 15), max_tokens=12) for i in range(6)]
    for one in asked:
        serving.scheduler.add(one)
    failures = 0
    while serving.scheduler.has_work:
        step = serving.step()
        if step and any(s.id == "r3" for launch in step.launches for s in launch.sequences):
            serving.keep(serving.fail())
            failures += 1
    assert failures == 2
    assert serving.outputs["r3"][-1].finish_reason is FinishReason.ERROR
    assert serving.outputs["r3"][-1].error == "scripted"
    for one in asked:
        if one.id != "r3":
            assert serving.tokens(one.id) == serving.alone(one)


def test_steps_are_committed_in_order_and_once() -> None:
    serving = Serving(depth=2)
    serving.scheduler.add(request("a", [1, 2, 3], max_tokens=20))
    serving.step()
    serving.step()
    (first, results), (second, second_results) = serving.in_flight
    with pytest.raises(ValueError, match="oldest"):
        serving.scheduler.commit(second, second_results)
    serving.scheduler.commit(first, results)
    with pytest.raises(ValueError, match="oldest"):
        serving.scheduler.commit(first, results)
    with pytest.raises(ValueError, match="not in flight"):
        serving.scheduler.fail_step(first, "too late")
