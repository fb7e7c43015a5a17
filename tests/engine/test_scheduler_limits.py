"""What is refused, and what may change while requests are served."""

from __future__ import annotations

import dataclasses

import pytest

from polyjax.core.errors import ConfigError, RequestError
from tests.engine.paged_device import (
    ladder,
)
from tests.engine.scheduling import Serving, request

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
