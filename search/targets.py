"""What a tuning run searches: a space of candidates, how each is compiled and measured, its key.

`PlanTarget` is a model's whole step, `OpTarget` one workload. Both say the same things, so that one
loop (`search.tuner`) serves both. Adding a kind of target is one class here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pallas_kernels import CATALOGUE
from polyjax.compiler.cache import source_digest
from polyjax.compiler.program import ProgramKey, ProgramRequest
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError
from polyjax.core.op import Kernel, Workload
from polyjax.core.plan import Plan
from search.compile_jobs import OpCandidate, compile_op, compile_step
from search.cost import Prediction
from search.cost.learned import CostModel
from search.digests import joint_digest
from search.edits import Edit, Surroundings, apply
from search.kernels import kernel_named, kernels_for
from search.ledger import digest
from search.op_bench import OpenedOp
from search.plan_bench import (
    OpenedPlan,
    PlanSetup,
    all_keys,
    program_plan,
    reference_plan,
    timed_keys,
    truth_keys,
)
from search.plan_space import COMPILER_OPTIONS, edits_of, knobs, plan_space
from search.space import Point, Space, legal_schedules

ELSEWHERE: Point = (("in force", "elsewhere"),)  # a starting point outside the space
PROTOCOL = 1  # how candidates are measured; trials of another protocol are not the same trials


@dataclasses.dataclass(frozen=True)
class Job:
    """One thing to compile: what it is called, and what a compile process runs."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Target(Protocol):
    """A search problem. `start` is what is in force when the search begins.

    It may lie outside the space: another kernel, or what XLA makes of the reference.
    """

    name: str
    space: Space
    start: Point

    def key(self, point: Point) -> str:
        """Names what a trial of the point would run; costs no tracing."""

    def candidate(self, point: Point) -> dict[str, Any]:
        """JSON that replays the point."""

    def point(self, candidate: Mapping[str, Any]) -> Point | None:
        """The point of a recorded candidate, or None if it belongs to another search."""

    def prerequisites(self) -> list[Job]:
        """What has to be compiled before the first candidate is measured."""

    def jobs(self, point: Point) -> list[Job]:
        """What has to be compiled before the point is measured."""

    def final_jobs(self, point: Point) -> list[Job]:
        """What has to be compiled besides before all gates judge the point."""

    def measured(self, point: Point, incumbent: Point) -> tuple[Any, ...]:
        """Arguments of the bench's `measure`."""

    def judged(self, point: Point) -> Any:
        """The argument of the bench's `judge`."""

    def samples_us(self, arms: Mapping[str, Any], arm: str) -> list[float]:
        """What one arm costs, pair by pair, from the samples of all groups."""

    def predicted_us(self, point: Point) -> float | None: ...

    def forecast(self, costs_us: Mapping[Point, float | None]) -> Prediction | None:
        """What may be left: a prediction of the points that are not in `costs_us`, or None.

        `costs_us` are the points tried, None where one failed; the prediction learns of them.
        """

    def winner(self, point: Point) -> dict[str, Any]:
        """What a promotion keeps of the point besides its samples."""


