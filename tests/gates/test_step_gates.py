"""Step-level gates on the twin: the plan's program passes, each kind of harm is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.gates import step_history, step_isolation, step_presence
from polyjax.gates.candidate import GateFailure
from polyjax.gates.step_candidate import SplitSchedule, candidate_key, candidate_program
from polyjax.gates.step_trial import StepTrial
from polyjax.gates.step_twin import random_state, reference_programs, twin_spec


@pytest.fixture(scope="module")
def twin():
    spec = twin_spec()
    programs = reference_programs(spec)
    key = candidate_key("decode_greedy", programs)
    return spec, programs, key, candidate_program(spec, programs[key], SplitSchedule(8))


def trial(twin, executable=None, seed=0, **changes):
    spec, programs, key, candidate = twin
    if executable is not None:
        changes["executable"] = executable(candidate)
    state = random_state(spec, np.random.default_rng(seed))
    return StepTrial(dataclasses.replace(candidate, **changes), key, programs, state, seed)


@pytest.mark.parametrize("gate", [step_presence, step_isolation, step_history])
def test_a_program_with_another_order_of_sums_passes(twin, gate):
    evidence = gate.check(trial(twin))
    assert evidence.get("worst_error_over_bound", 0.0) < 1.0


def test_the_kernel_must_be_in_the_executable(twin):
    assert step_presence.check(trial(twin))["kernels"] == ["plain.matmul"]
    _, programs, key, _ = twin
    with pytest.raises(GateFailure, match=r"plain\.matmul is not in the compiled program"):
        step_presence.check(trial(twin, executable=lambda _: programs[key].executable))


def test_a_pool_in_other_memory_is_named(twin):
    def copied(program):
        def run(*args):
            pools, *rest = program(*args)
            return tuple(jnp.copy(pool) for pool in pools), *rest

        return run

    with pytest.raises(GateFailure, match="own memory"):
        step_isolation.check(trial(twin, copied))


def test_a_slot_that_nobody_owns_must_keep_its_bits(twin):
    def spilling(program):
        def run(params, kv, last_tokens, flat):
            first = kv[0].at[0, 0, 0, 1].add(1.0)
            return program(params, (first, *kv[1:]), last_tokens, flat)

        return run

    with pytest.raises(GateFailure, match=r"own memory|slot 1 of page 0"):
        step_isolation.check(trial(twin, spilling))


def test_late_harm_is_found(twin):
    calls = iter(range(10_000))

    def late(program):
        def run(*args):
            pools, stored, tokens, hidden, following = program(*args)
            return pools, stored, tokens, hidden * (1.01 if next(calls) > 45 else 1.0), following

        return run

    with pytest.raises(GateFailure, match=r"step \d+: hidden state"):
        step_history.check(trial(twin, late))
