"""Tuning beside a server: what is measured better is proposed to it, and its verdict is final.

The server shadows, canaries, promotes and watches a proposal by itself. A trial enters the ledger
together with that verdict, so a killed tuner loses the trial in flight and nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.core.plan import Plan
from search.decisions import decide
from search.leases import Call
from search.ledger import Promotion
from search.measure import Measurement
from search.space import Point
from search.traffic import TrafficSpec
from search.tuner import Tuner

MIN_LAUNCHES = 50  # traffic of fewer launches says nothing yet
MAX_LINEAGE = 200  # characters the server takes
_POLL_S = 0.25
_QUANTILES = 16
_DRIFT = 2.0  # a mean that moved by this factor makes it other traffic

log = logging.getLogger("polyjax.tuner")


class PlanChanged(PolyjaxError):
    """The server runs another plan than the search stands at: an operator, or a rollback."""


@dataclasses.dataclass(frozen=True)
class ServerVerdict:
    """What the server made of a proposal; `told` is its last word, as JSON."""

    accepted: bool
    reason: str
    told: Mapping[str, Any]


class LiveServer:
    """The server's engine as the search sees it. Calls raise EngineDead when it is gone."""

    def __init__(self, call: Call, agent: str):
        self._call, self._agent = call, agent

    def plan(self) -> Plan:
        """The plan in force, its ladder spelled out."""
        plan = Plan.from_json(self._call("plan", {})["plan"])
        ladder = self._call("ladder", {})["ladder"]
        return Plan.from_json({**plan.to_json(), "ladder": ladder})

    def traffic(self, page_size: int, seed: int) -> TrafficSpec | None:
        """The traffic of its latest launches, or None if there were too few."""
        return observed_traffic(self._call("ladder", {})["launches"], page_size, seed)

    def propose(self, plan: Plan, lineage: str) -> ServerVerdict:
        """Returns once the plan has survived its watch, or was refused or rolled back."""
        payload = {"plan": plan.to_json(), "lineage": lineage[:MAX_LINEAGE], "agent": self._agent}
        try:
            told = self._call("plan/propose", payload)
            while not (verdict := _verdict(told)):
                time.sleep(_POLL_S)
                told = self._call("plan/proposal", {"proposal_id": told["proposal_id"]})
        except RequestError as error:
            return ServerVerdict(False, str(error), {})
        log.info("the server's word on %s: %s %s", plan.digest, told["stage"], verdict.reason)
        return verdict


def _verdict(told: Mapping[str, Any]) -> ServerVerdict | None:
    """What a proposal has come to; None while it is on its way."""
    stage, watch = told["stage"], told.get("watch") or {}
    if stage in ("refused", "rolled_back"):
        return ServerVerdict(False, f"{stage}: {told['reason']}", told)
    if stage != "current" or watch.get("state") == "running":
        return None
    survived = watch.get("state") == "survived"
    return ServerVerdict(survived, "" if survived else f"watch: {watch}", told)


