"""Chains compute the op, whatever it writes in place; digests tell machine code apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.compiler.program import bypass_jax_cache
from polyjax.core.op import REFERENCE
from polyjax.core.ops import OPS
from polyjax.gates import trial
from polyjax.gates.candidate import GateFailure
from polyjax.gates.inputs import in_dtype, make_case, rng_of
from polyjax.gates.op_bounds import expected, truth
from polyjax.gates.small_workloads import small_workload
from search.chains import chain_arguments, chained, plan_chain
from search.compile_jobs import OpCandidate, op_function
from search.digests import executable_digest, joint_digest
from search.kernels import kernel_named, kernels_for
from search.op_bench import OpBench, OpSetup
from search.targets import OpTarget, form_space, tunable

QUICK = ("matmul", "kv_write", "paged_attention", "lm_head_sample")


def chain_agrees(name):
    op, workload = OPS[name], in_dtype(small_workload(name), "float32")
    case = make_case(op, workload, rng_of(workload, 1), "random", "full_pool")
    call = op_function(OpCandidate(workload, form="reference"), "cpu")
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.args)
    static = dict(workload.static)
    results = jax.eval_shape(lambda *a: op.reference(REFERENCE, *a, **static), *avals)
    spec = plan_chain(avals, jax.tree.leaves(results), cold_bytes=1)
    assert spec.links == 2
    run = jax.jit(chained(call, spec))
    found = jax.tree.map(np.asarray, run(*chain_arguments(case.args, spec)))
    trial.judge_results(case, found, truth(case))
    return spec


@pytest.mark.parametrize("name", QUICK)
def test_the_last_call_of_a_chain_gives_the_op(name):
    spec = chain_agrees(name)
    assert bool(spec.carried) == (name == "kv_write")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(OPS) - set(QUICK)))
def test_the_last_call_of_every_ops_chain_gives_the_op(name):
    chain_agrees(name)


@pytest.mark.parametrize(("name", "derived"), [("matmul", 1), ("route", 2)])
def test_what_results_must_be_is_derived_once_unless_it_depends_on_them(name, derived, monkeypatch):
    workload, calls = in_dtype(small_workload(name), "float32"), []
    case = make_case(OPS[name], workload, rng_of(workload, 1), "random", "full_pool")
    counted = lambda *args: calls.append(1) or expected(*args)  # noqa: E731
    monkeypatch.setattr(trial, "expected", counted)
    wanted = truth(case)
    known = trial.KnownResults(case, wanted)
    right = [leaf.astype(np.int32 if leaf.dtype == int else leaf.dtype) for leaf in wanted]
    assert known.judge(right) <= 1 and known.judge(right) <= 1
    assert len(calls) == derived
    with pytest.raises(GateFailure, match=name):
        known.judge([leaf + 1 for leaf in right])


def test_digests_follow_the_code_and_not_the_names():
    bypass_jax_cache()  # as compile jobs do: what comes out of that cache lacks its code

    def compiled(function, **options):
        return jax.jit(function).lower(jnp.ones((32, 32))).compile(options or None)

    def one(x):
        return jnp.tanh(x) @ x

    def same_with_another_name(y):
        return jnp.tanh(y) @ y

    first = executable_digest(compiled(one), {})
    assert executable_digest(compiled(same_with_another_name), {}) != executable_digest(
        compiled(lambda x: jnp.tanh(x) + x), {}
    )
    assert first == executable_digest(compiled(one), {"xla_backend_optimization_level": "3"})
    lower = {"xla_backend_optimization_level": "0"}
    assert first != executable_digest(compiled(one, **lower), lower)
    # An option that may act when the program runs tells two programs apart.
    assert first != executable_digest(compiled(one), {"xla_cpu_some_runtime_flag": "1"})
    assert joint_digest({"a": "1", "b": "2"}) == joint_digest({"b": "2", "a": "1"})


def test_a_point_is_found_again_from_what_a_trial_keeps(tmp_path):
    workload = small_workload("rms_norm")
    opened = OpBench(OpSetup(workload, 1)).opened
    target = OpTarget(workload, opened, tmp_path)
    assert len(form_space("cpu")) > 10
    for point in target.space.points:
        assert target.point(target.candidate(point)) == point
    assert target.point({"form": "no such form", "options": {}}) is None
    assert target.start == target.space.points[0]
    assert len({target.key(point) for point in target.space.points}) == len(target.space)


def test_kernels_are_found_by_name_and_by_module():
    matmul = kernel_named("mosaic_gpu.matmul.stream")
    assert matmul.op.name == "matmul"
    assert kernel_named("tests.search.bad_kernel:KERNEL").platform == "cpu"
    for name in ("no.such.kernel", "no_such_module:KERNEL", "tests.search.bad_kernel:NONE"):
        with pytest.raises(Exception, match="no kernel"):
            kernel_named(name)
    assert kernels_for(small_workload("matmul"), "cpu") == []
    with pytest.raises(Exception, match="--target=plan"):
        tunable({"m": small_workload("matmul")}, "cpu")
