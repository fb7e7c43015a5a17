"""What the runs of scripts/bench_serve amount to: ratios beside goals, result lines, tables."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

from _serve_points import Run  # type: ignore[import-not-found]  # a script beside this one

from polyjax.core.results import Baseline, Result, measured

MIN_SAMPLES = 3
OURS = "polyjax"  # the arm whose name metrics leave out

# Ratio of output tokens/s by metric; of the median time to first token where it says ttft.
GOALS = {
    "serve_1b_c1_vs_vllm": 2.2,
    "serve_1b_c16_vs_vllm": 2.0,
    "serve_1b_c64_vs_vllm": 1.7,
    "serve_1b_c256_vs_vllm": 2.0,
    "serve_1b_c64_ttft_vs_vllm": 0.5,
    "serve_8b_c1_tuned_vs_default": 1.15,
    "serve_8b_c64_tuned_vs_default": 1.08,
    "serve_8b_default_vs_plain_jit": 1.0,
}
_ARM_FIGURES = {
    "output_tokens_per_s": ("tokens/s", "higher"),
    "events_per_token": ("events/token", "higher"),
    "ttft_p50_ms": ("ms", "lower"),
    "ttft_p99_ms": ("ms", "lower"),
    "tpot_p50_ms": ("ms", "lower"),
    "itl_p99_ms": ("ms", "lower"),
}  # the lines of runs have all others


class Points:
    """Runs by arm and concurrency; samples of two arms are paired by repetition."""

    def __init__(self, runs: Sequence[Run]):
        self._runs = {(run.arm, run.concurrency, run.repeat): run for run in runs}
        self.arms = list(dict.fromkeys(run.arm for run in runs))
        self.concurrencies = sorted({run.concurrency for run in runs})

    def runs(self, arm: str, concurrency: int) -> list[Run]:
        return [
            run for (a, c, _), run in sorted(self._runs.items()) if (a, c) == (arm, concurrency)
        ]

    def median(self, arm: str, concurrency: int, figure: str) -> float | None:
        values = [run.figures[figure] for run in self.runs(arm, concurrency)]
        return statistics.median(values) if values else None

    def paired(self, a: str, b: str, concurrency: int, figure: str) -> list[tuple[float, float]]:
        """The figure of both arms in each repetition that both finished."""
        pairs = []
        for run in self.runs(a, concurrency):
            other = self._runs.get((b, concurrency, run.repeat))
            if other is not None:
                pairs.append((run.figures[figure], other.figures[figure]))
        return pairs


def results(points: Points, label: str, device: str, note: str) -> tuple[list[Result], list[str]]:
    """Returns result lines, and which could not be made because a point has too few samples."""
    found: list[Result] = []
    missing: list[str] = []
    for arm, concurrency in itertools.product(points.arms, points.concurrencies):
        runs = points.runs(arm, concurrency)
        if len(runs) >= MIN_SAMPLES:
            found += _arm_results(runs, f"serve_{label}_c{concurrency}_{arm}", device, note)
        else:
            missing.append(f"{arm} at concurrency {concurrency}: {len(runs)} runs")
    for a, b in itertools.combinations(points.arms, 2):
        found += _ratios(points, a, b, label, device, note)
    return found, missing


def _arm_results(runs: Sequence[Run], prefix: str, device: str, note: str) -> Iterator[Result]:
    for name, (unit, better) in _ARM_FIGURES.items():
        samples = [run.figures[name] for run in runs]
        yield measured(f"{prefix}_{name}", samples, unit, better=better, device=device, note=note)


def _ratios(points: Points, a: str, b: str, label: str, device: str, note: str) -> Iterator[Result]:
    """Arm `a` over arm `b` at each concurrency, and the worst of them if none is missing."""
    pair = f"vs_{b}" if a == OURS else f"{a}_vs_{b}"
    worst: Result | None = None
    is_whole = True
    for concurrency in points.concurrencies:
        prefix = f"serve_{label}_c{concurrency}"
        throughput = points.paired(a, b, concurrency, "output_tokens_per_s")
        first_token = points.paired(a, b, concurrency, "ttft_p50_ms")
        if len(throughput) < MIN_SAMPLES:
            is_whole = False
            continue
        ratio = _ratio(f"{prefix}_{pair}", throughput, "tokens/s", "higher", b, device, note)
        yield ratio
        yield _ratio(f"{prefix}_ttft_{pair}", first_token, "ms", "lower", b, device, note)
        worst = ratio if worst is None or ratio.value < worst.value else worst
    if worst is not None and is_whole:
        name = f"serve_{label}_{pair}"
        place = worst.metric.removeprefix(f"serve_{label}_").removesuffix(f"_{pair}")
        yield measured(
            name,
            worst.samples,
            worst.unit,
            better="higher",
            device=device,
            goal=GOALS.get(name),
            value=worst.value,
            ratio=worst.value,
            baseline=worst.baseline,
            note=f"worst: {place}; {worst.note}",
        )


def _ratio(
    name: str,
    pairs: Sequence[tuple[float, float]],
    unit: str,
    better: str,
    baseline: str,
    device: str,
    note: str,
) -> Result:
    value = statistics.median(ours / theirs for ours, theirs in pairs)
    return measured(
        name,
        [ours for ours, _ in pairs],
        unit,
        better=better,
        device=device,
        goal=GOALS.get(name),
        value=value,
        ratio=value,
        baseline=Baseline(baseline, tuple(theirs for _, theirs in pairs)),
        note=f"median ratio of paired runs; {note}",
    )


# -- tables ----------------------------------------------------------------------------------

_COLUMNS: dict[str, Callable[[float], str]] = {
    "output_tokens_per_s": lambda value: f"{value:,.0f}",
    "ttft_p50_ms": lambda value: f"{value:,.1f}",
    "ttft_p99_ms": lambda value: f"{value:,.1f}",
    "tpot_p50_ms": lambda value: f"{value:.2f}",
    "itl_p99_ms": lambda value: f"{value:.2f}",
    "e2e_p50_ms": lambda value: f"{value:,.0f}",
    "events_per_token": lambda value: f"{value:.3f}",
}


def table(points: Points) -> str:
    """Medians of each arm's runs, a row a point."""
    rows = [["streams", "arm", "runs", *(name.replace("_per_s", "/s") for name in _COLUMNS)]]
    for concurrency, arm in itertools.product(points.concurrencies, points.arms):
        if runs := points.runs(arm, concurrency):
            medians = [points.median(arm, concurrency, name) for name in _COLUMNS]
            cells = [
                shown(value or 0.0) for value, shown in zip(medians, _COLUMNS.values(), strict=True)
            ]
            rows.append([str(concurrency), arm, str(len(runs)), *cells])
    return aligned(rows) if len(rows) > 1 else ""


def ratio_table(found: Sequence[Result]) -> str:
    """The ratios among results, with their goals."""
    rows = [["metric", "ratio", "goal"]]
    for result in found:
        if result.ratio is not None:
            goal = "" if result.goal is None else f"{result.goal:g}"
            rows.append([result.metric, f"{result.ratio:.3f}", goal])
    return aligned(rows) if len(rows) > 1 else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, columns to the right except the first two of names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
