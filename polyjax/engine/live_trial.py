"""A candidate beside live traffic: shadow steps first, then the paired canary."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from polyjax.compiler.program import Kind
from polyjax.engine.canary import PairedCanary, timed
from polyjax.engine.launcher import RunningStep
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.promotion import Policy
from polyjax.engine.shadow import GATE as SHADOW_GATE
from polyjax.engine.shadow import ShadowRunner
from polyjax.engine.state import DeviceState
from polyjax.engine.step import ScheduledStep
from polyjax.gates.equivalence import EquivalenceGate
from polyjax.gates.verdict import Verdict

_MIN_OF_EACH = 2  # shadow steps of prompts and of decodes
_PATIENCE = 5  # times the usual number of shadow steps, for traffic that has one of them only


class LiveTrial:
    """The stages of one candidate that need live batches. The scratch pages are theirs meanwhile.

    `shadowing` until enough shadow steps agreed; then `advance_canary` goes on.
    """

    def __init__(
        self,
        state: DeviceState,
        incumbent: PlanPrograms,
        candidate: PlanPrograms,
        gate: EquivalenceGate,
        policy: Policy,
        one_at_a_time: bool,
    ):
        self._incumbent = incumbent
        self._candidate = candidate
        self._policy = policy
        self._timer = timed(state)
        self._runner = ShadowRunner(state, incumbent, candidate, gate, one_at_a_time)
        self._steps_until_shadow = 0
        self._steps_without = 0  # since one was shadowed
        self._worst: dict[str, float] = {}
        self._cost_s = 0.0
        self.shadowing = True
        self.canary: PairedCanary | None = None

    def before_launch(self, step: ScheduledStep) -> None:
        """Chooses what to shadow of a step about to be launched, if it is time for that again."""
        self._steps_until_shadow -= 1
        self._steps_without += 1
        if self.shadowing and self._steps_until_shadow <= 0 and not self._runner.is_busy:
            self._runner.before_launch(step)

    def after_launch(self, running: RunningStep | None) -> None:
        """Runs the candidate on a copy of what was launched. Raises what it raises."""
        if running is None:
            self._runner.forget_launch()
        elif self._runner.after_launch(running):
            self._steps_until_shadow = self._policy.shadow_every
            self._steps_without = 0

    def collect(self) -> Verdict | None:
        """A failed shadow step, or the verdict on all of them once there were enough.

        Refuses a candidate where too many steps were nothing that can be shadowed.
        """
        verdict = self._runner.collect()
        if verdict is None:
            if self._steps_without <= self._policy.most_steps_without:
                return None
            reason = f"none of {self._steps_without} steps could be shadowed"
            return Verdict(SHADOW_GATE, False, reason)
        self._cost_s += verdict.cost_s
        for name in ("hidden_error", "kv_error", "differing_tokens"):
            if name in verdict.evidence:
                self._worst[name] = max(self._worst.get(name, 0), verdict.evidence[name])
        if not verdict.passed:
            return verdict
        if not self._has_seen_enough():
            return None
        self.shadowing = False
        self._runner.forget_launch()
        runs, counts = self._runner.runs, self._runner.shadowed
        self.canary = PairedCanary(self._incumbent, self._candidate, runs, counts, self._timer)
        return Verdict(SHADOW_GATE, True, "", self.evidence(), self._cost_s)

    def _has_seen_enough(self) -> bool:
        """Enough steps, prompts and decodes among them; without prompts it takes more of them."""
        shadowed, enough = self._runner.shadowed, self._policy.shadow_steps
        prefills = sum(n for key, n in shadowed.items() if key.kind is Kind.PREFILL)
        total = shadowed.total()
        both = min(prefills, total - prefills) >= _MIN_OF_EACH
        return total >= enough and (both or total >= _PATIENCE * enough)

    def advance_canary(self) -> Verdict | None:
        """Times one run; returns the verdict once there is one. Raises what a program raises."""
        assert self.canary is not None
        started_s = time.perf_counter()
        verdict = self.canary.advance()
        self._cost_s += time.perf_counter() - started_s
        return None if verdict is None else dataclasses.replace(verdict, cost_s=self._cost_s)

    def evidence(self) -> dict[str, Any]:
        """How many steps were shadowed by program, and the worst that was seen."""
        return {
            "shadowed": {str(key): count for key, count in self._runner.shadowed.items()},
            **self._worst,
        }
