"""A tuning run from its config: what is searched, for how long, into which ledger.

`tune_plan` searches a model's step plan, `tune_kernels` the schedules of its kernels, `tune_op` one
workload. All go on where the ledger stopped and return the best plan or candidate there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels import CATALOGUE
from polyjax.compiler.cache import default_cache_dir
from polyjax.compiler.choose import DefaultingOps, defaults_for
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError
from polyjax.core.op import REFERENCE_NAME, Choice, Workload
from polyjax.core.plan import Plan
from polyjax.engine.types import EngineConfig
from search.agents import AGENTS
from search.compile_jobs import OpCandidate
from search.compile_pool import CompilePool
from search.cost.learned import CostModel
from search.cost.mesh import MeshCost
from search.edits import Edit
from search.kernels import kernels_for
from search.ledger import Ledger, Trial, digest
from search.measure import TRIAL_TIMEOUT_S, MeasuringProcess
from search.measure_jobs import describe_model, measure_mesh, rank_meshes
from search.op_bench import OpSetup
from search.paired import Effort
from search.plan_bench import PlanSetup
from search.space import Point
from search.targets import OpTarget, PlanTarget, Target, tunable
from search.traffic import TrafficSpec
from search.tuner import Budget, Progress, Tuner

OnTrial = Callable[[str, Progress], None]


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run. `budget_s` and `max_trials` (0: no limit) count this run alone.

    Without `resume` a ledger that knows this search already is refused. `environment` is added to
    that of the measuring and compiling processes.
    """

    ledger: Path
    resume: bool = False
    budget_s: float = 1800.0
    max_trials: int = 0
    agent: str = "bandit"
    seed: int = 0
    workers: int = 0
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    effort: Effort = dataclasses.field(default_factory=Effort)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.agent not in AGENTS:
            raise ConfigError(f"--agent={self.agent}: must be one of {', '.join(AGENTS)}")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run came to: the plan in force in the ledger, and what it gained over the start."""

    plan: Plan
    gain: float
    trials: int


def no_progress(name: str, progress: Progress) -> None:
    """For runs that nobody watches."""


class Session:
    """The processes and the ledger of a run, shared by the targets it goes through."""

    def __init__(self, run: RunConfig, on_trial: OnTrial = no_progress):
        self.run = run
        self._on_trial = on_trial
        self._deadline_s = time.monotonic() + run.budget_s
        self._trials_left = float(run.max_trials or math.inf)
        self.measurer = MeasuringProcess(run.environment, run.trial_timeout_s)
        self.pool = CompilePool(run.workers, environment=run.environment)
        self.ledger: Ledger | None = None
        self._known_before: set[int | None] = set()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s or self._trials_left <= 0

    def open_ledger(self, environment: Mapping[str, str]) -> Ledger:
        if self.ledger is None:
            self.ledger = Ledger(self.run.ledger, environment)
            self._known_before = {trial.id for trial in self.ledger.trials()}
        return self.ledger

    def tuner(
        self, target: Target, platform: str, predict: Callable[[Point], float] | None, share: float
    ) -> Tuner:
        """Returns the tuner of a target, which gets a share of the time that is left."""
        assert self.ledger is not None
        if not self.run.resume:
            self._refuse_known(self.ledger, target)
        now = time.monotonic()
        return Tuner(
            self.ledger,
            target,
            self.measurer,
            self.pool,
            AGENTS[self.run.agent](target.space, self.run.seed, predict),
            Budget(now + share * max(0.0, self._deadline_s - now), self._trials_left),
            self.run.effort,
            lambda progress: self._heard(target.name, progress),
            share_cores=platform == "cpu",
        )

    def count_trial(self) -> None:
        self._trials_left -= 1

    def close(self) -> None:
        self.pool.close()
        self.measurer.close()
        if self.ledger is not None:
            self.ledger.close()

    def _refuse_known(self, ledger: Ledger, target: Target) -> None:
        """Raises ConfigError if an earlier run searched this: going on has to be asked for."""
        earlier = [t for t in ledger.trials(target.name) if t.id in self._known_before]
        known = sum(target.point(trial.candidate) is not None for trial in earlier)
        if known:
            raise ConfigError(
                f"{ledger.path} has {known} trials of {target.name} already: pass --resume to go "
                "on from them, or another --ledger"
            )

    def _heard(self, name: str, progress: Progress) -> None:
        self.count_trial()
        self._on_trial(name, progress)


@contextlib.contextmanager
def session(run: RunConfig, on_trial: OnTrial = no_progress) -> Iterator[Session]:
    """The session of a run; its processes end with it, however it ends."""
    opened = Session(run, on_trial)
    try:
        yield opened
    finally:
        opened.close()


def cache_directory(config: EngineConfig) -> str:
    """Where step programs are kept. Raises ConfigError where the config forbids that."""
    if config.compile_cache_dir == "none":
        raise ConfigError("--compile_cache_dir=none: tuning passes programs through the cache")
    return str(config.compile_cache_dir or default_cache_dir())


def tune_plan(
    config: EngineConfig,
    traffic: TrafficSpec,
    run: RunConfig,
    first_edits: Sequence[Edit] = (),
    on_trial: OnTrial = no_progress,
    on_best: Callable[[Plan], None] = lambda plan: None,
) -> Found:
    """Searches the plan of a model's step; `on_best` hears of each plan that comes into force."""
    setup = PlanSetup(config, traffic, cache_directory(config), run.seed, run.effort)

    def heard(name: str, progress: Progress) -> None:
        if progress.best.trial == progress.last.id:
            on_best(target.plans[progress.best.point])
        on_trial(name, progress)

    with session(run, heard) as opened:
        found = opened.measurer.open(setup)
        opened.open_ledger(found.environment)
        target = PlanTarget(setup, found, first_edits)
        tuner = opened.tuner(target, found.platform, None, 1.0)
        try:
            tuner.run()
        finally:  # also when it is interrupted: what is in force so far
            on_best(target.plans[tuner.best.point])
        return Found(target.plans[tuner.best.point], tuner.gain, tuner.new_trials)


