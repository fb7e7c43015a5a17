"""Measures whole-step plans on replayed traffic: gated, checked on what is timed, then paired.

The model runs with its weights and a small KV pool. Every candidate is compared with the programs
of the reference plan, never with those of another candidate, so that errors cannot add up from one
promotion to the next.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.program import (
    Kind,
    ProgramKey,
    ProgramRequest,
    StepProgram,
    program_keys,
)
from polyjax.compiler.state import StateSpec, page_bytes
from polyjax.compiler.workloads import step_workloads
from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import Workload
from polyjax.core.plan import Plan
from polyjax.engine import build
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.state import DeviceState
from polyjax.engine.types import EngineConfig
from polyjax.engine.warm import warm
from polyjax.gates import environment
from polyjax.gates.candidate import GateFailure, same_bits
from polyjax.gates.equivalence import EquivalenceGate, assert_close, forward_bound
from polyjax.gates.settings import Settings
from polyjax.gates.verdict import Verdict
from polyjax.io.digest import ParamsDigest
from polyjax.io.files import no_progress, open_model
from search.environment import facts
from search.paired import Effort, compare_arms, noise
from search.replay import Call, Packer, PlanArm, pack_call, pool_filler, row_inputs
from search.traffic import Traffic, TrafficSpec, buckets_used, draw, launches

_clock = time.perf_counter


@dataclasses.dataclass(frozen=True)
class PlanSetup:
    """The engine whose plan is searched, and the traffic it is timed on.

    `pool_bytes` bounds the KV pages that replayed rows read. `seed` draws the points of a
    space that is too large to be searched whole.
    """

    config: EngineConfig
    traffic: TrafficSpec
    cache_directory: str
    seed: int
    effort: Effort = dataclasses.field(default_factory=Effort)
    pool_bytes: int = 1 << 30


@dataclasses.dataclass(frozen=True)
class OpenedPlan:
    """What the parent needs to know: the plan to start from, how programs are compiled, where.

    `base` has its ladder spelled out. `workloads` are those of its step programs.
    """

    device_kind: str
    platform: str
    environment: dict[str, str]
    spec: StateSpec
    base: Plan
    traffic: Traffic
    max_pages: int
    num_devices: int
    workloads: dict[str, Workload]


def program_plan(plan: Plan) -> Plan:
    """The part of a plan that its programs depend on: a rung more leaves the others as they are."""
    return dataclasses.replace(plan, ladder=None)


def timed_keys(opened: OpenedPlan, ladder: BucketLadder) -> tuple[ProgramKey, ...]:
    """Returns the programs that replaying the traffic on `ladder` calls."""
    used = buckets_used(opened.traffic, ladder, opened.spec.page_size, opened.max_pages)
    keys = [ProgramKey(Kind.DECODE_GREEDY, bucket) for bucket in used.get("decode", ())]
    for bucket in used.get("prefill", ()):
        keys.append(ProgramKey(Kind.PREFILL, bucket))
        keys.append(ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, bucket.sequences, 0)))
    return tuple(dict.fromkeys(keys))


def all_keys(opened: OpenedPlan, ladder: BucketLadder) -> tuple[ProgramKey, ...]:
    """Returns every program that serving on `ladder` may call."""
    return program_keys(ladder, fused_gumbel=opened.platform != "cpu")


def truth_keys(opened: OpenedPlan) -> tuple[ProgramKey, ...]:
    """Returns the reference plan's programs that timed ones are compared with.

    Besides those the traffic calls, the largest of each kind: whatever bucket a candidate adds or
    leaves, something is there that its rows fit into.
    """
    ladder = opened.base.ladder
    assert ladder is not None
    largest = max(ladder.decode, key=lambda b: (b.sequences, b.pages))
    sequences = max(ladder.sampler_sequences)
    keys = [
        *timed_keys(opened, ladder),
        ProgramKey(Kind.DECODE_GREEDY, largest),
        *(ProgramKey(Kind.PREFILL, b) for b in _ends(ladder.prefill)),
        ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, sequences, 0)),
        ProgramKey(Kind.SCORE, Bucket(sequences, 1, 0)),
        ProgramKey(Kind.READ_SCRATCH),
    ]
    return tuple(dict.fromkeys(keys))


def _ends(buckets: Sequence[Bucket]) -> Iterable[Bucket]:
    """The smallest bucket, and the largest along each axis."""
    yield min(buckets, key=lambda b: (b.sequences, b.tokens, b.pages))
    for axis in ("tokens", "sequences", "pages"):
        yield max(buckets, key=lambda b: (getattr(b, axis), b.pages, b.tokens, b.sequences))


@dataclasses.dataclass(frozen=True)
class DescribedModel:
    """What there is to tune in a model: its plan without a search, and the step's workloads."""

    device_kind: str
    platform: str
    environment: dict[str, str]
    base: Plan
    workloads: dict[str, Workload]


