"""Each op-level gate on its own: what it passes, what it names."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyjax.core.op import REFERENCE
from polyjax.core.ops import OPS
from polyjax.gates import (
    declaration,
    environment,
    freshness,
    kv_isolation,
    numerics,
    op_equivalence,
    repeatability,
)
from polyjax.gates.candidate import Candidate, GateFailure
from polyjax.gates.inputs import in_dtype
from polyjax.gates.op_bounds import expected, truth
from polyjax.gates.small_workloads import small_workload, small_workloads
from polyjax.gates.trial import OpTrial, known_cases


def reference(workload):
    return lambda *args: REFERENCE(OPS[workload.op], *args, **dict(workload.static))


def trial(build=reference, op="matmul", seed=0, **changes):
    workload = small_workload(op, "float32")
    return OpTrial(Candidate("test", workload, build, **changes), seed)


@pytest.mark.parametrize("op", ["matmul", "rms_norm", "kv_write", "paged_attention"])
def test_the_reference_passes_every_gate(op):
    passing = trial(op=op)
    assert op_equivalence.check(passing)["cases"] > 10
    for gate in (declaration, repeatability, freshness, kv_isolation, environment):
        gate.check(passing)


@pytest.mark.parametrize("workload", list(small_workloads()), ids=lambda w: w.key[:40])
def test_no_result_may_be_off_by_a_thousandth(workload):
    """The bound has teeth on every output of every op: the largest element moved a little."""
    workload = in_dtype(workload, "float32")
    case = next(c for c in known_cases(workload, 0, None) if c.name.startswith("random"))
    wanted = truth(case)
    for index, leaf in enumerate(wanted):
        if leaf.dtype.kind != "f" or leaf.ndim == 5:  # tokens and pools have checks of their own
            continue
        checks = expected(case, wanted, wanted)
        moved = leaf.copy()
        live = case.live if leaf.shape[0] == len(case.live) else np.ones(len(leaf), bool)
        size = np.where(live.reshape(-1, *[1] * (leaf.ndim - 1)), np.nan_to_num(np.abs(leaf)), 0)
        where = np.unravel_index(np.argmax(size), leaf.shape)
        moved[where] *= 1.001
        checks[index].judge(leaf)
        with pytest.raises(GateFailure):
            checks[index].judge(moved)


def test_a_wrong_result_is_named_with_case_element_and_bound():
    def build(workload):
        return lambda x, w, *_: (x @ w.T).at[0, 3].add(0.1)

    with pytest.raises(GateFailure, match=r"out\[0, 3\] is .* times the bound"):
        op_equivalence.check(trial(build))


def test_what_a_candidate_raises_is_its_failure():
    def build(workload):
        return lambda x, w, *_: x @ w

    with pytest.raises(GateFailure, match="raised TypeError"):
        op_equivalence.check(trial(build))


def test_a_result_that_depends_on_the_call_is_not_repeatable():
    calls = iter(range(1000))

    def build(workload):
        def drifting(x, w):
            return np.asarray(x) @ np.asarray(w).T * np.float32(1 + 1e-7 * next(calls))

        shape = jax.ShapeDtypeStruct((workload["M"], workload["N"]), jnp.float32)
        return lambda x, w, *_: jax.pure_callback(drifting, shape, x, w)

    with pytest.raises(GateFailure, match="differs between calls"):
        repeatability.check(trial(build))


def test_an_argument_that_is_not_followed_is_named():
    remembered = {}

    def build(workload):
        def cached(x, w):
            return np.asarray(x) @ remembered.setdefault("w", np.array(w)).T

        shape = jax.ShapeDtypeStruct((workload["M"], workload["N"]), jnp.float32)
        return lambda x, w, *_: jax.pure_callback(cached, shape, x, w)

    with pytest.raises(GateFailure, match="only w changed"):
        freshness.check(trial(build))


def test_reading_slots_that_nobody_owns_fails_isolation_alone():
    """Too little to break any bound: the isolation gate compares bits."""

    def build(workload):
        plain = reference(workload)

        def leaky(q, kv, *rest):
            return plain(q, kv, *rest) * (1 + 1e-9 * jnp.nan_to_num(kv[-1, 1, 0, -1, 0]))

        return leaky

    with pytest.raises(GateFailure, match="nobody owns"):
        kv_isolation.check(trial(build, "paged_attention"))


def test_a_pool_that_comes_back_elsewhere_fails():
    def build(workload):
        plain = reference(workload)
        return lambda kv, *rest: plain(kv, *rest).astype(jnp.bfloat16)

    with pytest.raises(GateFailure):
        kv_isolation.check(trial(build, "kv_write"))


def test_a_claimed_kernel_must_contribute():
    with pytest.raises(GateFailure, match="no Pallas kernel"):
        declaration.check(trial(pallas=True))


def test_tampering_is_found_and_undone():
    environment.watch()
    original, matmul = time.perf_counter, OPS["matmul"].reference
    settings = trial().settings
    time.perf_counter = lambda: 0.0
    object.__setattr__(OPS["matmul"], "reference", lambda *_: None)
    np.seterr(invalid="ignore")
    with pytest.raises(GateFailure, match=r"time\.perf_counter"):
        environment.unchanged(settings)
    np.seterr(invalid="warn")
    assert time.perf_counter is original and OPS["matmul"].reference is matmul
    environment.unchanged(trial().settings)


def test_the_numerics_class_follows_the_evidence():
    def rowwise(workload):
        def matmul(x, w, *_):
            add = lambda k, y: y + x[:, k, None] * w[None, :, k]  # noqa: E731
            return jax.lax.fori_loop(0, x.shape[1], add, jnp.zeros((len(x), len(w))))

        return matmul

    def by_batch(workload):
        piece = 8 if workload["M"] > 1 else 200

        def matmul(x, w, *_):
            parts = range(0, x.shape[1], piece)
            return sum(x[:, k : k + piece] @ w[:, k : k + piece].T for k in parts)

        return matmul

    assert numerics.check(trial(rowwise))["class"] == "batch_invariant"
    assert numerics.check(trial(by_batch))["class"] == "bounded"


def test_cases_are_fresh_and_repeat_with_their_seed():
    workload = small_workload("matmul")
    first, again, other = (known_cases(workload, seed, None)[0] for seed in (0, 0, 1))
    assert first is again
    assert not np.array_equal(first.named["w"], other.named["w"])
    made = known_cases.__wrapped__(workload, 0, None)[0]
    assert made.name == first.name and made.args[0].tobytes() == first.args[0].tobytes()
    assert dataclasses.is_dataclass(first)