class PlanTarget:
    """The plan of one model on one traffic."""

    name = "plan"

    def __init__(self, setup: PlanSetup, opened: OpenedPlan, first_edits: Sequence[Edit] = ()):
        """`first_edits` change the plan to start from. Raises ScheduleError if they are illegal."""
        self.setup, self.opened = setup, opened
        options = COMPILER_OPTIONS.get(opened.platform, {})
        self.around = Surroundings(
            opened.workloads, CATALOGUE, chip(opened.device_kind), options, opened.num_devices
        )
        self.base = apply(opened.base, first_edits, self.around)
        choices = knobs(self.base, opened.traffic, opened.spec.page_size, opened.platform)
        if not choices:
            raise ConfigError("this plan has no knob to turn on this platform")
        self.space, self.plans, self.refused = plan_space(
            self.base, choices, self.around, setup.seed
        )
        self.start: Point = next(p for p, plan in self.plans.items() if plan == self.base)
        self.subject = digest(
            {
                "protocol": PROTOCOL,
                "source": source_digest(),
                "state": repr(dataclasses.replace(opened.spec, num_pages=())),
                "base": self.base.digest,
                "traffic": setup.traffic.digest,
            }
        )

    def key(self, point: Point) -> str:
        return digest({"subject": self.subject, "plan": self.plans[point].digest})

    def candidate(self, point: Point) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "model": self.setup.config.model or "",
            "point": dict(point),
            "edits": [edit.to_json() for edit in edits_of(point, self.base)],
        }

    def point(self, candidate: Mapping[str, Any]) -> Point | None:
        if candidate.get("subject") != self.subject:
            return None
        found = tuple((name, candidate["point"].get(name)) for name in self.space.fields)
        return found if found in self.space else None

    def prerequisites(self) -> list[Job]:
        return [
            *self._jobs(reference_plan(self.opened.base), truth_keys(self.opened)),
            *self.jobs(self.start),
        ]

    def jobs(self, point: Point) -> list[Job]:
        plan = self.plans[point]
        assert plan.ladder is not None
        return self._jobs(plan, timed_keys(self.opened, plan.ladder))

    def final_jobs(self, point: Point) -> list[Job]:
        plan, ladder = self.plans[point], self.opened.base.ladder
        assert plan.ladder is not None and ladder is not None
        return [
            *self._jobs(reference_plan(self.opened.base), all_keys(self.opened, ladder)),
            *self._jobs(plan, all_keys(self.opened, plan.ladder)),
        ]

    def measured(self, point: Point, incumbent: Point) -> tuple[Any, ...]:
        return self.plans[point], self.plans[incumbent]

    def judged(self, point: Point) -> Any:
        return self.plans[point]

    def samples_us(self, arms: Mapping[str, Any], arm: str) -> list[float]:
        """Microseconds a generated token takes."""
        rows = zip(*(arms[group][arm] for group in arms), strict=True)
        us_per_token = self.opened.traffic.us_per_token
        return [us_per_token(dict(zip(arms, row, strict=True))) for row in rows]

    def predicted_us(self, point: Point) -> float | None:
        return None

    def forecast(self, costs_us: Mapping[Point, float | None]) -> Prediction | None:
        return None

    def winner(self, point: Point) -> dict[str, Any]:
        return {"plan": self.plans[point].to_json(), "model": self.setup.config.model or ""}

    def _jobs(self, plan: Plan, keys: Sequence[ProgramKey]) -> list[Job]:
        compiled, spec = program_plan(plan), self.opened.spec
        return [
            Job(
                str(key),
                compile_step,
                (ProgramRequest(spec, compiled, key), self.setup.cache_directory),
            )
            for key in keys
        ]