def tune_kernels(
    config: EngineConfig,
    run: RunConfig,
    op: str = "",
    on_trial: OnTrial = no_progress,
    on_best: Callable[[Plan], None] = lambda plan: None,
) -> Found:
    """Searches the schedules of every kernel a model's step may use, costliest workload first.

    `op` narrows it to one op. Returns the model's plan with the winners in it.
    """
    with session(run, on_trial) as opened:
        described = opened.measurer.ask(describe_model, config)
        pairs = tunable(described.workloads, described.platform)
        pairs = [(w, k) for w, k in pairs if op in ("", w.op)]
        if not pairs:
            raise ConfigError(f"no workload of {op!r} in this model's step has a kernel here")
        opened.open_ledger(described.environment)
        plan, gains, trials = described.base, [1.0], 0
        for number, (workload, kernel) in enumerate(pairs):
            if opened.is_over:
                break
            start = in_force(plan, workload, described.device_kind)
            share = 1.0 / (len(pairs) - number)

            def kept(
                winner: OpCandidate, plan: Plan = plan, workload: Workload = workload
            ) -> dict[str, Any]:
                """The whole plan with the winner in it: what a server starts with."""
                whole = with_choice(plan, workload, winner).to_json()
                return {"plan": whole, "model": config.model or ""}

            with _op_tuner(opened, workload, kernel.name, start, share, kept) as (tuner, target):
                try:
                    tuner.run()
                finally:  # also when it is interrupted: what is in force so far
                    plan = with_choice(plan, workload, target.judged(tuner.best.point))
                    on_best(plan)
            trials += tuner.new_trials
            gains.append(tuner.gain)
        return Found(plan, max(gains), trials)


def tune_op(
    workload: Workload,
    run: RunConfig,
    kernel_name: str | None = None,
    on_trial: OnTrial = no_progress,
) -> tuple[OpCandidate, float]:
    """Searches one workload; returns what is in force in the end and its gain over the start.

    `kernel_name` None takes the first kernel of the device's platform that supports the workload;
    "", or None where there is none, searches forms that XLA compiles.
    """
    with (
        session(run, on_trial) as opened,
        _op_tuner(opened, workload, kernel_name, None, 1.0) as (tuner, target),
    ):
        tuner.run()
        return target.judged(tuner.best.point), tuner.gain


