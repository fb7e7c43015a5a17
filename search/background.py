"""Background tuning of one server: round after round, each a search from the plan in force.

A round is a plan to start from and the traffic to measure on. It is kept in a file beside the
ledger: a tuner that is started again goes on with it, and finds its trials in the ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyjax.core.buckets import BucketLadder
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError, EngineDead, PolyjaxError
from polyjax.core.kernel_source import PREFIX
from polyjax.core.op import Workload
from polyjax.core.plan import Plan
from polyjax.core.whole_file import write_whole
from polyjax.engine.types import EngineConfig
from search.agents import AGENTS
from search.compile_pool import CompilePool
from search.cost.analytical import BORDER_US
from search.cost.learned import CostModel
from search.kernels import kernels_for
from search.leases import EFFORT, Call, LeasedMeasurer
from search.ledger import Ledger
from search.live import LiveServer, LiveTuner, PlanChanged, has_drifted
from search.measure import MeasureError
from search.measure_jobs import describe_model
from search.op_bench import OpSetup
from search.plan_bench import DescribedModel, PlanSetup
from search.run import in_force, with_choice
from search.rungs import with_missing_rung
from search.space import Point
from search.step_costs import describe_costs
from search.targets import OpTarget, PlanTarget, Target
from search.traffic import TrafficSpec, padded_tokens
from search.tuner import Budget, TuneError
from search.turns import Turns

AGENT_NAME = "background"
TRIALS_A_TURN = 16  # on one target, before the next has its turn
FIRST_TRIALS = 4  # on one op, while there are others that nobody has looked at yet
RUNG_PRICE = 0.01  # of a token's cost that a rung must save to be worth compiling
CORES_A_COMPILER = 8  # beside an accelerator: the host serves, too
_SEARCHER = "bandit"
_IDLE_S = 5.0
_LONGEST_PAUSE_S = 300.0

log = logging.getLogger("polyjax.tuner")


@dataclasses.dataclass(frozen=True)
class Round:
    """Where a search starts and what it measures on. `seed` draws inputs and spaces."""

    model: str
    plan: Mapping[str, Any]
    traffic: Mapping[str, Any]
    seed: int

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self)).encode(), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Round | None:
        """The round that was left, or None where the file is missing, torn or of other fields."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a background tuner is given: the engine's config, and where it may put its files.

    `memory_share` bounds the measuring process on an accelerator.
    """

    config: EngineConfig
    page_size: int
    ledger: Path
    cache_directory: str
    folder: Path
    memory_share: float


@dataclasses.dataclass(frozen=True)
class _Search:
    """A round under way: what is searched, with what. `costs` as `search.step_costs` has them."""

    begun: Round
    config: EngineConfig
    traffic: TrafficSpec
    described: DescribedModel
    costs: Mapping[str, float]
    ledger: Ledger
    pool: CompilePool

    @property
    def on_cpu(self) -> bool:
        return self.described.platform == "cpu"

    def pairs(self, plan: Plan) -> Iterator[tuple[Workload, str]]:
        """Workloads with a kernel whose schedules can be searched here, by the kernel's name."""
        workloads, platform = self.described.workloads, self.described.platform
        if not self.on_cpu:
            for workload in workloads.values():
                yield from ((workload, k.name) for k in kernels_for(workload, platform))
        for key, choice in plan.choices:
            if choice.kernel.startswith(PREFIX) and key in workloads:
                yield workloads[key], choice.kernel


class LedgerRefused(ConfigError):
    """The ledger cannot be used; starting the tuner again would not help."""


