"""The equivalence gate lets equal programs pass and refuses wrong ones, on scratch state only."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler.program import Kind, ProgramKey, StepProgram, compile_program
from polyjax.core.buckets import Bucket
from polyjax.engine.state import DeviceState
from polyjax.gates.equivalence import EquivalenceGate, forward_bound
from polyjax.gates.verdict import Verdict
from tests import tiny_llama

SPEC = tiny_llama.spec(num_pages=40)
KEYS = (
    ProgramKey(Kind.PREFILL, Bucket(16, 1, 8)),
    ProgramKey(Kind.DECODE_GREEDY, Bucket(1, 2, 8)),
    ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, 2, 0)),
    ProgramKey(Kind.SAMPLE_GUMBEL, Bucket(1, 2, 0)),
    ProgramKey(Kind.SAMPLE_FULL, Bucket(1, 2, 0)),
    ProgramKey(Kind.SCORE, Bucket(2, 1, 0)),
    ProgramKey(Kind.ADMIT),
    ProgramKey(Kind.READ_SCRATCH),
    ProgramKey(Kind.COPY_PAGES),
    ProgramKey(Kind.COMPARE_PAGES),
)
PREFILL, DECODE, GREEDY, GUMBEL, FULL, SCORE, ADMIT, READ, COPY, COMPARE = KEYS


@pytest.fixture(scope="module")
def programs() -> dict[ProgramKey, StepProgram]:
    made = {}
    for key in KEYS:
        request = tiny_llama.request(key.kind, key.bucket, spec=SPEC)
        made[key] = compile_program(request, request.plan.mesh.mesh())
    return made


@pytest.fixture
def state() -> DeviceState:
    plan = tiny_llama.request(Kind.ADMIT).plan
    made = DeviceState(SPEC, plan.mesh, plan.mesh.mesh(), tiny_llama.small_weights())
    made.kv = tuple(jnp.full(pool.shape, 7.0) for pool in made.kv)
    return made


def check(
    programs: dict[ProgramKey, StepProgram], state: DeviceState, candidate: StepProgram
) -> Verdict:
    return EquivalenceGate(SPEC, state, programs, seed=3).check(candidate)


def wrapped(program: StepProgram, wrap: Callable[..., Any]) -> StepProgram:
    """The program with `wrap(run, *args)` in its place."""
    run = program.executable
    executable: Any = lambda *args: wrap(run, *args)  # noqa: E731
    return dataclasses.replace(program, executable=executable)


def test_a_smaller_bucket_reads_what_the_larger_one_reads(
    programs: dict[ProgramKey, StepProgram], state: DeviceState
) -> None:
    """Rows lie on the same pages in both, whatever earlier checks left there."""
    key = ProgramKey(Kind.DECODE_GREEDY, Bucket(1, 4, 8))
    mesh = tiny_llama.request(Kind.ADMIT).plan.mesh.mesh()
    larger = compile_program(tiny_llama.request(key.kind, key.bucket, spec=SPEC), mesh)
    score = ProgramKey(Kind.SCORE, Bucket(4, 1, 0))
    scores = compile_program(tiny_llama.request(score.kind, score.bucket, spec=SPEC), mesh)
    in_force = {k: p for k, p in programs.items() if k != DECODE} | {key: larger, score: scores}
    gate = EquivalenceGate(SPEC, state, in_force, seed=3)
    for candidate in (larger, programs[DECODE], larger, programs[DECODE]):
        verdict = gate.check(candidate)
        assert verdict.passed, verdict.reason


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_program_equals_itself(
    programs: dict[ProgramKey, StepProgram], state: DeviceState, key: ProgramKey
) -> None:
    verdict = check(programs, state, programs[key])
    assert verdict.passed, verdict.reason
    assert verdict.evidence["program"] == str(key)
    usable = SPEC.num_pages[0] - SPEC.scratch_pages
    for pool in state.kv:  # the sink page may be written, those of sequences may not
        assert (np.asarray(pool)[1:usable] == 7.0).all()
    assert (np.asarray(state.last_tokens)[: SPEC.num_slots] == 0).all()
    assert (np.asarray(state.sampling.output_counts)[: SPEC.num_slots] == 0).all()


def test_scores_that_ignore_their_mask_are_refused(
    programs: dict[ProgramKey, StepProgram], state: DeviceState
) -> None:
    def unmasked(run: Any, *args: Any) -> Any:
        return run(*args[:-1], np.full_like(args[-1], -1))

    verdict = check(programs, state, wrapped(programs[SCORE], unmasked))
    assert not verdict.passed
    assert "log-probabilities" in verdict.reason


def scaled_weights(run: Any, params: Any, *rest: Any) -> Any:
    return run((*params[:3], params[3] * 1.02, *params[4:]), *rest)


def scaled_kv(run: Any, *args: Any) -> Any:
    kv, *rest = run(*args)
    return (kv[0] * 1.01, *kv[1:]), *rest


def nan_hidden(run: Any, *args: Any) -> Any:
    *rest, hidden, following = run(*args)
    return *rest, hidden.at[0, 0].set(jnp.nan), following


def nothing_written(run: Any, params: Any, kv: Any, *rest: Any) -> Any:
    before = tuple(jnp.array(pool, copy=True) for pool in kv)
    return before, *run(params, kv, *rest)[1:]


def constant_token(run: Any, *args: Any) -> Any:
    kv, last_tokens, tokens, *rest = run(*args)
    return kv, last_tokens, jnp.full_like(tokens, 9), *rest


def one_row_short(run: Any, *args: Any) -> Any:
    *rest, hidden, following = run(*args)
    return *rest, hidden[:1], following


def next_batch_stale(run: Any, *args: Any) -> Any:
    *rest, _ = run(*args)
    return *rest, jnp.asarray(args[3])


@pytest.mark.parametrize(
    ("key", "mutant", "reason"),
    [
        (PREFILL, scaled_weights, "last hidden state"),
        (DECODE, scaled_weights, "last hidden state"),
        (DECODE, scaled_kv, "last hidden state"),  # context included, which the reference reads
        (DECODE, nan_hidden, "finite"),
        (DECODE, nothing_written, "KV pages of layer 0"),
        (PREFILL, nothing_written, "KV pages of layer 0"),
        (DECODE, constant_token, "decode_greedy"),
        (DECODE, one_row_short, "shape"),
        (DECODE, next_batch_stale, "one token further"),
    ],
)
def test_wrong_forward_programs_are_refused(
    programs: dict[ProgramKey, StepProgram],
    state: DeviceState,
    key: ProgramKey,
    mutant: Callable[..., Any],
    reason: str,
) -> None:
    verdict = check(programs, state, wrapped(programs[key], mutant))
    assert not verdict.passed
    assert reason in verdict.reason


def second_best(run: Any, *args: Any) -> Any:
    *rest, tokens = run(*args)
    return *rest, (tokens + 1) % tiny_llama.VOCAB


def scores_halved(run: Any, head: Any, hidden: Any, *rest: Any) -> Any:
    bits = jax.lax.bitcast_convert_type
    scores = run(head, hidden, *rest)
    own = bits(bits(scores[:, 0], jnp.float32) * 0.5, jnp.int32)
    return scores.at[:, 0].set(own)


def forgets_bias(run: Any, sampling: Any, slot: Any, row: Any) -> Any:
    after = run(sampling, slot, row)
    return dataclasses.replace(after, bias_values=after.bias_values + 1)


@pytest.mark.parametrize(
    ("key", "mutant"),
    [
        (GREEDY, second_best),
        (GUMBEL, second_best),
        (FULL, second_best),
        (SCORE, scores_halved),
        (ADMIT, forgets_bias),
        (READ, lambda run, kv: tuple(pool + 1 for pool in run(kv))),
        (COPY, lambda run, kv, source, target: kv),
        (COPY, lambda run, kv, source, target: run(kv, source, target[:, ::-1])),
        (COMPARE, lambda run, kv, ours, theirs: run(kv, ours, ours)),
    ],
)
def test_other_wrong_programs_are_refused(
    programs: dict[ProgramKey, StepProgram],
    state: DeviceState,
    key: ProgramKey,
    mutant: Callable[..., Any],
) -> None:
    verdict = check(programs, state, wrapped(programs[key], mutant))
    assert not verdict.passed
    assert str(key) in verdict.reason


def test_a_new_bucket_is_compared_with_a_larger_one(
    programs: dict[ProgramKey, StepProgram], state: DeviceState
) -> None:
    small = tiny_llama.request(Kind.PREFILL, Bucket(8, 1, 4), spec=SPEC)
    candidate = compile_program(small, small.plan.mesh.mesh())
    verdict = check(programs, state, candidate)
    assert verdict.passed, verdict.reason
    assert verdict.evidence["reference"] == str(PREFILL)
    assert not check(programs, state, wrapped(candidate, scaled_weights)).passed
    wide = dataclasses.replace(candidate, key=ProgramKey(Kind.PREFILL, Bucket(99, 1, 4)))
    assert "no program in force is large enough" in check(programs, state, wide).reason


def test_the_bound_follows_dtype_and_depth() -> None:
    low = dataclasses.replace(SPEC, dtype="bfloat16")
    assert forward_bound(SPEC) < 1e-3 < forward_bound(low) < 1.0
