"""Measures ways to compute one op: judged on the inputs they are timed on, then paired."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import CATALOGUE
from pallas_kernels.timing import COLD_BYTES
from polyjax.core.chips import chip
from polyjax.core.op import REFERENCE, Workload
from polyjax.core.ops import OPS
from polyjax.gates import environment
from polyjax.gates.candidate import Candidate, GateFailure, of_kernel, on_host
from polyjax.gates.inputs import Case, make_case, rng_of
from polyjax.gates.op_bounds import truth
from polyjax.gates.registry import judge_op
from polyjax.gates.settings import Settings
from polyjax.gates.trial import KnownResults, OpTrial
from search.chains import ChainSpec, chain_arguments, plan_chain
from search.compile_jobs import OpCandidate, load_op, op_function
from search.environment import facts
from search.kernels import kernel_named
from search.paired import Effort, compare_arms, noise

_clock = time.perf_counter
CPU_COLD_BYTES = 64 * 2**20
IMPOSSIBLE = 0.5  # of the time the chip needs at its measured bandwidth: no rounding explains that


@dataclasses.dataclass(frozen=True)
class OpSetup:
    """What an op's candidates are measured on. `seed` draws inputs that no candidate knows."""

    workload: Workload
    seed: int
    effort: Effort = dataclasses.field(default_factory=Effort)


@dataclasses.dataclass(frozen=True)
class OpenedOp:
    """What the parent needs to know: how chains are compiled, and where they run."""

    device_kind: str
    platform: str
    environment: dict[str, str]
    chain: ChainSpec
    avals: Any


class ChainArm:
    """A compiled chain on its arguments."""

    groups = ("op",)

    def __init__(self, compiled: Callable[..., Any], arguments: tuple[Any, ...]):
        self._compiled, self._arguments = compiled, arguments

    def run(self, group: str) -> Any:
        return self._compiled(*self._arguments)

    def units(self, group: str) -> int:
        return len(self._arguments[0])


