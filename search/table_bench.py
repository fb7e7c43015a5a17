"""Measures tables of schedules: every schedule of a list, each as the tuner measures a trial.

Compiled in the pool (`search.compile_jobs`), then judged on the inputs it is timed on and paired
with an incumbent in the measuring process (`search.op_bench`). The incumbent is the table's first
schedule and stays, so that it shows the device's drift; nothing is promoted, so the gates that only
winners face are not run. Compiling goes on while the device measures, across tables. A row is on
the disk when its trial ends: a run goes on where one stopped.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.op import Workload
from polyjax.core.results import Result, measured, versions
from search.chains import ChainSpec
from search.compile_jobs import OpCandidate, compile_op
from search.compile_pool import CompilePool
from search.decisions import floors
from search.job_process import Answer
from search.kernels import kernel_named
from search.measure import MeasureError, Measurement, MeasuringProcess
from search.measure_jobs import describe_workload
from search.op_bench import OpSetup
from search.paired import Effort
from search.space import Point, legal_schedules
from search.tables import Table, TableRow, TableWriter

AHEAD = 12  # chains a worker has compiled, or is compiling, beyond the one being measured
MIN_OF_A_VALUE = 4  # rows that have each value of each field, where the space has as many
TRIAL_TIMEOUT_S = 15.0  # a trial takes 0.2 s; a schedule that hangs ends its process after this
HOPELESS = 24  # trials of a table that all fail before it is left
_WAIT_S = 0.005

TRIALS_PER_HOUR, TRIAL_ON_DEVICE = (
    "search_gated_kernel_trials_per_hour",
    "search_kernel_trial_on_device_s",
)

Tag = tuple[int, int]  # table, and place of a point in it

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The schedules of one kernel that a workload's table has; the first is the incumbent."""

    workload: Workload
    kernel: str
    points: tuple[Point, ...]


def plan_table(workload: Workload, kernel: str, chip: ChipSpec, count: int, seed: int) -> TablePlan:
    """Returns the kernel's default and a seeded draw of its legal schedules, `count` together.

    Raises ConfigError if there are fewer.
    """
    implementation = kernel_named(kernel)
    space, _ = legal_schedules(implementation, workload, chip)
    if len(space) < count:
        raise ConfigError(f"{workload.key}: {kernel} has {len(space)} legal schedules, not {count}")
    default = tuple(sorted(implementation.default(workload, chip).to_json().items()))
    return TablePlan(workload, kernel, stratified(space.points, count, seed, default))


def stratified(
    points: Sequence[Point], count: int, seed: int, first: Point = ()
) -> tuple[Point, ...]:
    """Returns `count` points in a random order; each value of each field is among them.

    `first` comes first if it is one of the points. Equal for equal seeds.
    """
    order = list(points)
    random.Random(seed).shuffle(order)
    leading = [first] if first in points else []
    chosen = dict.fromkeys(leading)
    seen: dict[tuple[str, Any], int] = {}
    for point in order:  # rare values first
        if any(seen.get(pair, 0) < MIN_OF_A_VALUE for pair in point):
            chosen[point] = None
            seen |= {pair: seen.get(pair, 0) + 1 for pair in point}
    drawn = [*dict.fromkeys([*chosen, *order])][len(leading) : count]
    random.Random(seed).shuffle(drawn)
    return (*leading, *drawn)


