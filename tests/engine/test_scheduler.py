"""Whatever else is served, a request gets what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.core.errors import RequestError
from polyjax.core.kv import KVGroup
from polyjax.engine.sequence import SamplerKind
from polyjax.engine.types import FinishReason, Request
from tests.engine.paged_device import (
    full_group,
    window_group,
)
from tests.engine.scheduling import EOS, SMALL_LADDER, VOCAB, Serving, prompt_logprobs, request

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