class OpBench:
    """Lives in the measuring process; one workload, its inputs, its truth, its incumbents."""

    def __init__(self, setup: OpSetup):
        environment.watch()  # before any candidate is loaded
        self._setup = setup
        self._device = jax.devices()[0]
        self._settings = Settings.now()
        self._case = _timed_case(setup.workload, setup.seed)
        self._known = KnownResults(self._case, truth(self._case))
        spec, avals = chain_of(self._case, self._device.platform)
        self._arguments = chain_arguments(self._case.args, spec)
        kind, platform = self._device.device_kind, self._device.platform
        self.opened = OpenedOp(kind, platform, facts(self._device), spec, avals)
        self._incumbents: dict[str, tuple[ChainArm, dict[str, Any]]] = {}

    def measure(self, path: str, incumbent: str) -> dict[str, Any]:
        """Returns the measurement of the chain at `path` against the one at `incumbent`."""
        begun = _clock()
        arm = ChainArm(load_op(path), self._arguments)
        evidence: dict[str, Any] = {}
        try:
            results = on_host(jax.block_until_ready(arm.run("op")))
            evidence["worst_error_over_bound"] = self._known.judge(results)
        except GateFailure as failure:
            return _rejected(str(failure), {"gate": _clock() - begun})
        gated_s = _clock() - begun
        best, noise_samples = self._incumbent(incumbent)
        noised_s = _clock() - begun - gated_s
        paired = compare_arms(arm, best, noise_samples, self._setup.effort)
        spent = {"gate": gated_s, "noise": noised_s, "time": paired.seconds}
        reason = self._impossible(paired.arms) or self._tampered()
        if reason:
            return _rejected(reason, spent)
        return {
            "status": "slow" if paired.slow else "passed",
            "reason": "",
            "arms": paired.arms,
            "noise": noise_samples,
            "verdicts": {"timed inputs": evidence},
            "spent": spent,
        }

    def judge(self, candidate: OpCandidate) -> dict[str, Any]:
        """Returns the verdicts of all op-level gates; for candidates about to be promoted."""
        begun = _clock()
        judged = self._judged(candidate)
        verdicts = judge_op(_CompiledTrial(judged, self._setup.seed, candidate.options))
        failed = next((v for v in verdicts if not v.passed), None)
        return {
            "status": "passed" if failed is None else "rejected",
            "reason": "" if failed is None else f"{failed.gate}: {failed.reason}",
            "verdicts": {v.gate: {"passed": v.passed, "cost_s": v.cost_s} for v in verdicts},
            "spent": {"gate": _clock() - begun},
        }

    def _judged(self, candidate: OpCandidate) -> Candidate:
        """The candidate as the op-level gates take it."""
        platform = self._device.platform
        if not candidate.kernel:
            return Candidate(
                candidate.form,
                candidate.workload,
                lambda w: op_function(dataclasses.replace(candidate, workload=w), platform),
            )
        kernel = kernel_named(candidate.kernel)
        schedule = kernel.schedule_type.from_json(dict(candidate.schedule))
        target = chip(self._device.device_kind)
        interpreted = kernel.platform != platform
        judged = of_kernel(kernel, schedule, candidate.workload, target, interpreted)
        return dataclasses.replace(judged, pallas=candidate.kernel in CATALOGUE)

    def _incumbent(self, path: str) -> tuple[ChainArm, dict[str, Any]]:
        """The incumbent's chain and the A/A run of two copies of it, made once."""
        if path not in self._incumbents:
            arm, copy = (ChainArm(load_op(path), self._arguments) for _ in range(2))
            self._incumbents = {path: (arm, noise(arm, copy, self._setup.effort))}
        return self._incumbents[path]

    def _impossible(self, arms: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
        """A reason if the candidate beats what its memory traffic takes; "" otherwise."""
        op = OPS[self._setup.workload.op]
        if op.bytes_moved is None or self._device.platform == "cpu":
            return ""
        rate = chip(self._device.device_kind).hbm_bytes_per_s
        floor_us = IMPOSSIBLE * op.bytes_moved(self._setup.workload) / rate * 1e6
        found_us = float(np.median(arms["op"]["candidate_us"]))
        if found_us >= floor_us:
            return ""
        return f"takes {found_us:.3g} us; to move its bytes takes {floor_us:.3g} us at least"

    def _tampered(self) -> str:
        try:
            environment.unchanged(self._settings)
        except GateFailure as failure:
            return str(failure)
        return ""


class _CompiledTrial(OpTrial):
    """A trial whose functions are compiled with the candidate's own XLA options."""

    def __init__(self, candidate: Candidate, seed: int, options: tuple[tuple[str, str], ...]):
        super().__init__(candidate, seed)
        self._options = dict(options)

    def function(self, workload: Workload) -> Callable[..., Any] | None:
        if not self._options:
            return super().function(workload)
        if workload not in self._functions:
            built = self.candidate.traceable(workload)
            compiled = None if built is None else jax.jit(built, compiler_options=self._options)
            self._functions[workload] = compiled
        return self._functions[workload]


def chain_of(case: Case, platform: str) -> tuple[ChainSpec, Any]:
    """Returns how calls of a case are chained on a platform, and the avals of the chain."""
    avals = jax.tree.map(_aval, case.args)
    results = jax.eval_shape(lambda *a: case.op.reference(REFERENCE, *a, **case.static), *avals)
    cold = CPU_COLD_BYTES if platform == "cpu" else COLD_BYTES
    spec = plan_chain(avals, jax.tree.leaves(results), cold)
    return spec, ([avals[spec.varied]] * spec.links, *avals)


def describe_chain(workload: Workload) -> tuple[ChainSpec, Any]:
    """Returns what a bench of the workload would open with, for this process's device."""
    return chain_of(_timed_case(workload, 0), jax.devices()[0].platform)


def _aval(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _timed_case(workload: Workload, seed: int) -> Case:
    """Random inputs; where there are page tables, of sequences that fill their pages."""
    op = OPS[workload.op]
    rng = rng_of(workload, seed)
    return make_case(op, workload, rng, "random", "full_pool")


def _rejected(reason: str, spent: Mapping[str, float]) -> dict[str, Any]:
    return {
        "status": "rejected",
        "reason": reason,
        "arms": {},
        "noise": {},
        "verdicts": {},
        "spent": dict(spent),
    }
