"""The gate score: how many broken kernels and step programs the gates catch, how many good ones.

A mutant counts as caught only if some gate fails it on every seed; the first failing gate is named.
A legal implementation counts as rejected if any gate fails it on any seed. Gates see a function
and a workload, never a file or a name.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyjax.gates import corpus, environment, registry
from polyjax.gates.candidate import Candidate
from polyjax.gates.corpus import Entry
from polyjax.gates.legal_kernels import catalogue_candidates
from polyjax.gates.step_candidate import SplitSchedule, candidate_key, candidate_program
from polyjax.gates.step_trial import StepTrial
from polyjax.gates.step_twin import random_state, reference_programs, twin_spec
from polyjax.gates.trial import OpTrial
from polyjax.gates.verdict import Verdict

SHAPE_SETS = 4  # seeds share this many sets of other sizes, so that references compile once
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One implementation over all seeds. `failures` maps seed to (gate, reason) of the first."""

    name: str
    kind: str
    seeds: int
    failures: dict[int, tuple[str, str]]
    cost_s: float

    @property
    def caught(self) -> bool:
        return len(self.failures) == self.seeds

    @property
    def only_raised(self) -> bool:
        """Whether it failed by raising: such a mutant says nothing about the gates."""
        return bool(self.failures) and all("raised " in r for _, r in self.failures.values())

    @property
    def by_gate(self) -> dict[str, int]:
        return dict(collections.Counter(gate for gate, _ in self.failures.values()))

    def __str__(self) -> str:
        gates = ", ".join(f"{gate} {count}" for gate, count in self.by_gate.items()) or "passed"
        return f"{self.name}: {len(self.failures)}/{self.seeds} {gates} ({self.cost_s:.1f} s)"

    def to_json(self) -> dict[str, Any]:
        first = next(iter(self.failures.values()), ("", ""))
        return {
            "name": self.name,
            "kind": self.kind,
            "seeds": self.seeds,
            "failed_seeds": len(self.failures),
            "by_gate": self.by_gate,
            "only_raised": self.only_raised,
            "first_reason": first[1],
            "cost_s": round(self.cost_s, 2),
        }


@dataclasses.dataclass(frozen=True)
class Score:
    """Outcomes of mutants and of legal implementations."""

    mutants: tuple[Outcome, ...]
    legal: tuple[Outcome, ...]
    cost_s: float

    @property
    def missed(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.mutants if not o.caught)

    @property
    def rejected(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.legal if o.failures)

    @property
    def perfect(self) -> bool:
        return not self.missed and not self.rejected

    def to_json(self) -> dict[str, Any]:
        return {
            "mutants": len(self.mutants),
            "caught": len(self.mutants) - len(self.missed),
            "legal": len(self.legal),
            "rejected": len(self.rejected),
            "cost_s": round(self.cost_s, 1),
            "mutant_outcomes": [o.to_json() for o in self.mutants],
            "legal_outcomes": [o.to_json() for o in self.legal],
        }


@dataclasses.dataclass(frozen=True)
class _Task:
    """Entries judged one after the other in one process."""

    broken: bool
    entries: tuple[Entry, ...]
    catalogue: bool
    seeds: tuple[int, ...]


def score(
    mutants: Path | None,
    legal: Path | None,
    seeds: Sequence[int],
    legal_seeds: Sequence[int],
    *,
    subset: bool = False,
    jobs: int = 1,
    progress: Progress = lambda _: None,
) -> Score:
    """Runs the gates over two directories and, unless `subset`, over interpreted catalogue kernels.

    `subset` keeps the entries that say they belong to it. `jobs` processes share the work. Raises
    ConfigError for an empty folder.
    """
    started = time.perf_counter()
    environment.watch()
    tasks = [
        *_tasks(True, mutants, tuple(seeds), subset),
        *_tasks(False, legal, tuple(legal_seeds), subset),
    ]
    if legal and not subset:
        tasks.append(_Task(False, (), True, tuple(legal_seeds[:1])))
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    for task, found in _run(tasks, jobs, progress):
        outcomes[task.broken] += found
    mutants_found, legal_found = (
        tuple(sorted(outcomes[broken], key=lambda o: o.name)) for broken in (True, False)
    )
    return Score(mutants_found, legal_found, time.perf_counter() - started)