@dataclasses.dataclass(frozen=True)
class SizedModel:
    """A model that is open but not loaded: sizes, plan and ladder as an engine would have them."""

    model: build.OpenedModel
    mesh_plan: MeshPlan
    device: Any
    sizing: build.Sizing
    base: Plan

    @property
    def ladder(self) -> BucketLadder:
        assert self.base.ladder is not None
        return self.base.ladder

    def workloads(self) -> dict[str, Workload]:
        """Every workload of the base plan's programs."""
        keys = program_keys(self.ladder, fused_gumbel=False)
        spec, plan = self.sizing.spec, program_plan(self.base)
        requests = [ProgramRequest(spec, plan, key) for key in keys]
        return step_workloads(requests, self.mesh_plan.mesh())


def sized_model(config: EngineConfig) -> SizedModel:
    mesh_plan = MeshPlan(model=config.tensor_parallel_size, expert=config.expert_parallel_size)
    device = mesh_plan.mesh().devices.flat[0]
    model = build.open_served_model(config, open_model(config.model), device.platform)
    sizing = build.size_engine(config, model, mesh_plan, device)
    cache = build.open_cache(config)
    plan = build.initial_plan(config, sizing, mesh_plan, device, cache)
    ladder = build.engine_ladder(config, sizing, plan, device)
    base = dataclasses.replace(plan, ladder=ladder)
    return SizedModel(model, mesh_plan, device, sizing, base)


def describe(config: EngineConfig) -> DescribedModel:
    """Returns what can be tuned in a model; reads its config alone.

    Raises ConfigError or ModelError as an engine does.
    """
    sized = sized_model(config)
    kind, platform = sized.device.device_kind, sized.device.platform
    return DescribedModel(kind, platform, facts(sized.device), sized.base, sized.workloads())