@dataclasses.dataclass
class Spent:
    """Where the time of trials went: seconds by phase, summed over trials.

    Those of "lower" and "compile" passed in a compile process, the others on the device's side.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    trials: int = 0

    def add(self, *phases: Mapping[str, float], trials: int = 1) -> None:
        self.trials += trials
        for name, value in (pair for phase in phases for pair in phase.items()):
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @property
    def on_device_s(self) -> float:
        """Seconds of the device a trial: loading, gate, noise and timing."""
        total = sum(s for name, s in self.seconds.items() if name not in ("lower", "compile"))
        return total / max(self.trials, 1)

    def __str__(self) -> str:
        mean = {name: value / max(self.trials, 1) for name, value in self.seconds.items()}
        return "seconds a trial: " + ", ".join(f"{name} {s:.3f}" for name, s in mean.items())


@dataclasses.dataclass
class Work:
    """One table on its way. `todo` are the places of the points to measure, the incumbent's first.

    `digests`, `spent`, `begun_s` and `ended_s` are of this run: distinct programs that were judged
    and timed, where the time went, and the seconds since the run's first compile at which the table
    was begun and ended.
    """

    plan: TablePlan
    writer: TableWriter
    chain: ChainSpec
    avals: Any
    digests: set[str] = dataclasses.field(default_factory=set)
    spent: Spent = dataclasses.field(default_factory=Spent)
    begun_s: float = math.nan
    ended_s: float = math.nan

    def __post_init__(self) -> None:
        known = self.writer.known
        keys = [(self.plan.kernel, point) for point in self.plan.points]
        lacking = [place for place, key in enumerate(keys) if key not in known]
        self.todo = [0, *(place for place in lacking if place)] if lacking else []

    @property
    def missing(self) -> int:
        known = self.writer.known
        return sum((self.plan.kernel, point) not in known for point in self.plan.points)

    @property
    def rate_per_hour(self) -> float:
        return len(self.digests) / (self.ended_s - self.begun_s) * 3600

    def close(self, log: Log) -> None:
        """Ends the table: a whole one becomes its compressed file."""
        self.writer.close(finished=not self.missing)
        log(self.line())

    def line(self) -> str:
        table = self.writer.table
        us = sorted(row.us for row in table.passed()) or [math.nan]
        return (
            f"{len(table.passed()):4} timed {len(table.rows) - len(table.passed()):3} failed "
            f"{self.missing:3} missing  best {us[0]:8.2f} us  median {us[len(us) // 2]:8.2f} us  "
            f"A/A floor {table.noise_floor:6.2%}  drift {drift(table):6.2%}  {table.workload.key}"
        )


def drift(table: Table) -> float:
    """Middle 90 % of the incumbent's times over a table, as a share of their median."""
    us = sorted(row.incumbent_us for row in table.rows if row.incumbent_us)
    if len(us) < 20:
        return math.nan
    return (us[len(us) * 95 // 100] - us[len(us) * 5 // 100]) / statistics.median(us)


class TableBench:
    """One run over some tables: what is compiled ahead, what is measured, how long it takes."""

    def __init__(
        self,
        root: str | Path,
        plans: Sequence[TablePlan],
        pool: CompilePool,
        measurer: MeasuringProcess,
        effort: Effort,
        deadline_s: float = math.inf,
        log: Log = print,
    ):
        """`deadline_s` of time.monotonic(): nothing is begun after it."""
        self._root, self._plans, self._effort = root, plans, effort
        self._pool, self._measurer = pool, measurer
        self._deadline_s, self._log = deadline_s, log
        self._device_side = ThreadPoolExecutor(1)  # the other thread keeps the pool at work
        self._answers: dict[Tag, Answer] = {}
        self._ahead: set[Tag] = set()  # submitted and not measured yet
        self._left: set[int] = set()
        self._begun_s = math.nan

    def run(self) -> list[Work]:
        """Measures the tables in order; those that time does not suffice for keep what they had.

        A table whose bench cannot be opened, or whose first schedules all fail, is left with a
        word. Raises MeasureError if the compile processes cannot say what the chains look like.
        """
        with (
            tempfile.TemporaryDirectory(prefix="polyjax-chains-") as folder,
            self._device_side,
        ):
            self._folder = Path(folder)
            tables = self._described()
            self._coming = self._jobs(tables)
            self._begun_s = time.monotonic()
            open_ = list(tables)
            try:
                for number, work in enumerate(tables):
                    if work.todo and not self._is_over():
                        try:
                            self._measure_table(number, work)
                        except MeasureError as error:
                            self._leave(number, error)
                    open_.pop(0).close(self._log)
            finally:
                for work in open_:
                    work.close(self._log)
        return tables

    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline_s

    def _described(self) -> list[Work]:
        """The tables' chains, asked of the workers before any candidate runs in one of them."""
        for number, plan in enumerate(self._plans):
            self._pool.submit(number, describe_workload, plan.workload)
        found = {}
        while self._pool.pending:
            for number, answer in self._pool.poll(1.0):
                if answer.status != "ok":
                    raise MeasureError(f"{self._plans[number].workload.key}: {answer.error}")
                found[number] = pickle.loads(base64.b64decode(answer.result))
        tables = []
        for number, plan in enumerate(self._plans):
            device_kind, chain, avals = found[number]
            writer = TableWriter(self._root, Table(plan.workload, device_kind, versions()))
            tables.append(Work(plan, writer, chain, avals))
        return tables

    def _leave(self, number: int, error: MeasureError) -> None:
        """Says why a table is given up; what is compiled for it no longer counts as ahead."""
        self._log(f"left: {self._plans[number].workload.key}: {error}")
        self._left.add(number)
        self._ahead = {tag for tag in self._ahead if tag[0] != number}

    # -- compiling ahead ---------------------------------------------------------------------

    def _jobs(self, tables: Sequence[Work]) -> Iterator[tuple[Tag, tuple[Any, ...]]]:
        """All that has to be compiled, in the order in which it is measured."""
        for number, work in enumerate(tables):
            for place in work.todo:
                if number in self._left:
                    break
                plan, tag = work.plan, (number, place)
                candidate = OpCandidate(plan.workload, plan.kernel, plan.points[place])
                yield tag, (candidate, work.chain, work.avals, self._path(tag))

    def _path(self, tag: Tag) -> str:
        return str(self._folder / f"{tag[0]}-{tag[1]}.chain")

    def _feed(self, wait_s: float) -> None:
        """Keeps the compile processes busy and takes their answers, for up to `wait_s`."""
        while len(self._ahead) < AHEAD * self._pool.size and not self._is_over():
            tag, arguments = next(self._coming, (None, ()))
            if tag is None:
                break
            self._pool.submit(tag, compile_op, *arguments)
            self._ahead.add(tag)
        for tag, answer in self._pool.poll(wait_s):
            self._answers[tag] = answer
        if not self._pool.pending:
            time.sleep(wait_s)

    def _on_device(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a call of the measuring process while the pool is fed."""
        future = self._device_side.submit(call, *arguments)
        while not future.done():
            self._feed(_WAIT_S)
        return future.result()

    def _compiled(self, tag: Tag) -> Answer | None:
        """Waits for a chain; None where the run is over before it is there."""
        while tag not in self._answers:
            if self._is_over():
                return None
            self._feed(_WAIT_S)
        return self._answers[tag]

    # -- measuring ---------------------------------------------------------------------------

    def _measure_table(self, number: int, work: Work) -> None:
        work.begun_s = time.monotonic() - self._begun_s
        seed = int.from_bytes(os.urandom(4))  # inputs that no candidate can have been made for
        self._on_device(self._measurer.open, OpSetup(work.plan.workload, seed, self._effort))
        incumbent = self._compiled((number, 0))
        if incumbent is not None and incumbent.status != "ok":
            raise MeasureError(f"{work.plan.workload.key}: the default schedule: {incumbent.error}")
        for place in work.todo:
            answer = self._compiled((number, place))
            if answer is None:
                return
            self._ahead.discard((number, place))
            if (work.plan.kernel, work.plan.points[place]) not in work.writer.known:
                work.writer.add(self._row(work, (number, place), answer))
            if place:
                Path(self._path((number, place))).unlink(missing_ok=True)
            work.ended_s = time.monotonic() - self._begun_s
            rows = work.writer.table.rows
            if len(rows) == HOPELESS and not work.writer.table.passed():
                raise MeasureError(f"the first {HOPELESS} schedules all fail: {rows[-1].reason}")

    def _row(self, work: Work, tag: Tag, answer: Answer) -> TableRow:
        """One trial."""
        kernel, point = work.plan.kernel, work.plan.points[tag[1]]
        if answer.status != "ok":
            status = "timeout" if answer.status == "timeout" else "compile_error"
            return TableRow(kernel, point, status, reason=answer.error[:200])
        found = self._on_device(self._measurer.measure, self._path(tag), self._path((tag[0], 0)))
        compiling = {name[:-2]: answer.result[name] for name in ("lower_s", "compile_s")}
        work.spent.add(compiling, found.spent)
        digest = answer.result["digest"]
        if not found.arms:
            reason = found.reason[:200]
            return TableRow(kernel, point, found.status, reason=reason, digest=digest)
        work.digests.add(digest)
        work.writer.table = dataclasses.replace(
            work.writer.table, noise_floor=floors(found.noise)["op"]
        )
        return timed_row(kernel, point, found, digest)


def timed_row(kernel: str, point: Point, found: Measurement, digest: str) -> TableRow:
    """Returns the row of a judged and timed trial.

    Of one that was left for being far behind the incumbent, the later of its first two runs counts:
    in the earlier one XLA records its command buffer.
    """
    arms = found.arms["op"]
    slow = found.status == "slow"
    samples = [min(arms["candidate_us"])] if slow else arms["candidate_us"]
    incumbent_us = 0.0 if slow else statistics.median(arms["incumbent_us"])
    reason = "far behind the incumbent: one sample" if slow else ""
    return TableRow(kernel, point, "passed", tuple(samples), reason, incumbent_us, digest)


def results(tables: Sequence[Work], workers: int, effort: Effort) -> list[Result]:
    """The trials per hour from the first compile to the last sample, and the device's part of one.

    Raises PolyjaxError where nothing was measured.
    """
    timed = [work for work in tables if work.digests]
    if not timed:
        raise PolyjaxError("no schedule was measured")
    trials = sum(len(work.digests) for work in timed)
    rows = sum(len(work.writer.table.passed()) for work in timed)
    seconds = max(work.ended_s for work in timed)
    ops = sorted({work.plan.workload.op for work in timed})
    device = timed[0].writer.table.device
    rate = measured(
        TRIALS_PER_HOUR,
        [work.rate_per_hour for work in timed],
        "trials/h",
        value=trials / seconds * 3600,
        better="higher",
        goal=15_000.0,
        device=device,
        note=f"{trials} distinct programs ({rows} schedules) of {', '.join(ops)} compiled in "
        f"{workers} processes, judged and timed in {seconds:.0f} s; {len(timed)} tables, whose "
        "rates are the samples. Compile pool, gate and paired timing of python -m polyjax.tune "
        f"(samples of {effort.sample_ms:g} ms, at most {effort.max_pairs} pairs) without its "
        "promotions, whose winners face more gates",
    )
    on_device = measured(
        TRIAL_ON_DEVICE,
        [work.spent.on_device_s for work in timed],
        "s",
        better="lower",
        device=device,
        note="seconds of the measuring process for one trial: loading, gate, timing; by table",
    )
    return [rate, on_device]