class LiveTuner(Tuner):
    """The search's loop with the server's verdict in each decision for a candidate.

    `plan_of` makes the whole plan of a point. `unworthy` says from the samples of a point why a
    win would not be one in a step, "" if it may be: it is then not proposed.
    """

    def __init__(
        self,
        server: LiveServer,
        plan_of: Callable[[Point], Plan],
        *args: Any,
        unworthy: Callable[[Point, Mapping[str, Any]], str] = lambda point, arms: "",
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._server, self._plan_of, self._unworthy = server, plan_of, unworthy

    def _resume(self) -> None:
        """What was best when the ledger was last written is proposed to a server without it."""
        super()._resume()
        in_force = self._server.plan()
        if not self.best.trial or in_force == self._plan_of(self.best.point):
            return
        start = self._target.start
        if in_force != self._plan_of(start):
            raise PlanChanged(f"the server runs {in_force.digest}")
        lineage = f"trial {self.best.trial}, promoted before the server was started"
        if not self._server.propose(self._plan_of(self.best.point), lineage).accepted:
            trial = next(
                t.id for t in self._ledger.trials(self._target.name)
                if t.id is not None and t.key == self._target.key(start)
            )  # fmt: skip
            self.best = dataclasses.replace(
                self.best, point=start, cost_us=self.start_us, trial=trial
            )

    def _measure(self, point: Point) -> Measurement:
        self._check_in_force()
        return super()._measure(point)

    def _check_in_force(self) -> None:
        in_force = self._server.plan()
        if in_force != self._plan_of(self.best.point):
            raise PlanChanged(f"the server runs {in_force.digest}")

    def _judge(self, point: Point, arms: Mapping[str, Any]) -> Measurement:
        reason = self._unworthy(point, arms)
        return Measurement("passed", reason) if reason else super()._judge(point, arms)

    def _decided(self, point: Point, found: Measurement) -> tuple[Measurement, Promotion]:
        found, decision = super()._decided(point, found)
        if not decision.promoted:
            return found, decision
        self._check_in_force()  # nobody's change in the meantime is to be undone by a proposal
        verdict = self._server.propose(self._plan_of(point), self._lineage(point))
        verdicts = {**found.verdicts, "server": _evidence(verdict)}
        evidence = {**decision.evidence, "server": _evidence(verdict)}
        if not verdict.accepted:
            evidence["refused"] = f"the server: {verdict.reason}"
            # The agent hears that it failed: a plan the server does not take costs nothing less.
            ratio = self._relative(found.arms)["ratio"]
            verdicts["relative"] = {"ratio": ratio, "cost_us": None}
            found = dataclasses.replace(found, status="rejected", reason=evidence["refused"])
        promoted, evidence["reason"] = decide(evidence)
        found = dataclasses.replace(found, verdicts=verdicts)
        return found, dataclasses.replace(decision, promoted=promoted, evidence=evidence)

    def _lineage(self, point: Point) -> str:
        changed = [
            f"{name}={value}" for name, value in point if (name, value) not in self.best.point
        ]
        return f"after trial {self.best.trial}: {', '.join(changed)}"


def _evidence(verdict: ServerVerdict) -> dict[str, Any]:
    kept = ("digest", "stage", "canary", "watch")
    told = {name: verdict.told[name] for name in kept if name in verdict.told}
    return {"accepted": verdict.accepted, "reason": verdict.reason, **told}


def observed_traffic(
    launches: Mapping[str, Mapping[str, int]], page_size: int, seed: int
) -> TrafficSpec | None:
    """Traffic like the launches that a server counted; None if there were too few.

    Prompts are the prefill launches' new tokens, contexts reach as far as the decode launches'
    pages: an answer is as long as it takes for a place in its middle to lie there.
    """
    counts = {name: {int(k): n for k, n in launches[name].items()} for name in _COUNTED}
    if sum(counts["decode_sequences"].values()) < MIN_LAUNCHES or not counts["prefill_tokens"]:
        return None
    prompts = list(_quantiles(counts["prefill_tokens"]))
    contexts = [pages * page_size for pages in _quantiles(counts["decode_pages"])]
    answers = [
        max(2 * (context - prompt), 1) for context, prompt in zip(contexts, prompts, strict=True)
    ]
    rows = list(_quantiles(counts["decode_sequences"]))
    return TrafficSpec(
        tuple(prompts), tuple(answers), tuple(rows), decode_steps=4, prefill_steps=2, seed=seed
    )


_COUNTED = ("decode_sequences", "decode_pages", "prefill_tokens")


def _quantiles(counts: Mapping[int, int]) -> Iterator[int]:
    """Evenly spaced sizes of a histogram, ascending."""
    total, ordered = sum(counts.values()), sorted(counts.items())
    for number in range(_QUANTILES):
        rank, seen = (number + 0.5) / _QUANTILES * total, 0
        for size, count in ordered:
            seen += count
            if seen >= rank:
                yield size
                break


def has_drifted(before: TrafficSpec, now: TrafficSpec) -> bool:
    """Whether a search on the traffic before says little about the traffic now."""
    for name in ("prompt_tokens", "output_tokens", "concurrency"):
        ratio = statistics.mean(getattr(now, name)) / statistics.mean(getattr(before, name))
        if not 1 / _DRIFT < ratio < _DRIFT:
            return True
    return False