class PlanBench:
    """Lives in the measuring process; one model with its state, truth and incumbent."""

    def __init__(self, setup: PlanSetup):
        environment.watch()  # before any candidate is loaded
        self._setup = setup
        self._settings = Settings.now()
        sized = sized_model(setup.config)
        self._mesh = sized.mesh_plan.mesh()
        params = build.load_weights(
            setup.config, sized.model, self._mesh, sized.mesh_plan, no_progress, ParamsDigest()
        )
        limits, ladder = sized.sizing.limits, sized.ladder
        chunk = min(limits.max_num_batched_tokens, max(b.tokens for b in ladder.prefill))
        traffic = draw(setup.traffic, limits.max_model_len, limits.max_num_seqs, chunk)
        self.spec = _twin_spec(sized.sizing.spec, ladder, setup.pool_bytes)
        self.state = DeviceState(self.spec, sized.mesh_plan, self._mesh, params)
        self._cache = ProgramCache(setup.cache_directory)
        platform = sized.device.platform
        self._warm_calls = max(build.platform_defaults(platform).warm_calls, 1)
        self.opened = OpenedPlan(
            device_kind=sized.device.device_kind,
            platform=platform,
            environment=facts(sized.device),
            spec=self.spec,
            base=sized.base,
            traffic=traffic,
            max_pages=-(-limits.max_model_len // self.spec.page_size),
            num_devices=len(jax.devices()),
            workloads=sized.workloads(),
        )
        self._seed = int.from_bytes(os.urandom(4))  # inputs no candidate can have been made for
        self._filled = pool_filler(self.state, self._seed)
        self._rows = {
            group: [row_inputs(self.spec, step, self._seed + n) for n, step in enumerate(steps)]
            for group, steps in traffic.steps.items()
        }
        self._truth: PlanArm | None = None
        self._truth_programs: dict[ProgramKey, StepProgram] = {}
        self._expected: dict[str, list[np.ndarray]] = {}
        self._gated: set[tuple[str, ProgramKey]] = set()
        self._incumbents: dict[str, tuple[PlanArm, dict[str, Any]]] = {}

    # -- what the parent asks for ------------------------------------------------------------

    def measure(self, plan: Plan, incumbent: Plan) -> dict[str, Any]:
        """Returns the measurement of a plan whose programs are in the cache."""
        spent: dict[str, float] = {}
        verdicts: dict[str, Any] = {}
        begun = _clock()
        assert plan.ladder is not None
        programs = self._load(plan, timed_keys(self.opened, plan.ladder))
        spent["load"] = _clock() - begun
        reason = self._gate(plan, programs, verdicts)
        arm = self._arm(plan, programs)
        reason = reason or self._check_timed(arm, verdicts)
        spent["gate"] = _clock() - begun - spent["load"]
        if reason:
            return _outcome("rejected", reason, {}, {}, verdicts, spent)
        best, noise_samples = self._incumbent(incumbent)
        spent["noise"] = _clock() - begun - sum(spent.values())
        paired = compare_arms(arm, best, noise_samples, self._setup.effort)
        spent["time"] = paired.seconds
        try:
            environment.unchanged(self._settings)
        except GateFailure as failure:
            return _outcome("rejected", str(failure), {}, {}, verdicts, spent)
        status = "slow" if paired.slow else "passed"
        return _outcome(status, "", paired.arms, noise_samples, verdicts, spent)

    def judge(self, plan: Plan) -> dict[str, Any]:
        """Returns the verdict of the equivalence gate on every program of a plan."""
        begun = _clock()
        verdicts: dict[str, Any] = {}
        assert plan.ladder is not None and self.opened.base.ladder is not None
        self._load_truth(all_keys(self.opened, self.opened.base.ladder))
        programs = self._load(plan, all_keys(self.opened, plan.ladder))
        reason = self._gate(plan, programs, verdicts)
        spent = {"gate": _clock() - begun}
        return _outcome("rejected" if reason else "passed", reason, {}, {}, verdicts, spent)

    # -- inside ------------------------------------------------------------------------------

    def _load(self, plan: Plan, keys: Iterable[ProgramKey]) -> dict[ProgramKey, StepProgram]:
        """Raises RuntimeError where a program is not in the cache."""
        programs = {}
        for key in keys:
            request = ProgramRequest(self.spec, program_plan(plan), key)
            program = self._cache.load(request, self._mesh)
            if program is None:
                raise RuntimeError(f"{key} was not compiled, or its cache entry is damaged")
            warm(program, self.state, self._warm_calls)
            programs[key] = program
        return programs

    def _load_truth(self, keys: Iterable[ProgramKey]) -> None:
        missing = [key for key in keys if key not in self._truth_programs]
        self._truth_programs |= self._load(reference_plan(self.opened.base), missing)

    def _gate(
        self, plan: Plan, programs: Mapping[ProgramKey, StepProgram], verdicts: dict[str, Any]
    ) -> str:
        """Runs the equivalence gate on programs it has not seen; returns the first reason."""
        self._load_truth(truth_keys(self.opened))
        gate = EquivalenceGate(self.spec, self.state, self._truth_programs, self._seed)
        digest = program_plan(plan).digest
        checked: list[Verdict] = []
        for key, program in programs.items():
            if (digest, key) in self._gated:
                continue
            checked.append(gate.check(program))
            if not checked[-1].passed:
                break
            self._gated.add((digest, key))
        failed = next((v for v in checked if not v.passed), None)
        verdicts["equivalence"] = {
            "programs": len(checked),
            "passed": failed is None,
            "cost_s": sum(v.cost_s for v in checked),
        }
        return "" if failed is None else failed.reason

    def _arm(self, plan: Plan, programs: Mapping[ProgramKey, StepProgram]) -> PlanArm:
        """The plan's launches for the traffic."""
        assert plan.ladder is not None
        chooser = BucketChooser(plan.ladder, self.opened.max_pages)
        packer = Packer(self.spec)
        calls: dict[str, list[list[Call]]] = {}
        for group, steps in self.opened.traffic.steps.items():
            calls[group] = []
            for step, inputs in zip(steps, self._rows[group], strict=True):
                cut = launches(step, group, chooser, self.spec.page_size)
                calls[group].append(
                    [
                        pack_call(programs, group, bucket, rows, inputs, packer)
                        for bucket, rows in cut
                    ]
                )
        return PlanArm(self.state, calls)

    def _check_timed(self, arm: PlanArm, verdicts: dict[str, Any]) -> str:
        """Compares what is timed with the truth, row by row, and with itself, bit by bit."""
        if self._truth is None:
            reference = reference_plan(self.opened.base)
            self._truth = self._arm(reference, self._truth_programs)
            self._expected = {group: self._outputs(self._truth, group) for group in arm.groups}
        bound, worst = forward_bound(self.spec), 0.0
        for group in arm.groups:
            found, again = self._outputs(arm, group), self._outputs(arm, group)
            for number, (ours, twice, wanted) in enumerate(
                zip(found, again, self._expected[group], strict=True)
            ):
                what = f"{group} step {number} of the timed traffic"
                if not same_bits(ours, twice).all():
                    return f"{what}: equal inputs give other bits"
                try:
                    assert_close(ours, wanted, bound, what)
                except AssertionError as error:
                    return str(error)
                scale = float(np.max(np.abs(wanted))) or 1.0
                worst = max(worst, float(np.max(np.abs(ours - wanted))) / scale / bound)
        verdicts["timed inputs"] = {"worst_error_over_bound": worst, "passed": True}
        return ""

    def _outputs(self, arm: PlanArm, group: str) -> list[np.ndarray]:
        """Last hidden states [rows,D] of every step, each from pools with the same contents."""
        found = []
        for step in arm.calls[group]:
            parts: dict[int, np.ndarray] = {}
            for call in step:
                self.state.kv = ()
                self.state.kv = self._filled()
                hidden = np.asarray(arm.launch(call)[0]).astype(np.float32)
                parts |= {row: hidden[place] for place, row in enumerate(call.rows)}
            found.append(np.stack([parts[row] for row in sorted(parts)]))
        return found

    def _incumbent(self, plan: Plan) -> tuple[PlanArm, dict[str, Any]]:
        """The incumbent's arm and the A/A run of two copies of it, made once."""
        if plan.digest not in self._incumbents:
            assert plan.ladder is not None
            keys = timed_keys(self.opened, plan.ladder)
            first, second = (self._arm(plan, self._load(plan, keys)) for _ in range(2))
            self._incumbents = {plan.digest: (first, noise(first, second, self._setup.effort))}
        return self._incumbents[plan.digest]


def reference_plan(base: Plan) -> Plan:
    """The plan that is the truth: every op by its reference, XLA as it comes."""
    return Plan(mesh=base.mesh, ladder=base.ladder)


def _twin_spec(spec: StateSpec, ladder: BucketLadder, pool_bytes: int) -> StateSpec:
    """The state's spec with a small pool: scratch for the widest launch, pages to read."""
    size = spec.page_size
    widest = max(
        b.sequences * (-(-b.tokens // size) + 1) for b in (*ladder.decode, *ladder.prefill)
    )
    scratch = widest * 4 // 3 + 2  # a quarter of the scratch is for reading
    cost = sum(page_bytes(spec.config, size, spec.dtype))
    usable = max(16, pool_bytes // cost)
    pages = tuple(min(count, 1 + usable) + scratch for count in spec.num_pages)
    return dataclasses.replace(spec, num_pages=pages, scratch_pages=scratch)


def _outcome(
    status: str,
    reason: str,
    arms: Mapping[str, Any],
    noise_samples: Mapping[str, Any],
    verdicts: Mapping[str, Any],
    spent: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "arms": dict(arms),
        "noise": dict(noise_samples),
        "verdicts": dict(verdicts),
        "spent": {name: round(seconds, 6) for name, seconds in spent.items()},
    }
