"""Which programs a new plan shares with the one in force."""

import dataclasses
from typing import Any, cast

from polyjax.compiler.program import Kind, ProgramKey, StepProgram
from polyjax.core.buckets import Bucket
from polyjax.core.kernel_source import KernelSource, digest_of, kernel_name
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from polyjax.engine.programs import PlanPrograms, unaffected
from tests import tiny_llama

DECODE, PREFILL, READ = (
    ProgramKey(Kind.DECODE_GREEDY, Bucket(1, 4, 4)),
    ProgramKey(Kind.PREFILL, Bucket(16, 1, 16)),
    ProgramKey(Kind.READ_SCRATCH),
)
USED = {
    DECODE: (("stack[B=4]", "reference"), ("norm[M=4]", "reference"), ("head[M=4]", "fast")),
    PREFILL: (("norm[M=16]", "reference"),),
    READ: (),
}


def in_force(plan: Plan) -> PlanPrograms:
    nothing = cast(Any, None)
    programs = {
        key: StepProgram(key, plan.digest, nothing, used, nothing) for key, used in USED.items()
    }
    return PlanPrograms(plan, tiny_llama.LADDER, programs)


def shared(before: Plan, after: Plan) -> set[ProgramKey]:
    found = unaffected(in_force(before), after)
    assert {program.plan_digest for program in found.values()} <= {after.digest}
    return set(found)


BASE = Plan(choices=(("head[M=4]", Choice("fast", ())),))


def with_choice(key: str, kernel: str, **schedule: int) -> Plan:
    choices = dict(BASE.choices) | {key: Choice(kernel, tuple(schedule.items()))}
    return dataclasses.replace(BASE, choices=tuple(sorted(choices.items())))


def test_a_program_is_affected_by_choices_for_its_ops_alone() -> None:
    assert shared(BASE, BASE) == {DECODE, PREFILL, READ}
    assert shared(BASE, with_choice("norm[M=16]", "fast")) == {DECODE, READ}
    assert shared(BASE, with_choice("stack[B=4]", "whole")) == {PREFILL, READ}
    assert shared(BASE, with_choice("norm[M=99]", "fast")) == {DECODE, PREFILL, READ}
    assert shared(BASE, with_choice("head[M=4]", "fast", tile=2)) == {PREFILL, READ}
    assert shared(BASE, dataclasses.replace(BASE, choices=())) == {PREFILL, READ}


def test_another_ladder_affects_no_program_and_another_option_all() -> None:
    assert shared(BASE, dataclasses.replace(BASE, ladder=tiny_llama.LADDER)) == set(USED)
    assert not shared(BASE, dataclasses.replace(BASE, compiler_options=(("a", "1"),)))
    assert not shared(BASE, dataclasses.replace(BASE, numerics="quality"))


def test_another_text_of_a_kernel_file_is_another_kernel() -> None:
    plans = []
    for text in ("one", "two"):
        source = KernelSource("/k.py", digest_of(text))
        name = kernel_name(source.sha256, "norm")
        choices = (*BASE.choices, ("norm[M=16]", Choice(name, ())))
        plans.append(dataclasses.replace(BASE, choices=choices, sources=((name, source),)))
    assert shared(*plans) == {DECODE, READ}
