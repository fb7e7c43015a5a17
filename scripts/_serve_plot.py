"""Plots and the table of time of scripts/bench_serve, from the lines of its runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _serve_points import Run  # type: ignore[import-not-found]  # a script beside this one
from _serve_results import Points, aligned  # type: ignore[import-not-found]

from polyjax.core.errors import ConfigError

# Two kinds of process work side by side; each's phases add up to its share of the time.
ENGINE = ("schedule", "pack", "dispatch", "device", "commit", "send")
HTTP = ("http", "tokenise", "detokenise")
COLOURS = {
    "schedule": "#1f6feb",
    "pack": "#5aa0f2",
    "dispatch": "#a5c8f7",
    "device": "#d0d7de",
    "commit": "#2a7f62",
    "send": "#7cc4a4",
    "http": "#c8553d",
    "tokenise": "#b08800",
    "detokenise": "#e3a08f",
}


def read_runs(path: Path) -> tuple[list[Run], dict[str, Any]]:
    """The runs of a file of lines, and what the last line says of where they were made.

    Raises ConfigError.
    """
    runs, about = [], {}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for line in lines:
        if "run" in line:
            runs.append(Run(**line["run"]))
            about = line["about"]
    if not runs:
        raise ConfigError(f"{path} has no lines of runs")
    return runs, about


def spent_us_per_token(runs: Sequence[Run]) -> dict[str, float]:
    """Median microseconds of the server's time that an output token took, by phase."""
    return {
        phase: statistics.median(
            1e6 * run.spent_s.get(phase, 0.0) / run.figures["output_tokens"] for run in runs
        )
        for phase in (*HTTP, *ENGINE)
    }


def time_table(points: Points) -> str:
    """Microseconds per output token by phase, a row a point that tells it; "" if none does."""
    rows = [["streams", "arm", *HTTP, *ENGINE, "wall"]]
    for concurrency, arm in _told(points):
        runs = points.runs(arm, concurrency)
        spent = spent_us_per_token(runs)
        wall = statistics.median(1e6 / run.figures["output_tokens_per_s"] for run in runs)
        cells = [f"{us:,.1f}" for us in (*spent.values(), wall)]
        rows.append([str(concurrency), arm, *cells])
    return aligned(rows) if len(rows) > 1 else ""


def _told(points: Points) -> list[tuple[int, str]]:
    return [
        (concurrency, arm)
        for concurrency in points.concurrencies
        for arm in points.arms
        if any(run.spent_s for run in points.runs(arm, concurrency))
    ]


def draw(points: Points, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the plots as SVG; returns their paths."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'polyjax[report]'") from error
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "polyjax"  # equal data, equal file
    paths = [_pareto(points, about, folder / f"serve_{about['label']}_pareto.svg")]
    if _told(points):
        paths.append(_stacked(points, about, folder / f"serve_{about['label']}_time.svg"))
    return paths


def _title(about: Mapping[str, Any]) -> str:
    return (
        f"{about['label']} on {about['device']}: {about['isl']} + {about['osl']} tokens, "
        f"range ratio {about['range_ratio']} (unofficial)"
    )


def _pareto(points: Points, about: Mapping[str, Any], path: Path) -> Path:
    """Throughput per GPU against what one user sees, a curve an arm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for arm in points.arms:
        curve = []
        for concurrency in points.concurrencies:
            rate = points.median(arm, concurrency, "output_tokens_per_s")
            tpot_ms = points.median(arm, concurrency, "tpot_p50_ms")
            if rate is not None and tpot_ms:
                curve.append((1e3 / tpot_ms, rate / about["gpus"], concurrency))
        if not curve:
            continue
        across, up, _ = zip(*curve, strict=True)
        axes.plot(across, up, marker="o", label=arm)
        for x, y, concurrency in curve:
            axes.annotate(f"{concurrency}", (x, y), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("interactivity: tokens/s a user (1 / median time per output token)")
    axes.set_ylabel("output tokens/s a GPU")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(_title(about), fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(title="points: concurrency", fontsize=8, title_fontsize=8)
    return _save(figure, path)


def _stacked(points: Points, about: Mapping[str, Any], path: Path) -> Path:
    """Two bars a point: the engine's loop, and the HTTP processes beside it, as shares of wall."""
    import matplotlib.pyplot as plt

    told = _told(points)
    figure, axes = plt.subplots(figsize=(2.4 + 1.6 * len(told), 4.5))
    seen: set[str] = set()
    for place, (concurrency, arm) in enumerate(told):
        runs = points.runs(arm, concurrency)
        for offset, phases in ((-0.2, ENGINE), (0.2, HTTP)):
            bottom = 0.0
            for phase in phases:
                share = statistics.median(
                    run.spent_s.get(phase, 0.0) / run.figures["duration_s"] for run in runs
                )
                label = None if phase in seen else phase
                seen.add(phase)
                axes.bar(
                    place + offset, share, 0.36, bottom=bottom, color=COLOURS[phase], label=label
                )
                bottom += share
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(told)), [f"{arm}\n{concurrency} streams" for concurrency, arm in told], fontsize=8
    )
    axes.set_ylabel("seconds a second of the run")
    axes.set_title(
        f"{_title(about)}\nleft: the engine's loop; right: all HTTP processes together", fontsize=9
    )
    axes.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left", reverse=True)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return path