class OpTarget:
    """One workload: the schedules of one kernel, or where there is none, forms that XLA compiles.

    `start` is a candidate in force; by default what a step runs without a kernel.
    """

    def __init__(
        self,
        workload: Workload,
        opened: OpenedOp,
        folder: Path,
        kernel_name: str = "",
        start: OpCandidate | None = None,
        cost_model: CostModel | None = None,
        kept: Callable[[OpCandidate], Mapping[str, Any]] = lambda winner: {},
    ):
        """`kernel_name` as `search.kernels` reads it; "" searches forms.

        `cost_model` predicts schedules. `kept` gives what a promotion keeps besides the choice.
        """
        self.name = workload.key
        self.workload, self.opened, self.folder = workload, opened, folder
        self.kernel_name = kernel_name
        self._kept = kept
        self.prior: Callable[[Point], float] | None = None
        self._cost_model = cost_model
        self.refused: Mapping[str, int] = {}
        if kernel_name:
            kernel = kernel_named(kernel_name)
            target = chip(opened.device_kind)
            self.space, self.refused = legal_schedules(kernel, workload, target)
            if cost_model is not None:
                self.prior = cost_model.prior(kernel, workload, self.space.points)
        else:
            self.space = form_space(opened.platform)
        self._start = start or OpCandidate(workload, form="platform")
        self.start = self._legal_point(self._start.to_json()) or ELSEWHERE

    def key(self, point: Point) -> str:
        facts = {"protocol": PROTOCOL, "source": _source_of(self.kernel_name)}
        return digest({**facts, "target": self.name, "candidate": self._op(point).to_json()})

    def candidate(self, point: Point) -> dict[str, Any]:
        return self._op(point).to_json()

    def point(self, candidate: Mapping[str, Any]) -> Point | None:
        own = self._start.to_json()
        if {name: candidate.get(name) for name in own} == own:
            return self.start
        return self._legal_point(candidate)

    def _legal_point(self, candidate: Mapping[str, Any]) -> Point | None:
        if candidate.get("kernel", "") != self.kernel_name:
            return None
        fields = candidate["schedule"] if self.kernel_name else _flat_form(candidate)
        found = tuple((name, fields.get(name)) for name in self.space.fields)
        return found if found in self.space else None

    def prerequisites(self) -> list[Job]:
        return self.jobs(self.start)

    def jobs(self, point: Point) -> list[Job]:
        arguments = (self._op(point), self.opened.chain, self.opened.avals, self._path(point))
        return [Job("chain", compile_op, arguments)]

    def final_jobs(self, point: Point) -> list[Job]:
        return []

    def measured(self, point: Point, incumbent: Point) -> tuple[Any, ...]:
        return self._path(point), self._path(incumbent)

    def judged(self, point: Point) -> Any:
        return self._op(point)

    def samples_us(self, arms: Mapping[str, Any], arm: str) -> list[float]:
        return [float(us) for us in arms["op"][arm]]

    def predicted_us(self, point: Point) -> float | None:
        """What the cost model says of a schedule; nothing of a form or another kernel."""
        return None if self.prior is None or point not in self.space else self.prior(point)

    def forecast(self, costs_us: Mapping[Point, float | None]) -> Prediction | None:
        """Of schedules only: no cost model knows forms."""
        if self._cost_model is None or not self.kernel_name:
            return None
        kernel = kernel_named(self.kernel_name)
        timed = {p: us for p, us in costs_us.items() if us is not None and p in self.space}
        self._cost_model.learn(kernel, self.workload, [*timed], np.array([*timed.values()]))
        rest = [point for point in self.space.points if point not in costs_us]
        return self._cost_model.predict(kernel, self.workload, rest)

    def winner(self, point: Point) -> dict[str, Any]:
        winner = self._op(point)
        device_kind = self.opened.device_kind
        return {"choice": winner.to_json(), "device_kind": device_kind, **self._kept(winner)}

    def _op(self, point: Point) -> OpCandidate:
        if point == ELSEWHERE:
            return self._start
        if self.kernel_name:
            return OpCandidate(self.workload, self.kernel_name, point)
        fields = dict(point)
        form = fields.pop("form")
        options = tuple((k, v) for k, v in sorted(fields.items()) if v)
        return OpCandidate(self.workload, form=form, options=options)

    def _path(self, point: Point) -> str:
        return str(self.folder / f"{self.key(point)}.chain")


def form_space(platform: str) -> Space:
    """Forms and compiler options of an op that no kernel computes; the platform's own form first.

    An option of "" is left to XLA.
    """
    points: list[Point] = [()]
    for name, values in COMPILER_OPTIONS.get(platform, {}).items():
        points = [(*point, (name, value)) for point in points for value in ("", *values)]
    forms = ("platform", "reference")
    return Space([tuple(sorted((*point, ("form", form)))) for form in forms for point in points])


def _flat_form(candidate: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: "" for names in COMPILER_OPTIONS.values() for name in names}
    return {"form": candidate.get("form"), **options, **candidate.get("options", {})}


def _source_of(kernel_name: str) -> str:
    """Digest of the text that a kernel is made of."""
    module, colon, _ = kernel_name.partition(":")
    if not colon:
        return source_digest()
    import importlib.util

    spec = importlib.util.find_spec(module)
    text = Path(spec.origin).read_bytes() if spec and spec.origin else b""
    return joint_digest({"core": source_digest(), module: hashlib.sha256(text).hexdigest()})


def tunable(workloads: Mapping[str, Workload], platform: str) -> list[tuple[Workload, Kernel]]:
    """Returns the workloads that kernels of this platform compute, costliest first, with each.

    Raises ConfigError where there are none.
    """
    pairs = [(w, kernel) for w in workloads.values() for kernel in kernels_for(w, platform)]
    if not pairs:
        raise ConfigError(
            f"no kernel of the catalogue runs on {platform}: tune the plan instead (--target=plan)"
        )
    return sorted(pairs, key=lambda pair: -_bytes_moved(pair[0], pair[1]))


def _bytes_moved(workload: Workload, kernel: Kernel) -> float:
    return kernel.op.bytes_moved(workload) if kernel.op.bytes_moved else 0.0
