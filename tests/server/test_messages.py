"""What the engine process says arrives at the HTTP process as it was."""

from hypothesis import given
from hypothesis import strategies as st

from polyjax.engine import messages
from polyjax.engine.types import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

tokens = st.integers(0, 2**31 - 1)
scores = st.builds(
    TokenLogprobs, tokens, st.floats(-50, 0), tokens, st.lists(st.tuples(tokens, st.floats(-50, 0)))
)
outputs = st.builds(
    RequestOutput,
    request_id=st.text(max_size=8),
    token_ids=st.lists(tokens, max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_reason=st.none() | tokens,
    logprobs=st.none() | st.lists(scores, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | scores, max_size=2),
    cached_tokens=st.integers(0, 100),
    epoch=st.integers(0, 3),
    scheduled_s=st.sampled_from([0.0, 1.5]),
    error=st.none() | st.text(max_size=8),
    error_param=st.none() | st.text(max_size=8),
)
plain = st.builds(
    RequestOutput, st.text(max_size=8), st.lists(tokens, min_size=1, max_size=1), epoch=st.just(2)
)


@given(st.lists(outputs | plain, max_size=8, unique_by=lambda output: output.request_id))
def test_outputs_of_a_step(step: list[RequestOutput]) -> None:
    payload = messages.encode(messages.pack_outputs(step))
    packed = messages.decode_from_engine(payload)
    assert isinstance(packed, messages.StepOutputs)
    received = {output.request_id: output for output in messages.unpack_outputs(packed)}
    assert received == {output.request_id: output for output in step}


def test_plain_outputs_are_packed_tightly() -> None:
    step = [RequestOutput(f"{i:x}", [i], epoch=1) for i in range(256)]
    assert len(messages.encode(messages.pack_outputs(step))) < 256 * 10


def test_requests() -> None:
    params = SamplingParams(stop=("a",), logit_bias=((3, 1.5),), seed=-(2**63), temperature=0.5)
    request = Request("id", [1, 2, 3], params, 12.5, -3, "salt")
    decoded = messages.decode_to_engine(messages.encode(messages.Add(request)))
    assert decoded == messages.Add(request)
