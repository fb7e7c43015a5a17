"""What the trials of a ledger amount to: curves, counts, lessons. Plain numbers, no markup."""

from __future__ import annotations

import ast
import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyjax.core.chips import chip
from polyjax.core.errors import PolyjaxError
from polyjax.core.op import Workload
from polyjax.core.ops import OPS
from search.cost.analytical import floor_us
from search.ledger import STATUSES, Ledger, Promotion, Trial
from search.svg import counted
from search.tuner import BASELINE

MIN_TRIALS_A_VALUE = 3  # of a field's value, before its median means something


@dataclasses.dataclass(frozen=True)
class Search:
    """All trials of one target on one device kind, oldest first, with the decisions on them."""

    target: str
    device_kind: str
    trials: tuple[Trial, ...]
    decisions: tuple[Promotion, ...]

    @property
    def name(self) -> str:
        return self.target.partition("|")[0]

    @property
    def start_us(self) -> float | None:
        """What the search started from took."""
        costs = [cost_us(t) for t in self.trials if t.agent == BASELINE]
        return costs[0] if costs else None

    @property
    def winner(self) -> Trial | None:
        """The trial in force in the end, unless that is the start."""
        promoted = {d.trial for d in self.decisions if d.promoted}
        return next((t for t in reversed(self.trials) if t.id in promoted), None)

    @property
    def best_us(self) -> float | None:
        return self.start_us if self.winner is None else cost_us(self.winner)

    @property
    def floor_us(self) -> float | None:
        """The least time the chip needs for the workload; None for plans and unknown chips."""
        try:
            workload = workload_of(self.target)
            if workload is None or chip(self.device_kind).platform == "cpu":
                return None
            return floor_us(OPS[workload.op], workload, chip(self.device_kind))
        except (PolyjaxError, KeyError, TypeError):
            return None


def cost_us(trial: Trial) -> float | None:
    """What a timed trial costs, drift taken out; its median where it was not paired."""
    paired = trial.verdicts.get("relative", {}).get("cost_us")
    if paired is not None:
        return float(paired)
    return statistics.median(trial.samples_us) if trial.samples_us else None


def workload_of(key: str) -> Workload | None:
    """Returns the workload that a key names, or None for what is no workload key."""
    match = re.fullmatch(r"(\w+)\[([^|\]]*)\|([^|\]]*)(?:\|([^\]]*))?\]", key)
    if match is None or match[1] not in OPS:
        return None
    dims = tuple((name, int(value)) for name, value in _pairs(match[2], "="))
    static = tuple((name, _literal(value)) for name, value in _pairs(match[4] or "", "="))
    return Workload(match[1], dims, tuple(_pairs(match[3], ":")), static)


def _pairs(text: str, separator: str) -> Iterator[tuple[str, str]]:
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(separator)
        yield name, value


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def searches(ledger: Ledger) -> list[Search]:
    """Returns the searches of a ledger, the ones with most trials first."""
    facts = ledger.environments()
    groups: dict[tuple[str, str], list[Trial]] = collections.defaultdict(list)
    for trial in ledger.trials():
        assert trial.id is not None
        groups[trial.target, facts[trial.id].get("device_kind", "?")].append(trial)
    by_trial: dict[int, list[Promotion]] = collections.defaultdict(list)
    for made in ledger.promotions():
        by_trial[made.trial].append(made)
    found = [
        Search(target, device, tuple(trials), tuple(d for t in trials for d in by_trial[t.id or 0]))
        for (target, device), trials in groups.items()
    ]
    return sorted(found, key=lambda s: -len(s.trials))


def best_so_far(search: Search) -> list[tuple[float, float]]:
    """Returns (trial number, gain of the best plan in force over the start), as steps."""
    start, promoted = search.start_us, {d.trial for d in search.decisions if d.promoted}
    if start is None:
        return []
    points, gain = [], 1.0
    for number, trial in enumerate(search.trials, 1):
        cost = cost_us(trial)
        if trial.id in promoted and cost:
            gain = start / cost
        points.append((float(number), gain))
    return points


