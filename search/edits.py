"""Edits of a plan: what a candidate changes. Small, ordered, composable, replayable from JSON.

An edit is data. `apply` makes the edited plan or raises ScheduleError before anything is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import REFERENCE_NAME, Choice, Kernel, Schedule, Workload
from polyjax.core.plan import Bucket, BucketLadder, Plan

KINDS = ("schedule", "kernel", "reference", "compiler_option", "ladder", "mesh")


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of a plan.

    kind "schedule": `target` is a workload key, `value` the schedule fields to change.
    kind "kernel": `target` is a workload key, `value` {"kernel": name} (its default schedule).
    kind "reference": `target` is a workload key; the reference takes over (composites fall apart).
    kind "compiler_option": `target` is the option, `value` {"value": text or None to remove it}.
    kind "ladder": `target` is "decode", "prefill" or "sampler_sequences", `value` {"add": [...],
    "remove": [...]} with buckets as [tokens, sequences, pages], or plain sizes for samplers.
    kind "mesh": `value` maps mesh axes to sizes.
    """

    kind: str
    target: str
    value: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "target": self.target, "value": _thaw(dict(self.value))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Edit:
        """Returns the edit. Raises ConfigError on an unknown kind or shape."""
        try:
            edit = cls(data["kind"], data["target"], _freeze(data["value"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"malformed edit {data!r}: {error!r}") from error
        if edit.kind not in KINDS:
            raise ConfigError(f"unknown edit kind {edit.kind!r}; known: {', '.join(KINDS)}")
        return edit


def edit(kind: str, target: str = "", **value: Any) -> Edit:
    """Returns an Edit; `value` as keyword arguments."""
    return Edit.from_json({"kind": kind, "target": target, "value": value})


def _freeze(value: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    def frozen(item: Any) -> Any:
        return tuple(frozen(i) for i in item) if isinstance(item, list | tuple) else item

    return tuple(sorted((key, frozen(item)) for key, item in value.items()))


def _thaw(value: Mapping[str, Any]) -> dict[str, Any]:
    def thawed(item: Any) -> Any:
        return [thawed(i) for i in item] if isinstance(item, tuple) else item

    return {key: thawed(item) for key, item in value.items()}


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What legality depends on besides the plan: the step's workloads, kernels, chip and devices.

    `compiler_options` maps each option that may be searched to its legal values.
    """

    workloads: Mapping[str, Workload]
    catalogue: Mapping[str, Kernel]
    chip: ChipSpec
    compiler_options: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    num_devices: int = 1


def apply(plan: Plan, edits: Sequence[Edit], around: Surroundings) -> Plan:
    """Returns the plan after all `edits`, in order. Raises ScheduleError with the first reason."""
    for change in edits:
        plan = _APPLY[change.kind](plan, change, around)
    return plan


def _apply_schedule(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    choices = dict(plan.choices)
    if choices.get(change.target, Choice(REFERENCE_NAME)).kernel == REFERENCE_NAME:
        raise ScheduleError(f"{change.target} runs its reference; it has no schedule to change")
    choice = choices[change.target]
    kernel = _kernel(choice.kernel, around)
    fields = {**dict(choice.schedule), **dict(change.value)}
    return _choose(plan, change.target, kernel, kernel.schedule_type.from_json(fields), around)


def _apply_kernel(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    kernel = _kernel(dict(change.value)["kernel"], around)
    workload = _workload(change.target, around)
    reason = kernel.supports(workload)
    if kernel.op.name != workload.op or reason:
        raise ScheduleError(f"{kernel.name} cannot compute {change.target}: {reason or 'other op'}")
    schedule = kernel.default(workload, around.chip)
    return _choose(plan, change.target, kernel, schedule, around)


def _apply_reference(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    choices = dict(plan.choices)
    if choices.pop(change.target, Choice(REFERENCE_NAME)).kernel == REFERENCE_NAME:
        raise ScheduleError(f"{change.target} runs its reference already")
    if plan.unlisted != REFERENCE_NAME:
        choices[change.target] = Choice(REFERENCE_NAME)
    return dataclasses.replace(plan, choices=tuple(sorted(choices.items())))


def _apply_compiler_option(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    options, value = dict(plan.compiler_options), dict(change.value)["value"]
    legal = around.compiler_options.get(change.target, ())
    if value is None:
        options.pop(change.target, None)
    elif value in legal:
        options[change.target] = value
    else:
        raise ScheduleError(f"compiler option {change.target}={value} is none of {legal}")
    return dataclasses.replace(plan, compiler_options=tuple(sorted(options.items())))


def _apply_ladder(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    if plan.ladder is None:
        raise ScheduleError("the plan has no ladder of its own to edit")
    parts = dataclasses.asdict(plan.ladder)
    if change.target not in parts:
        raise ScheduleError(f"a ladder has no part {change.target!r}")
    of = int if change.target == "sampler_sequences" else _bucket
    current: set[Any] = set(getattr(plan.ladder, change.target))
    value = dict(change.value)
    added: set[Any] = {of(v) for v in value.get("add", ())}
    removed: set[Any] = {of(v) for v in value.get("remove", ())}
    if removed - current:
        raise ScheduleError(f"the ladder has no {sorted(removed - current)}")
    if change.target == "decode" and any(b.tokens != 1 for b in added):
        raise ScheduleError("decode buckets hold one new token a sequence")
    part: Any = tuple(sorted((current - removed) | added))
    ladder = dataclasses.replace(plan.ladder, **{change.target: part})
    _check_ladder(plan.ladder, ladder)
    return dataclasses.replace(plan, ladder=ladder)


def _bucket(sizes: Sequence[int]) -> Bucket:
    return Bucket(*sizes)


def _check_ladder(before: BucketLadder, after: BucketLadder) -> None:
    """Every step that fitted before must fit after: the largest extents may not shrink."""
    for part in ("decode", "prefill"):
        old, new = getattr(before, part), getattr(after, part)
        for axis in ("tokens", "sequences", "pages"):
            most = max((getattr(b, axis) for b in new), default=0)
            if most < max((getattr(b, axis) for b in old), default=0):
                raise ScheduleError(f"{part}: no bucket is left for as many {axis} as before")
        covering = max(new, key=lambda b: (b.sequences, b.pages))
        if part == "decode" and covering.pages < max(b.pages for b in new):
            raise ScheduleError("decode: no bucket takes the most sequences at the longest context")
    if max(after.sampler_sequences) < max(before.sampler_sequences):
        raise ScheduleError("sampler_sequences: no size is left for as many sequences as before")


def _apply_mesh(plan: Plan, change: Edit, around: Surroundings) -> Plan:
    try:
        mesh = dataclasses.replace(plan.mesh, **dict(change.value))
    except TypeError as error:
        raise ScheduleError(f"mesh: {error}") from error
    if mesh.num_devices > around.num_devices:
        raise ScheduleError(f"mesh wants {mesh.num_devices} of {around.num_devices} devices")
    return dataclasses.replace(plan, mesh=MeshPlan(**dataclasses.asdict(mesh)))


_APPLY = {
    "schedule": _apply_schedule,
    "kernel": _apply_kernel,
    "reference": _apply_reference,
    "compiler_option": _apply_compiler_option,
    "ladder": _apply_ladder,
    "mesh": _apply_mesh,
}


def _choose(plan: Plan, key: str, kernel: Kernel, schedule: Schedule, around: Surroundings) -> Plan:
    kernel.check(_workload(key, around), schedule, around.chip)
    choices = dict(plan.choices)
    choices[key] = Choice(kernel.name, tuple(sorted(schedule.to_json().items())))
    return dataclasses.replace(plan, choices=tuple(sorted(choices.items())))


def _kernel(name: str, around: Surroundings) -> Kernel:
    if name not in around.catalogue:
        raise ScheduleError(f"no kernel {name!r} in the catalogue")
    return around.catalogue[name]


def _workload(key: str, around: Surroundings) -> Workload:
    if key not in around.workloads:
        raise ScheduleError(f"{key} is no workload of this step")
    return around.workloads[key]
