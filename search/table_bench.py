"""Measures tables of schedules on this machine's device: compiled in workers, judged, timed.

Every schedule is noted as crashed before it runs and replaced by its result after: one that hangs
or kills the process is skipped by the run that goes on. `watched` starts that run.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from pallas_kernels.timing import COLD_BYTES, Chain, alternate
from pallas_kernels.tuning import load_chain
from pallas_kernels.verdict import kernels_of, workloads
from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ScheduleError
from polyjax.core.op import REFERENCE, Workload
from polyjax.core.ops import OPS
from polyjax.core.results import versions
from polyjax.gates.candidate import GateFailure, on_host
from polyjax.gates.inputs import Case, make_case, rng_of
from polyjax.gates.op_bounds import truth
from polyjax.gates.trial import judge_results
from search.chains import ChainSpec, chain_arguments, chained, plan_chain
from search.kernels import kernel_named
from search.space import Point, legal_schedules
from search.tables import Table, TableRow, TableWriter

SAMPLES, SAMPLE_MS = 5, 2.0
HUNG_S = 120.0  # a schedule that has not returned by then ends its process
AHEAD = 2  # chains a worker has compiled or is compiling beyond the one being timed
# Seconds of the device for one schedule: loading took 71 ms on an H200 (0.58 MB), warm-up and
# samples 20 ms; reading results back and judging them is the rest.
DEVICE_S = 0.2

Job = tuple[str, Point]  # kernel and schedule


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """A workload and every legal schedule of the kernels that compute it."""

    workload: Workload
    jobs: tuple[Job, ...]

    @property
    def device_minutes(self) -> float:
        return len(self.jobs) * DEVICE_S / 60


def plan_tables(
    ops: Sequence[str], per_op: int, min_schedules: int, target: ChipSpec, most: int = 0
) -> Iterator[TablePlan]:
    """Yields `per_op` workloads of each op with that many legal schedules, spread over its list.

    `most` above 0 keeps a seeded draw of so many schedules a table.
    """
    for op in ops:
        declared = dict.fromkeys(workloads(OPS[op]))  # models share some
        plans = (
            TablePlan(workload, _drawn(workload, jobs, most))
            for workload in _spread([*declared])
            if len(jobs := legal_jobs(workload, target)) >= min_schedules
        )
        yield from itertools.islice(plans, per_op)


def _spread(declared: Sequence[Workload]) -> list[Workload]:
    """Returns all, the first few far apart: a list of shapes goes from small to large models.

    Sorted by the reversed bits of their index (van der Corput's sequence).
    """
    bits = len(declared).bit_length()
    order = sorted(range(len(declared)), key=lambda i: f"{i:0{bits}b}"[::-1])
    return [declared[i] for i in order]


def _drawn(workload: Workload, jobs: Sequence[Job], most: int) -> tuple[Job, ...]:
    if not most or len(jobs) <= most:
        return tuple(jobs)
    kept = rng_of(workload, 0).permutation(len(jobs))[:most]
    return tuple(jobs[i] for i in sorted(kept.tolist()))


def legal_jobs(workload: Workload, target: ChipSpec) -> list[Job]:
    """Returns every legal schedule of every kernel of a workload's op."""
    jobs: list[Job] = []
    for kernel in kernels_of(workload.op):
        if kernel.supports(workload) is None:
            try:
                space, _ = legal_schedules(kernel, workload, target)
            except ScheduleError:  # none is legal
                continue
            jobs += [(kernel.name, point) for point in space.points]
    return jobs


# -- measuring one table ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A workload's inputs on the device, chained, and the truth of one call."""

    case: Case
    spec: ChainSpec
    arguments: tuple[Any, ...]
    wanted: Any


def prepare(workload: Workload, seed: int = 0, cold_bytes: int = COLD_BYTES) -> Prepared:
    """Random inputs; sequences fill their pages where there are page tables."""
    op = OPS[workload.op]
    case = make_case(op, workload, rng_of(workload, seed), "random", "full_pool")
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.args)
    static = dict(workload.static)
    results = jax.eval_shape(lambda *a: op.reference(REFERENCE, *a, **static), *avals)
    spec = plan_chain(avals, jax.tree.leaves(results), cold_bytes)
    return Prepared(case, spec, chain_arguments(case.args, spec), truth(case))