def predictions(search: Search) -> list[tuple[float, float]]:
    """Returns (predicted, measured) microseconds of the trials that have both."""
    pairs = [(t.predicted_us, cost_us(t)) for t in search.trials if t.status in ("passed", "slow")]
    return [(float(a), float(b)) for a, b in pairs if a and b]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Spearman's correlation; NaN for fewer than three pairs or constant values."""
    if len(pairs) < 3:
        return math.nan
    values = np.asarray(pairs)
    if (np.ptp(values, axis=0) == 0).any():
        return math.nan
    ranks = np.argsort(np.argsort(values, axis=0), axis=0).astype(float)
    return float(np.corrcoef(ranks.T)[0, 1])


def seconds_by_phase(trials: Iterable[Trial]) -> dict[str, float]:
    """Returns the seconds spent in each phase, the longest first."""
    total: collections.Counter[str] = collections.Counter()
    for trial in trials:
        total.update({phase: float(s) for phase, s in trial.spent.items()})
    return dict(total.most_common())


def counts_by_status(trials: Iterable[Trial]) -> dict[str, int]:
    """Returns how many trials ended in which status, in the order statuses are declared."""
    counted = collections.Counter(trial.status for trial in trials)
    return {status: counted[status] for status in STATUSES if counted[status]}


