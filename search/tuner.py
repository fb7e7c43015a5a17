"""The search's loop: ask an agent, compile ahead, measure, decide, remember.

    tuner = Tuner(ledger, target, measurer, pool, agent, budget)
    tuner.run()                    # until the budget or the space is used up, or nothing is to gain
    tuner.best                     # the point in force, its cost, the trial that found it

A trial is in the ledger as soon as it ends, together with the decision about it. Run again on the
same ledger, the loop goes on where it was: what was tried is told to the agent, not measured.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from polyjax.core.errors import PolyjaxError
from search.agents import Agent
from search.compile_pool import CompilePool
from search.cost.policy import SearchPolicy
from search.decisions import RULE, decide, floors
from search.digests import joint_digest
from search.job_process import Answer
from search.ledger import Ledger, Promotion, Trial
from search.measure import Measurement, MeasuringProcess
from search.paired import Effort
from search.space import Point
from search.targets import Job, Target

BASELINE = "baseline"
FIRST_FORECAST = 48  # trials before the cost model is asked whether anything is left to gain
_WAIT_S = 0.5


class TuneError(PolyjaxError):
    """The search cannot begin; the message says what the starting point failed at."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """When a run ends: `deadline_s` of time.monotonic(), or after so many new trials."""

    deadline_s: float = math.inf
    max_trials: float = math.inf

    def is_spent(self, trials: int) -> bool:
        return time.monotonic() >= self.deadline_s or trials >= self.max_trials


@dataclasses.dataclass(frozen=True)
class Best:
    """The point in force: its cost, in the terms of the starting point's, and its trial."""

    point: Point
    cost_us: float
    trial: int


@dataclasses.dataclass(frozen=True)
class Progress:
    """How a run stands, for whoever watches it."""

    trials: int
    new_trials: int
    start_us: float
    best: Best
    last: Trial


@dataclasses.dataclass
class _InFlight:
    """A candidate on its way through the compile pool."""

    point: Point
    agent: str
    missing: int
    digests: dict[str, str] = dataclasses.field(default_factory=dict)
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""
    timeout: bool = False