class BackgroundTuner:
    """Tunes until the process ends. Calls of the server raise EngineDead when it is gone."""

    def __init__(self, setting: Setting, call: Call):
        self._setting = setting
        self._round_file = setting.ledger.with_suffix(".round.json")
        self._environment = {
            "POLYJAX_COMPILE_CACHE": setting.cache_directory,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": str(setting.memory_share),
        }
        self._server = LiveServer(call, AGENT_NAME)
        turns = Turns(setting.folder / f"turns-{os.getpid()}")
        self._measurer = LeasedMeasurer(call, turns, AGENT_NAME, self._environment)
        self._fits = True  # whether the model fits beside the server a second time
        self._unmeasurable: set[str] = set()  # workloads whose inputs do not
        self._proposed_ladders: set[BucketLadder] = set()

    def run(self) -> None:
        """Goes through rounds for ever. Raises EngineDead, and LedgerRefused for a --ledger that
        is none."""
        left, pause_s = Round.load(self._round_file), _IDLE_S
        while True:
            left = self._begin(left)
            try:
                self._search(left)
            except PlanChanged as change:
                log.info("a new round: %s", change)
                left = None
            except (EngineDead, LedgerRefused):
                raise
            except PolyjaxError as error:  # a killed measuring process, a full disk, a bad plan
                log.warning("%s; tried again in %g s", error, pause_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _IDLE_S
                self._rest(left)

    def close(self) -> None:
        self._measurer.close()

    # -- rounds ------------------------------------------------------------------------------

    def _begin(self, left: Round | None) -> Round:
        """The round that was left, if the traffic is still like that; else a new one."""
        model, seed = self._setting.config.model or "", int.from_bytes(os.urandom(4))
        while (traffic := self._server.traffic(self._setting.page_size, seed)) is None:
            time.sleep(_IDLE_S)
        if left is not None and left.model == model:
            if not has_drifted(TrafficSpec.from_json(left.traffic), traffic):
                return left
            log.info("a new round: the traffic has changed")
        begun = Round(model, self._server.plan().to_json(), traffic.to_json(), seed)
        begun.save(self._round_file)
        return begun

    def _rest(self, begun: Round) -> None:
        """Everything is tried: waits for another plan or other traffic."""
        plan, before = self._server.plan(), TrafficSpec.from_json(begun.traffic)
        while True:
            time.sleep(_IDLE_S)
            now = self._server.traffic(self._setting.page_size, begun.seed)
            if self._server.plan() != plan or (now is not None and has_drifted(before, now)):
                return

    def _search(self, begun: Round) -> None:
        """Turns of all targets, until none has anything left to try.

        On an accelerator ops come first: they need no second copy of the model.
        """
        plan_file = self._setting.folder / "tuned_plan.json"
        plan_file.write_text(json.dumps(begun.plan))
        config = dataclasses.replace(
            self._setting.config, plan=str(plan_file), state_dir=None, audit_log=None
        )
        described = self._measurer.ask(describe_model, config)
        on_cpu = described.platform == "cpu"
        traffic = TrafficSpec.from_json(begun.traffic)
        if not on_cpu:
            self._fit_ladder(traffic)
        costs = {} if on_cpu else self._measurer.ask(describe_costs, config, traffic)
        try:
            ledger = Ledger(self._setting.ledger, described.environment)
        except ConfigError as error:
            raise LedgerRefused(str(error)) from error
        workers = 1 if on_cpu else max((os.cpu_count() or 1) // CORES_A_COMPILER, 1)
        pool = CompilePool(workers, environment=self._environment)
        with contextlib.closing(ledger), pool:
            search = _Search(begun, config, traffic, described, costs, ledger, pool)
            tried, failure, trials = 1, None, FIRST_TRIALS
            while tried and failure is None:
                tried = 0 if on_cpu else self._tune_ops(search, trials)
                try:
                    tried += self._tune_plan(search)
                except TuneError as error:
                    failure = error
                tried += self._tune_ops(search, trials) if on_cpu else 0
                trials = TRIALS_A_TURN
        if failure is not None:  # a killed process, perhaps: worth another try
            raise failure

    # -- targets -----------------------------------------------------------------------------

    def _fit_ladder(self, traffic: TrafficSpec) -> None:
        """Proposes a decode rung that the traffic lacks. Raises PlanChanged where it is taken.

        The server's own canary measures it on live batches; where the model is large this takes
        seconds, and a second copy of it minutes. Each ladder is proposed once.
        """
        plan = self._server.plan()
        assert plan.ladder is not None
        ladder = with_missing_rung(plan.ladder, traffic.concurrency)
        if ladder is None or ladder in self._proposed_ladders:
            return
        self._proposed_ladders.add(ladder)
        added = sorted({b.sequences for b in set(ladder.decode) - set(plan.ladder.decode)})
        proposal = dataclasses.replace(plan, ladder=ladder)
        if self._server.propose(proposal, f"a decode rung of {added} rows").accepted:
            raise PlanChanged("the ladder has the rung that the traffic lacked")

    def _tune_plan(self, search: _Search) -> int:
        """One turn on the whole plan; returns the number of trials."""
        if not self._fits:
            return 0
        seed = search.begun.seed
        setup = PlanSetup(
            search.config, search.traffic, self._setting.cache_directory, seed, EFFORT
        )
        try:
            opened = self._measurer.open(setup)
        except MeasureError as error:
            if search.on_cpu:
                raise
            log.warning("plans are not tuned as a whole: %s", error)
            self._fits = False
            return 0
        target = PlanTarget(setup, opened)
        if self._server.plan() not in target.plans.values():
            raise PlanChanged("the server's plan is none of the round's")

        def predict(point: Point) -> float:
            """Ladders first that pad this traffic little with few rungs."""
            ladder = target.plans[point].ladder
            assert ladder is not None
            page_size = opened.spec.page_size
            padded = padded_tokens(opened.traffic, ladder, page_size, opened.max_pages)
            return padded * (1 + RUNG_PRICE * (len(ladder.decode) + len(ladder.prefill)))

        return self._turn(search, target, target.plans.__getitem__, predict, TRIALS_A_TURN)

    def _tune_ops(self, search: _Search, trials: int) -> int:
        """A turn of up to `trials` on each op, those first that a token costs most in.

        Raises PlanChanged where a winner came into force: the next round starts from it.
        """
        plan = self._server.plan()
        pairs = sorted(search.pairs(plan), key=lambda pair: -search.costs.get(pair[0].key, 0.0))
        tried = sum(self._tune_op(search, workload, name, trials) for workload, name in pairs)
        if self._server.plan() != plan:
            raise PlanChanged("an op has a better schedule")
        return tried

    def _tune_op(self, search: _Search, workload: Workload, kernel: str, trials: int) -> int:
        """One turn on the schedules of one kernel for one workload; 0 if it cannot be searched."""
        if workload.key in self._unmeasurable:
            return 0
        plan, seed = self._server.plan(), search.begun.seed
        try:
            opened = self._measurer.open(OpSetup(workload, seed, EFFORT))
        except MeasureError as error:
            if search.on_cpu:
                raise
            log.warning("%s is not tuned: %s", workload.key, error)
            self._unmeasurable.add(workload.key)
            return 0
        folder = self._setting.folder / "chains"
        model = CostModel(chip(opened.device_kind), seed)
        model.update(list(search.ledger.trials(workload.key, "passed")), {workload.key: workload})
        start = in_force(plan, workload, opened.device_kind)
        target = OpTarget(workload, opened, folder, kernel, start, model)
        if len(target.space) < 2:
            return 0

        def plan_of(point: Point) -> Plan:
            return with_choice(plan, workload, target.judged(point))

        def unworthy(point: Point, arms: Mapping[str, Any]) -> str:
            """While there are other ops to look at: what the borders with XLA's kernels eat."""
            by_xla = not in_force(self._server.plan(), workload, opened.device_kind).kernel
            if trials > FIRST_TRIALS or search.on_cpu or not by_xla:
                return ""
            return eaten_by_borders(arms["op"])

        try:
            return self._turn(search, target, plan_of, target.prior, trials, unworthy)
        except TuneError as error:
            log.warning("%s is not tuned: %s", target.name, error)
            return 0

    def _turn(
        self,
        search: _Search,
        target: Target,
        plan_of: Callable[[Point], Plan],
        predict: Callable[[Point], float] | None,
        trials: int,
        unworthy: Callable[[Point, Mapping[str, Any]], str] = lambda point, arms: "",
    ) -> int:
        tuner = LiveTuner(
            *(self._server, plan_of, search.ledger, target, self._measurer, search.pool),
            AGENTS[_SEARCHER](target.space, search.begun.seed, predict),
            Budget(max_trials=trials),
            EFFORT,
            lambda progress: log.info("trial %d: %s", progress.last.id, progress.last.status),
            share_cores=search.on_cpu,
            unworthy=unworthy,
        )
        tuner.run()
        return tuner.new_trials


def eaten_by_borders(samples: Mapping[str, Sequence[float]]) -> str:
    """Why a kernel in an op's place would not make a step faster, "" if it may.

    A chain of one op has no borders between kernels of ours and of XLA; a step has two a call.
    """
    candidate_us, incumbent_us = (
        statistics.median(samples[arm]) for arm in ("candidate_us", "incumbent_us")
    )
    saved_us, borders_us = incumbent_us - candidate_us, 2 * BORDER_US
    if saved_us > borders_us:
        return ""
    return f"saves {saved_us:.1f} us a call, and its borders with XLA's take {borders_us:.1f} us"
