"""The plan that nobody searched for: ladder and kernels by shapes alone, found once and kept.

Finding it traces every program of the ladder, seconds that a warm start has no use for: it lies
beside the compiled programs, under a digest of all it depends on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import jax

from pallas_kernels import CATALOGUE
from polyjax.compiler.buckets import (
    ACCELERATOR_POLICY,
    LIVE_PAGES_POLICY,
    LadderLimits,
    LadderPolicy,
    derive_ladder,
)
from polyjax.compiler.cache import source_digest
from polyjax.compiler.choose import ChoosingOps
from polyjax.compiler.program import ProgramRequest, abstract_call, program_keys
from polyjax.compiler.state import StateSpec
from polyjax.core.buckets import BucketLadder
from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from polyjax.core.whole_file import write_whole

GATHERING_OPS = frozenset({"paged_attention", "latent_attention"})
"""Ops whose references gather a row's whole page table, where kernels read its live pages."""

log = logging.getLogger("polyjax.compiler")


@dataclasses.dataclass(frozen=True)
class PlanSubject:
    """What a default plan is for."""

    spec: StateSpec
    limits: LadderLimits
    max_buckets: int
    mesh: MeshPlan
    chip: ChipSpec
    table: Mapping[str, Choice]

    @property
    def digest(self) -> str:
        table = sorted((key, repr(choice)) for key, choice in self.table.items())
        # The chip by name: its features are a set, whose repr differs from process to process.
        parts = (self.spec, self.limits, self.max_buckets, self.mesh, self.chip.name, table)
        text = json.dumps([source_digest(), jax.__version__, *map(repr, parts)])
        return hashlib.sha256(text.encode()).hexdigest()[:40]


def default_plan(subject: PlanSubject, directory: Path) -> Plan:
    """Returns the default plan, from `directory` if it was found before.

    Where kernels read live pages in every program, the plan brings a ladder with few context
    widths; else its ladder is None, the engine's own. Raises ConfigError as `derive_ladder` does.
    """
    path = directory / f"default-{subject.digest}.plan.json"
    try:
        return Plan.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        log.warning("%s is not used: %r", path, error)
    plan = _found(subject)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, json.dumps(plan.to_json()).encode(), mode=0o600)
    except OSError as error:
        log.warning("%s: %s; the plan will be looked for again next time", path, error)
    return plan


def _found(subject: PlanSubject) -> Plan:
    ladder = _ladder(subject, LIVE_PAGES_POLICY)
    ops = _choose(subject, ladder)
    if any(workload.op in GATHERING_OPS for workload in ops.unchosen):
        ladder = _ladder(subject, ACCELERATOR_POLICY)
        return _plan(subject, None, _choose(subject, ladder))
    return _plan(subject, ladder, ops)


def _ladder(subject: PlanSubject, policy: LadderPolicy) -> BucketLadder:
    return derive_ladder(subject.limits, policy, subject.max_buckets)


def _plan(subject: PlanSubject, ladder: BucketLadder | None, ops: ChoosingOps) -> Plan:
    choices = tuple(sorted(ops.choices.items()))
    return Plan(choices=choices, mesh=subject.mesh, ladder=ladder, unlisted="default")


def _choose(subject: PlanSubject, ladder: BucketLadder) -> ChoosingOps:
    """The ops object of a trace of every program of a ladder, for shapes only."""
    ops = ChoosingOps(CATALOGUE, subject.chip, subject.table)
    base, mesh = Plan(mesh=subject.mesh), subject.mesh.mesh()
    keys = program_keys(ladder, fused_gumbel=True)
    ops.trace(abstract_call(ProgramRequest(subject.spec, base, key), mesh) for key in keys)
    return ops