class Tuner:
    """One run on one target. `on_trial` hears of every trial that ends."""

    def __init__(
        self,
        ledger: Ledger,
        target: Target,
        measurer: MeasuringProcess,
        pool: CompilePool,
        agent: Agent,
        budget: Budget,
        effort: Effort,
        on_trial: Callable[[Progress], None] = lambda progress: None,
        share_cores: bool = False,
    ):
        """`share_cores`: the pool rests while something is timed, on whose cores it runs."""
        self._ledger, self._target = ledger, target
        self._measurer, self._pool = measurer, pool
        self._agent, self._budget, self._effort = agent, budget, effort
        self._on_trial, self._share_cores = on_trial, share_cores
        self._costs_us: dict[int, float] = {}
        self._trial_of_digest: dict[str, int] = {}
        self._in_flight: dict[Point, _InFlight] = {}
        self._ready: collections.deque[_InFlight] = collections.deque()
        self._known = 0
        self._is_exhausted = False
        self._tried: dict[Point, float | None] = {}
        self._next_forecast = FIRST_FORECAST
        self._noise_floor = 0.0  # what the last A/A run showed, relative
        self.is_settled = False
        self.new_trials = 0
        self.start_us = math.nan
        self.best = Best(target.start, math.nan, 0)

    @property
    def gain(self) -> float:
        """How much less the point in force costs than the starting point, as a ratio."""
        return self.start_us / self.best.cost_us if self.best.trial else 1.0

    def run(self) -> None:
        """Searches until the budget or the space is used up, or `is_settled`.

        Raises TuneError if what is in force cannot be compiled or does not pass its own gates.
        """
        self._resume()
        self._prepare()
        if math.isnan(self.start_us):
            self._measure_start()
        elif self.best.point != self._target.start:
            self._compile_now(self._target.jobs(self.best.point), "what is in force")
        while not self._budget.is_spent(self.new_trials):
            if self._nothing_to_gain():
                self.is_settled = True
                break
            self._compile_ahead()
            if not self._in_flight and not self._ready:
                break
            for tag, answer in self._pool.poll(0.0 if self._ready else _WAIT_S):
                self._take_compiled(tag, answer)
            if self._ready and not self._budget.is_spent(self.new_trials):
                self._finish(self._ready.popleft())

    def _nothing_to_gain(self) -> bool:
        """Whether the cost model rules out that a point not tried beats the best beyond noise.

        Asked when the points tried have grown by half: it learns from them each time.
        """
        if len(self._tried) < self._next_forecast or not self.best.trial:
            return False
        self._next_forecast = max(FIRST_FORECAST, len(self._tried) * 3 // 2)
        forecast = self._target.forecast(self._tried)
        if forecast is None:
            return False
        return SearchPolicy(self._noise_floor).done(forecast, self.best.cost_us, len(self._tried))

    # -- what is known already ---------------------------------------------------------------

    def _resume(self) -> None:
        """Tells the agent of every trial in the ledger, and takes up the point in force."""
        points: dict[int, Point] = {}
        for trial in self._ledger.trials(self._target.name):
            point = self._target.point(trial.candidate)
            if point is None or trial.id is None or trial.key != self._target.key(point):
                continue
            cost = trial.verdicts.get("relative", {}).get("cost_us")
            self._known += 1
            points[trial.id] = point
            self._remember(trial.id, trial.verdicts, cost)
            # What was a candidate of an earlier search can be what this one starts from.
            if trial.agent == BASELINE or (point == self._target.start and cost is not None):
                self.start_us = float(cost)
                self.best = Best(point, float(cost), trial.id)
            self._tell(point, cost)
        for made in self._ledger.promotions():
            if made.promoted and made.trial in points and made.trial in self._costs_us:
                cost = self._costs_us[made.trial]
                self.best = Best(points[made.trial], cost, made.trial)

    def _remember(self, trial_id: int, verdicts: Mapping[str, Any], cost: float | None) -> None:
        if cost is not None:
            self._costs_us[trial_id] = cost
        compiled = verdicts.get("compiled", {}).get("digest")
        if compiled:
            self._trial_of_digest.setdefault(compiled, trial_id)

    # -- the starting point ------------------------------------------------------------------

    def _prepare(self) -> None:
        self._compile_now(self._target.prerequisites(), "the plan to start from")

    def _compile_now(self, jobs: list[Job], what: str) -> dict[str, str]:
        """Compiles and waits; returns the digests. Raises TuneError naming what failed."""
        digests: dict[str, str] = {}
        for number, job in enumerate(jobs):
            self._pool.submit((None, number), job.function, *job.arguments)
        while self._pool.pending:
            for tag, answer in self._pool.poll(_WAIT_S):
                owner, number = tag
                if owner is not None:
                    self._take_compiled(tag, answer)
                    continue
                name = jobs[number].name
                if answer.status != "ok":
                    raise TuneError(f"{what}: {name} does not compile: {answer.error}")
                digests[name] = answer.result["digest"]
        return digests

    def _measure_start(self) -> None:
        """The starting point against itself: its cost, and that it passes the gates at all."""
        start = self._target.start
        digests = self._compile_now(self._target.jobs(start), "the plan to start from")
        found = self._measure(start)
        if found.status != "passed":
            raise TuneError(f"the plan to start from is {found.status}: {found.reason}")
        samples = self._target.samples_us(found.arms, "candidate_us")
        cost = statistics.median(samples)
        compiled = joint_digest(digests)
        verdicts = {
            **found.verdicts,
            "compiled": {"digest": compiled},
            "relative": {"ratio": 1.0, "cost_us": cost},
            "noise": {"samples": found.noise},
        }
        candidate = {**self._target.candidate(start), **self._target.winner(start)}
        trial = self._trial(start, BASELINE, "passed", "", found, samples, verdicts, candidate)
        trial_id = self._ledger.record(trial)
        self.start_us, self.best = cost, Best(start, cost, trial_id)
        self._tell(start, cost)
        self._count(trial_id, trial)

    # -- compiling ahead ---------------------------------------------------------------------

    def _compile_ahead(self) -> None:
        """Keeps every compile process busy, and two candidates waiting for the device."""
        limit = self._pool.size + 2
        while not self._is_exhausted and len(self._in_flight) + len(self._ready) < limit:
            asked = self.new_trials + len(self._in_flight) + len(self._ready)
            if asked >= self._budget.max_trials:
                return
            point = self._agent.ask()
            if point is None:
                self._is_exhausted = True
                return
            asker = getattr(self._agent, "asker", lambda _: self._agent.name)(point)
            if self._ledger.find(self._target.key(point)) is not None:
                self._agent.tell(point, None)  # found by another writer meanwhile
                continue
            jobs = self._target.jobs(point)
            self._in_flight[point] = _InFlight(point, asker, len(jobs))
            for job in jobs:
                self._pool.submit((point, job.name), job.function, *job.arguments)

    def _take_compiled(self, tag: Any, answer: Answer) -> None:
        point, name = tag
        flight = self._in_flight[point]
        flight.missing -= 1
        if answer.status == "ok":
            flight.digests[name] = answer.result["digest"]
            for phase in ("lower_s", "compile_s"):
                spent = flight.spent.get(phase[:-2], 0.0) + answer.result[phase]
                flight.spent[phase[:-2]] = spent
        else:
            flight.error = flight.error or f"{name}: {answer.error}"
            flight.timeout = flight.timeout or answer.status == "timeout"
        if not flight.missing:
            self._ready.append(self._in_flight.pop(point))

    # -- one trial ---------------------------------------------------------------------------

    def _finish(self, flight: _InFlight) -> None:
        """Measures a compiled candidate and records what became of it."""
        if flight.error:
            status = "timeout" if flight.timeout else "compile_error"
            found = Measurement(status, flight.error)
            self._record(flight, found, None, {})
            return
        compiled = joint_digest(flight.digests)
        verdicts: dict[str, Any] = {"compiled": {"digest": compiled}}
        same = self._trial_of_digest.get(compiled)
        if same is not None:
            found = Measurement("duplicate", f"the same compiled program as trial {same}")
            cost = self._costs_us.get(same)
            verdicts["relative"] = {"same_as": same, "cost_us": cost}
            self._record(flight, found, None, verdicts)
            return
        found = self._measure(flight.point)
        verdicts |= found.verdicts
        decision = None
        if found.arms:
            verdicts["relative"] = self._relative(found.arms)
        if found.status == "passed":
            found, decision = self._decided(flight.point, found)
            verdicts |= found.verdicts
        self._record(flight, found, decision, verdicts)

    def _measure(self, point: Point) -> Measurement:
        if self._share_cores:
            self._pool.pause()
        try:
            found = self._measurer.measure(*self._target.measured(point, self.best.point))
        finally:
            self._pool.resume()
        if found.noise:
            self._noise_floor = max(floors(found.noise).values())
        return found

    def _relative(self, arms: Mapping[str, Any]) -> dict[str, float]:
        """The candidate's cost as its paired ratio to the incumbent's: drift drops out."""
        ours = statistics.median(self._target.samples_us(arms, "candidate_us"))
        theirs = statistics.median(self._target.samples_us(arms, "incumbent_us"))
        reference = self.best.cost_us if self.best.trial else theirs
        return {"ratio": ours / theirs, "cost_us": reference * ours / theirs}

    def _decided(self, point: Point, found: Measurement) -> tuple[Measurement, Promotion]:
        """The decision on a timed candidate; one that would win is judged by all gates first."""
        evidence: dict[str, Any] = {
            "arms": found.arms,
            "noise": found.noise,
            "max_pairs": self._effort.max_pairs,
        }
        if decide(evidence)[0]:
            judged = self._judge(point, found.arms)
            evidence |= self._target.winner(point)
            if judged.reason:  # also of one that passed: it is not worth more than that
                evidence["refused"] = judged.reason
                found = dataclasses.replace(found, status=judged.status, reason=judged.reason)
            verdicts = {**found.verdicts, "all gates": dict(judged.verdicts)}
            found = dataclasses.replace(found, verdicts=verdicts)
        promoted, evidence["reason"] = decide(evidence)
        incumbent = self.best.trial or None
        return found, Promotion(0, incumbent, RULE, promoted, evidence)

    def _judge(self, point: Point, arms: Mapping[str, Any]) -> Measurement:
        """What all gates say of a candidate with these samples; a reason forbids a promotion."""
        try:
            self._compile_now(self._target.final_jobs(point), "the winner")
        except TuneError as error:
            return Measurement("compile_error", str(error))
        return self._measurer.judge(self._target.judged(point))

    def _record(
        self,
        flight: _InFlight,
        found: Measurement,
        decision: Promotion | None,
        verdicts: Mapping[str, Any],
    ) -> None:
        samples = self._target.samples_us(found.arms, "candidate_us") if found.arms else []
        found = dataclasses.replace(found, spent={**flight.spent, **found.spent})
        trial = self._trial(
            flight.point, flight.agent, found.status, found.reason, found, samples, verdicts
        )
        trial_id = self._ledger.record(trial, decision)
        cost = verdicts.get("relative", {}).get("cost_us")
        self._remember(trial_id, verdicts, cost)
        if decision is not None and decision.promoted:
            self.best = Best(flight.point, float(cost), trial_id)
        self._tell(flight.point, cost)
        self._count(trial_id, trial)

    def _trial(
        self,
        point: Point,
        agent: str,
        status: str,
        reason: str,
        found: Measurement,
        samples: list[float],
        verdicts: Mapping[str, Any],
        candidate: Mapping[str, Any] | None = None,
    ) -> Trial:
        return Trial(
            key=self._target.key(point),
            target=self._target.name,
            candidate=candidate or self._target.candidate(point),
            agent=agent,
            status=status,
            reason=reason,
            samples_us=tuple(samples),
            predicted_us=self._target.predicted_us(point),
            verdicts=verdicts,
            spent=found.spent,
            parent=self.best.trial or None,
        )

    def _tell(self, point: Point, cost_us: float | None) -> None:
        """The starting point may lie outside the space: another kernel, or XLA."""
        if point in self._target.space:
            self._tried[point] = cost_us
            self._agent.tell(point, cost_us)

    def _count(self, trial_id: int, trial: Trial) -> None:
        self.new_trials += 1
        self._known += 1
        last = dataclasses.replace(trial, id=trial_id)
        self._on_trial(Progress(self._known, self.new_trials, self.start_us, self.best, last))
