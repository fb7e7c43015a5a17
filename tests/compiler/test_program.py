"""Step programs: what they donate, what their ABI says, which kernels are in them."""

import dataclasses

import jax
import numpy as np
import pytest

from polyjax.compiler.abi import StateABI
from polyjax.compiler.program import Kind, StepProgram, compile_program, expected_abi
from polyjax.core.batch_layout import SAMPLES, BatchLayout
from polyjax.core.buckets import Bucket
from polyjax.core.errors import StateABIError
from polyjax.core.mesh import MeshPlan
from polyjax.engine.state import DeviceState
from tests import tiny_llama

DECODE = tiny_llama.request(Kind.DECODE_GREEDY, Bucket(1, 1, 4))


@pytest.fixture(scope="module")
def decode() -> StepProgram:
    return compile_program(DECODE, DECODE.plan.mesh.mesh())


def fresh_state() -> DeviceState:
    params = tuple(jax.device_put(p, jax.devices()[0]) for p in tiny_llama.small_weights())
    return DeviceState(DECODE.spec, DECODE.plan.mesh, DECODE.plan.mesh.mesh(), params)


def one_row(token: int) -> np.ndarray:
    layout = BatchLayout(DECODE.key.bucket, 1)
    flat = np.zeros(layout.size, np.int32)
    batch = layout.split(flat)
    batch.tokens[0, 0], batch.query_lens[0], batch.context_lens[0] = token, 1, 1
    batch.flags[0], batch.page_tables[0, 0, 0] = SAMPLES, 3
    return flat


def test_the_pool_is_donated_and_updated_in_place(decode: StepProgram) -> None:
    state = fresh_state()
    before = [(pool, pool.unsafe_buffer_pointer()) for pool in state.kv]
    kept = [p.unsafe_buffer_pointer() for p in state.params]
    kv, last_tokens, _, _ = decode(state.params, state.kv, state.last_tokens, one_row(5))
    assert all(pool.is_deleted() for pool, _ in before)
    assert state.last_tokens.is_deleted()
    assert [pool.unsafe_buffer_pointer() for pool in kv] == [pointer for _, pointer in before]
    assert [p.unsafe_buffer_pointer() for p in state.params] == kept
    written = np.asarray(kv[0])
    assert np.flatnonzero(np.abs(written).sum(axis=(1, 2, 3, 4))).tolist() == [3]
    assert np.abs(written[3, :, :, 1:]).sum() == 0  # one slot of one page, nothing else
    assert np.asarray(last_tokens)[0] != 0


def test_no_program_copies_the_pool(decode: StepProgram) -> None:
    shape = ",".join(map(str, fresh_state().kv[0].shape))
    text = decode.executable.as_text()
    assert text is not None
    copies = [line for line in text.splitlines() if " copy(" in line]
    assert "fusion(" in text  # it is the optimised program
    assert not [line for line in copies if f"f32[{shape}]" in line.split("copy(")[0]]


def test_the_abi_of_a_program_is_that_of_the_state(decode: StepProgram) -> None:
    mesh = DECODE.plan.mesh.mesh()
    expected = expected_abi(DECODE, mesh)
    expected.check(decode.abi)
    assert expected.digest == decode.abi.digest
    donated = {name for name, line in decode.abi.lines if line.endswith("donated")}
    assert donated == {"kv.0", "kv.1", "last_tokens"}


def test_another_state_is_refused_with_the_difference_spelled_out(decode: StepProgram) -> None:
    mesh = DECODE.plan.mesh.mesh()
    larger = dataclasses.replace(DECODE, spec=tiny_llama.spec(num_pages=16))
    with pytest.raises(StateABIError) as refused:
        expected_abi(larger, mesh).check(decode.abi)
    assert len(refused.value.differences) == 2
    assert "kv.0: the engine holds float32[16,2,8,8,8]" in str(refused.value)
    assert "the program takes float32[12,2,8,8,8]" in str(refused.value)


def test_a_program_that_donates_less_is_refused(decode: StepProgram) -> None:
    keeps = StateABI(
        tuple((name, line.replace("donated", "kept")) for name, line in decode.abi.lines)
    )
    with pytest.raises(StateABIError, match=r"last_tokens.*donated.*kept"):
        expected_abi(DECODE, DECODE.plan.mesh.mesh()).check(keeps)


def test_sharding_is_part_of_the_abi() -> None:
    two = tiny_llama.request(Kind.DECODE_GREEDY, Bucket(1, 1, 4), mesh=MeshPlan(model=2))
    one, sharded = (
        expected_abi(DECODE, DECODE.plan.mesh.mesh()),
        expected_abi(two, two.plan.mesh.mesh()),
    )
    assert one.digest != sharded.digest
    with pytest.raises(StateABIError, match="over 2 devices"):
        one.check(sharded)


def test_used_lists_the_ops_of_the_step(decode: StepProgram) -> None:
    names = [key.partition("[")[0] for key, _ in decode.used]
    assert names.count("paged_attention") == 2
    assert names[-4:].count("lm_head_sample") == 1
    assert {kernel for _, kernel in decode.used} == {"reference"}