@contextlib.contextmanager
def _op_tuner(
    opened: Session,
    workload: Workload,
    kernel_name: str | None,
    start: OpCandidate | None,
    share: float,
    kept: Callable[[OpCandidate], Mapping[str, Any]] = lambda winner: {},
) -> Iterator[tuple[Tuner, OpTarget]]:
    """The tuner of one workload, not run yet, and its target; compiled chains end with it."""
    seed = int.from_bytes(os.urandom(4))  # inputs that no candidate can have been made for
    found = opened.measurer.open(OpSetup(workload, seed, opened.run.effort))
    ledger = opened.open_ledger(found.environment)
    if kernel_name is None:
        able = kernels_for(workload, found.platform)
        kernel_name = able[0].name if able else ""
    model = CostModel(chip(found.device_kind), opened.run.seed)
    model.update(list(ledger.trials(workload.key, "passed")), {workload.key: workload})
    with tempfile.TemporaryDirectory(prefix="polyjax-chains-") as folder:
        target = OpTarget(workload, found, Path(folder), kernel_name, start, model, kept)
        yield opened.tuner(target, found.platform, target.prior, share), target


def in_force(plan: Plan, workload: Workload, device_kind: str) -> OpCandidate:
    """What a plan computes a workload with on a kind of device."""
    chip_of_defaults = defaults_for(plan, device_kind)
    choice = DefaultingOps(dict(plan.choices), CATALOGUE, chip_of_defaults).choice(workload)
    if choice is None:
        return OpCandidate(workload, form="platform")
    return OpCandidate(workload, choice.kernel, choice.schedule)


def with_choice(plan: Plan, workload: Workload, winner: OpCandidate) -> Plan:
    """The plan with a winner in the workload's place."""
    choices = dict(plan.choices)
    choices.pop(workload.key, None)
    if winner.kernel:
        choices[workload.key] = Choice(winner.kernel, winner.schedule)
    elif plan.unlisted != REFERENCE_NAME:
        choices[workload.key] = Choice(REFERENCE_NAME)
    return dataclasses.replace(plan, choices=tuple(sorted(choices.items())))


def tune_mesh(
    config: EngineConfig,
    traffic: TrafficSpec,
    run: RunConfig,
    on_best: Callable[[Plan], None] = lambda plan: None,
    report: Callable[[str], None] = lambda line: None,
) -> Found:
    """Ranks every mesh plan and serves the traffic on the cheapest ones, one after the other.

    Each is a trial. Two meshes do not fit beside each other, so there are no pairs and nothing is
    promoted: the fastest goes to `on_best`, for an operator to serve.
    """
    with session(run) as opened:
        ranked = opened.measurer.ask(rank_meshes, config, traffic)
        ledger = opened.open_ledger(ranked.environment)
        best: tuple[float, Plan] | None = None
        first_us, trials = math.nan, 0
        for chosen in [c for c in ranked.costs if c.refused is None]:
            if opened.is_over:
                break
            key = digest({"mesh": str(chosen.plan), "traffic": traffic.digest, **ranked.subject})
            known = ledger.find(key)
            if known is None:
                known = _mesh_trial(opened, config, traffic, chosen, key)
                ledger.record(known)
                trials += 1
                opened.count_trial()
            report(f"{chosen}: {known.status} {known.reason}")
            if known.status == "passed":
                us = statistics.median(known.samples_us)
                first_us = us if math.isnan(first_us) else first_us
                if best is None or us < best[0]:
                    best = us, Plan.from_json(known.candidate["plan"])
                    on_best(best[1])
        if best is None:
            reasons = "\n  ".join(map(str, ranked.costs))
            raise ConfigError(f"no mesh plan could be measured:\n  {reasons}")
        return Found(best[1], first_us / best[0], trials)


def _mesh_trial(
    opened: Session, config: EngineConfig, traffic: TrafficSpec, chosen: MeshCost, key: str
) -> Trial:
    """One mesh plan, served in the measuring process."""
    found = opened.measurer.run(measure_mesh, config, traffic, chosen)
    return Trial(
        key=key,
        target="mesh",
        candidate={"mesh": chosen.plan.to_json(), **found.verdicts},
        agent="cost model",
        status=found.status,
        reason=found.reason,
        samples_us=tuple(found.arms.get("mesh", {}).get("candidate_us", ())),
        predicted_us=chosen.us_per_token,
        spent=found.spent,
    )