def compile_job(workload: Workload, job: Job, spec: ChainSpec, avals: Any) -> tuple[Any, ...]:
    """Returns a serialized chain; runs in a worker process."""
    kernel = kernel_named(job[0])
    schedule = kernel.schedule_type.from_json(dict(job[1]))
    call = kernel.build(workload, schedule)
    compiled = jax.jit(chained(call, spec)).lower(*avals).compile()
    return serialize_executable.serialize(compiled)


def measure_job(prepared: Prepared, job: Job, future: Future[Any]) -> TableRow:
    """Returns a schedule's row: judged on the inputs it is timed on, then timed."""
    kernel, point = job
    chain = load_chain(kernel, future, prepared.arguments)
    if not isinstance(chain, Chain):
        return TableRow(kernel, point, "compile_error", reason=chain)
    try:
        found = on_host(jax.block_until_ready(chain.compiled(*chain.arguments)))
        judge_results(prepared.case, found, prepared.wanted)
        samples = alternate([chain], SAMPLES, SAMPLE_MS)[chain.name]
    except GateFailure as failure:
        return TableRow(kernel, point, "rejected", reason=" ".join(str(failure).split())[:200])
    except Exception as error:  # a failed schedule is a result
        return TableRow(kernel, point, "crashed", reason=" ".join(repr(error).split())[:200])
    return TableRow(kernel, point, "passed", tuple(samples))


def fill(
    writer: TableWriter,
    jobs: Sequence[Job],
    submit: Callable[[Job], Future[Any]],
    measure: Callable[[Job, Future[Any]], TableRow],
    ahead: int,
) -> int:
    """Measures the jobs that the table lacks, compiling `ahead` of the one being timed.

    Returns how many were measured.
    """
    todo = [job for job in jobs if job not in writer.known]
    waiting: dict[Job, Future[Any]] = {}
    for number, job in enumerate(todo):
        for coming in todo[number : number + ahead]:
            if coming not in waiting:
                waiting[coming] = submit(coming)
        writer.add(TableRow(*job, "crashed", reason="the process ended while it was measured"))
        writer.add(measure(job, waiting.pop(job)))
    return len(todo)


def run(root: str, plans: Sequence[TablePlan], workers: int) -> None:
    """Measures tables one after the other; ends the process if a schedule hangs."""
    device = jax.devices()[0].device_kind
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for plan in plans:
            empty = Table(plan.workload, device, versions())
            writer = TableWriter(root, empty)
            if all(job in writer.known for job in plan.jobs):
                writer.close(finished=True)
                continue
            count = _run_table(writer, plan, pool, workers)
            writer.close(finished=True)
            passed = len(writer.table.passed())
            print(f"{plan.workload.key}: {count} measured, {passed} right", flush=True)


def _run_table(
    writer: TableWriter, plan: TablePlan, pool: ProcessPoolExecutor, workers: int
) -> int:
    prepared = prepare(plan.workload)
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), prepared.arguments)

    def submit(job: Job) -> Future[Any]:
        return pool.submit(compile_job, plan.workload, job, prepared.spec, avals)

    def measure(job: Job, future: Future[Any]) -> TableRow:
        future.exception()  # compiling may take as long as it likes
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        try:
            return measure_job(prepared, job, future)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return fill(writer, plan.jobs, submit, measure, AHEAD * workers)


def watched(
    root: str,
    plans: Sequence[TablePlan],
    workers: int,
    target: Callable[..., None] = run,
    restarts: int = 100,
) -> int:
    """Runs `target` in a process of its own, again after each end that was no success.

    Returns the exit code of the last: a run that measures nothing new is not repeated.
    """
    spawn = multiprocessing.get_context("spawn")
    code = 0
    for _ in range(restarts + 1):
        before = _sizes(root)
        process = spawn.Process(target=target, args=(root, plans, workers))
        process.start()
        process.join()
        code = process.exitcode or 0
        if code == 0 or _sizes(root) == before:
            break
    return code


def _sizes(root: str) -> Mapping[str, int]:
    return {str(p): p.stat().st_size for p in Path(root).glob("*/*.jsonl*")}
