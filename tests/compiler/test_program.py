"""Step programs: what they donate, what their ABI says, which kernels are in them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler.abi import StateABI
from polyjax.compiler.program import Kind, StepProgram, compile_program, expected_abi
from polyjax.compiler.state import StateSpec
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
    kv, last_tokens, *_ = decode(state.params, state.kv, state.last_tokens, one_row(5))
    assert all(pool.is_deleted() for pool, _ in before)
    assert state.last_tokens.is_deleted()
    assert [pool.unsafe_buffer_pointer() for pool in kv] == [pointer for _, pointer in before]
    assert [p.unsafe_buffer_pointer() for p in state.params] == kept
    written = np.asarray(kv[0])
    assert np.flatnonzero(np.abs(written).sum(axis=(1, 2, 3, 4))).tolist() == [3]
    assert np.abs(written[3, :, :, 1:]).sum() == 0  # one slot of one page, nothing else
    assert np.asarray(last_tokens)[0] != 0


def page_lists(spec: StateSpec, *pages: int) -> np.ndarray:
    lists = np.zeros((1, spec.scratch_pages), np.int32)
    lists[0, : len(pages)] = pages
    return lists


@pytest.fixture(scope="module")
def pages() -> dict[Kind, StepProgram]:
    kinds = (Kind.COPY_PAGES, Kind.COMPARE_PAGES)
    mesh = DECODE.plan.mesh.mesh()
    return {kind: compile_program(tiny_llama.request(kind), mesh) for kind in kinds}


def test_pages_are_copied_in_place(pages: dict[Kind, StepProgram]) -> None:
    state = fresh_state()
    state.kv = tuple(jnp.arange(p.size, dtype=p.dtype).reshape(p.shape) for p in state.kv)
    before = [np.array(pool) for pool in state.kv]
    pointers = [pool.unsafe_buffer_pointer() for pool in state.kv]
    source, target = page_lists(DECODE.spec, 2, 3), page_lists(DECODE.spec, 9, 8)
    state.kv = pages[Kind.COPY_PAGES](state.kv, source, target)
    assert [pool.unsafe_buffer_pointer() for pool in state.kv] == pointers
    for was, pool in zip(before, state.kv, strict=True):
        expected = was.copy()
        expected[[9, 8]] = was[[2, 3]]
        np.testing.assert_array_equal(np.asarray(pool), expected)


def test_pages_are_compared_where_theirs_are_finite(pages: dict[Kind, StepProgram]) -> None:
    state = fresh_state()
    pools = [np.zeros(pool.shape, np.float32) for pool in state.kv]
    pools[0][2], pools[0][3] = 4.0, 5.0  # ours
    pools[0][8], pools[0][9] = 4.0, -6.0  # theirs
    pools[1][2, 0, 0, 0, 0] = np.nan  # ours alone
    pools[1][3, 0, 0, 0, 0] = pools[1][9, 0, 0, 0, 0] = np.nan  # in both: nothing to compare
    pools[0][0] = 100.0  # the sink is padding
    kv = tuple(jnp.asarray(pool) for pool in pools)
    ours, theirs = page_lists(DECODE.spec, 2, 3), page_lists(DECODE.spec, 8, 9)
    found = np.asarray(pages[Kind.COMPARE_PAGES](kv, ours, theirs))
    np.testing.assert_array_equal(found, [[11.0, 6.0, 0.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize("kind", [Kind.DECODE_GREEDY, Kind.COPY_PAGES])
def test_no_program_copies_the_pool(
    decode: StepProgram, pages: dict[Kind, StepProgram], kind: Kind
) -> None:
    program = decode if kind is Kind.DECODE_GREEDY else pages[kind]
    shape = ",".join(map(str, fresh_state().kv[0].shape))
    text = program.executable.as_text()
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
