"""Pages run out, long prompts arrive, steps fail: who waits, who is preempted, who ends."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyjax.engine.types import FinishReason
from tests.engine.paged_device import (
    ladder,
    window_group,
)
from tests.engine.scheduling import Serving, request

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