def _tasks(
    broken: bool, folder: Path | None, seeds: tuple[int, ...], subset: bool
) -> Iterator[_Task]:
    """One task a kernel file; all step programs in one, because they share compiled programs."""
    chosen = [e for e in corpus.entries(folder) if not subset or e.subset] if folder else []
    if steps := tuple(e for e in chosen if e.wraps_step):
        yield _Task(broken, steps, False, seeds)
    yield from (_Task(broken, (e,), False, seeds) for e in chosen if not e.wraps_step)


def _run(
    tasks: Sequence[_Task], jobs: int, progress: Progress
) -> Iterator[tuple[_Task, list[Outcome]]]:
    if jobs == 1:
        for task in tasks:
            yield task, _judged(task, progress)
        return
    context = multiprocessing.get_context("spawn")  # jax does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        waiting = {pool.submit(_judged, task): task for task in tasks}
        for done in concurrent.futures.as_completed(waiting):
            for outcome in done.result():
                progress(str(outcome))
            yield waiting[done], done.result()


def _judged(task: _Task, progress: Progress = lambda _: None) -> list[Outcome]:
    environment.watch()
    outcomes = []
    for entry in task.entries:
        outcomes += _outcomes(entry, task.seeds, progress)
    for candidate in catalogue_candidates() if task.catalogue else ():
        make = functools.partial(_same, candidate)
        outcomes.append(_op_outcome(candidate.name, "catalogue kernel", make, task.seeds, progress))
    return outcomes


def _same(candidate: Candidate) -> Candidate:
    return candidate


def _outcomes(entry: Entry, seeds: Sequence[int], progress: Progress) -> list[Outcome]:
    outcomes = []
    for workload, schedule in entry.variants:
        name = entry.name if len(entry.variants) == 1 else f"{entry.name} {schedule}"
        if workload is None:
            outcomes.append(_step_outcome(entry, name, schedule, seeds, progress))
            continue
        name = name if len(entry.variants) == 1 else f"{name} {workload.key}"

        def loaded(workload: Any = workload, schedule: Any = schedule) -> Candidate:
            return corpus.candidate(corpus.load(entry.path), workload, schedule, entry.name)

        outcomes.append(_op_outcome(name, entry.kind, loaded, seeds, progress))
    return outcomes


def _op_outcome(
    name: str, kind: str, make: Callable[[], Candidate], seeds: Sequence[int], progress: Progress
) -> Outcome:
    def judged(seed: int) -> list[Verdict]:
        return registry.judge_op(OpTrial(make(), seed, shape_seed=seed % SHAPE_SETS))

    return _outcome(name, kind, judged, seeds, progress)


def _step_outcome(
    entry: Entry, name: str, schedule: Any, seeds: Sequence[int], progress: Progress
) -> Outcome:
    spec = twin_spec()
    programs = reference_programs(spec)

    def judged(seed: int) -> list[Verdict]:
        module = corpus.load(entry.path)
        key = candidate_key(getattr(module, "KIND", "decode_greedy"), programs)
        candidate = candidate_program(spec, programs[key], schedule or SplitSchedule())
        wrapped = corpus.wrapped(module, candidate, programs[key])
        state = random_state(spec, np.random.default_rng([seed, 5]))
        return registry.judge_step(StepTrial(wrapped, key, programs, state, seed))

    return _outcome(name, entry.kind, judged, seeds, progress)


def _outcome(
    name: str,
    kind: str,
    judged: Callable[[int], list[Verdict]],
    seeds: Sequence[int],
    progress: Progress,
) -> Outcome:
    """Judges on every seed; tampering is undone before the next."""
    started = time.perf_counter()
    failures: dict[int, tuple[str, str]] = {}
    for seed in seeds:
        environment.watch()
        failed = [v for v in judged(seed) if not v.passed]
        if failed:
            failures[seed] = failed[0].gate, failed[0].reason
    outcome = Outcome(name, kind, len(seeds), failures, time.perf_counter() - started)
    progress(str(outcome))
    return outcome