def worth_of_fields(found: Sequence[Search]) -> dict[str, float]:
    """Returns field -> how much longer its worst value takes than its best, as a ratio.

    Medians over the trials of a value, the geometric mean over searches; fields with one value or
    too few trials a value are left out.
    """
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    for search in found:
        for field, medians in medians_by_value(search).items():
            ratios[field].append(max(medians.values()) / min(medians.values()))
    means = {field: statistics.geometric_mean(values) for field, values in ratios.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def medians_by_value(search: Search) -> dict[str, dict[str, float]]:
    """Returns field -> value -> median cost of the timed trials with it."""
    costs: dict[str, dict[str, list[float]]] = {}
    for trial in search.trials:
        cost = cost_us(trial)
        if cost is None or trial.status not in ("passed", "slow"):
            continue
        for field, value in fields_of(trial.candidate).items():
            costs.setdefault(field, {}).setdefault(str(value), []).append(cost)
    medians = {
        field: {v: statistics.median(c) for v, c in values.items() if len(c) >= MIN_TRIALS_A_VALUE}
        for field, values in costs.items()
    }
    return {field: values for field, values in medians.items() if len(values) > 1}


def fields_of(candidate: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what varies between the candidates of one search."""
    for name in ("schedule", "point", "options"):
        if isinstance(candidate.get(name), Mapping):
            return dict(candidate[name])
    return {}


@dataclasses.dataclass(frozen=True)
class AgentRecord:
    """What one agent did: its trials, those that passed, and how often it found a new best."""

    trials: int = 0
    passed: int = 0
    promoted: int = 0
    gain: float = 1.0


def by_agent(found: Sequence[Search]) -> dict[str, AgentRecord]:
    """Returns agent -> record, the one with most promotions first; `gain` multiplies them."""
    records: dict[str, AgentRecord] = {}
    for search in found:
        promoted = {d.trial for d in search.decisions if d.promoted}
        before = search.start_us
        for trial in search.trials:
            if trial.agent == BASELINE:
                continue
            record = records.get(trial.agent, AgentRecord())
            cost, gain = cost_us(trial), 1.0
            if trial.id in promoted and cost and before:
                gain, before = before / cost, cost
            records[trial.agent] = AgentRecord(
                record.trials + 1,
                record.passed + (trial.status == "passed"),
                record.promoted + (trial.id in promoted),
                record.gain * gain,
            )
    return dict(sorted(records.items(), key=lambda item: (-item[1].promoted, -item[1].trials)))


# -- lessons ---------------------------------------------------------------------------------


def lessons(found: Sequence[Search]) -> list[str]:
    """Returns sentences about failures and reversals, each with its counts; only true ones."""
    trials = [t for search in found for t in search.trials if t.agent != BASELINE]
    if not trials:
        return ["Nothing was tried yet."]
    made = [d for search in found for d in search.decisions]
    return [
        *_failures(trials),
        *_wasted(trials),
        *_reversals(made, {t.id: t for t in trials}),
        *_mispredictions(found),
        *_indifferent(found),
        *_unimproved(found),
    ]


def _failures(trials: Sequence[Trial]) -> Iterator[str]:
    counts = counts_by_status(trials)
    total = len(trials)
    words = {
        "illegal": "were illegal before anything was compiled",
        "compile_error": "did not compile",
        "rejected": "compiled and were wrong: a gate refused them",
        "crashed": "crashed the process that ran them",
        "timeout": "hung and were cut off",
    }
    for status, what in words.items():
        if status in counts:
            reason, times = _commonest(t.reason for t in trials if t.status == status)
            yield (
                f"{counts[status]:,} of {total:,} candidates {what}; most often "
                f"({times:,} times): {reason}."
            )
    if "duplicate" in counts:
        share = counts["duplicate"] / total
        yield (
            f"{counted(counts['duplicate'], 'candidate')} ({share:.0%}) compiled to machine code "
            "that had been measured already: different settings, the same program."
        )
    if "slow" in counts:
        yield (
            f"{counted(counts['slow'], 'candidate')} ran so far behind the incumbent that "
            "timing them was stopped after the first runs."
        )


def _commonest(reasons: Iterable[str]) -> tuple[str, int]:
    """The most frequent reason, numbers aside, as it was written once; and how often it came."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for reason in reasons:
        groups[re.sub(r"[\d.]+(?:e[-+]?\d+)?", "#", reason)[:80]].append(reason)
    most = max(groups.values(), key=len)
    return " ".join(most[0].split())[:160].rstrip("."), len(most)


def _wasted(trials: Sequence[Trial]) -> Iterator[str]:
    spent = sum(seconds_by_phase(trials).values())
    lost = sum(seconds_by_phase(t for t in trials if t.status != "passed").values())
    if spent > 0 and lost > 0:
        yield (
            f"{lost / spent:.0%} of the time ({_duration(lost)} of {_duration(spent)}) went into "
            "candidates that could not have won: failed, wrong, slow or duplicate."
        )


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _reversals(made: Sequence[Promotion], trials: Mapping[int | None, Trial]) -> Iterator[str]:
    faster = [
        d for d in made
        if not d.promoted and trials.get(d.trial) is not None
        and 0 < trials[d.trial].verdicts.get("relative", {}).get("ratio", 1.0) < 1.0
    ]  # fmt: skip
    refused = [d for d in faster if d.evidence.get("refused")]
    noise = len(faster) - len(refused)
    if noise:
        yield (
            f"{counted(noise, 'candidate')} looked faster in the median and won nothing: the "
            "difference is within this machine's noise, or another part of the work got slower."
        )
    if refused:
        reason, _ = _commonest(str(d.evidence["refused"]) for d in refused)
        yield (
            f"{counted(len(refused), 'candidate')} won the timing and lost to a gate that "
            f"only winners are put through: {reason}."
        )


def _mispredictions(found: Sequence[Search]) -> Iterator[str]:
    wrong, losses, total = 0, [], 0
    for search in found:
        pairs = predictions(search)
        if len(pairs) < 5:
            continue
        total += 1
        favourite = min(pairs)[1]
        best = min(measured for _, measured in pairs)
        if favourite > best * 1.001:
            wrong += 1
            losses.append(favourite / best)
    if wrong:
        yield (
            f"In {wrong} of {total} searches the cost model's favourite was not the fastest; it "
            f"took {statistics.median(losses):.2f} times as long as the best measured (median)."
        )


def _indifferent(found: Sequence[Search]) -> Iterator[str]:
    idle = [field for field, ratio in worth_of_fields(found).items() if ratio < 1.01]
    if idle:
        named = ", ".join(idle[:8])
        verb = "makes" if len(idle) == 1 else "make"
        yield f"{named} {verb} less than 1 % of difference between the best and the worst value."


def _unimproved(found: Sequence[Search]) -> Iterator[str]:
    tried = [s for s in found if sum(t.agent != BASELINE for t in s.trials) > 0]
    same = [s for s in tried if s.winner is None]
    if same:
        spent = sum(sum(t.agent != BASELINE for t in s.trials) for s in same)
        yield (
            f"{len(same)} of {len(tried)} searches ended where they began, after {spent:,} "
            "candidates: what was in force stays."
        )
