"""One schema for measured results: a JSON line a figure, raw samples kept.

Every bench writes through `append`; `scripts/report` renders what it wrote.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a figure is compared with: its name and raw samples in the figure's unit."""

    name: str
    samples: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """One figure.

    `better` is "higher" or "lower"; `goal` None where none is set. `samples` are raw, at least
    three (one for a count). `ratio` compares with the baseline, above 1 where ours is better
    unless the metric says otherwise. `versions` and `date` are filled in by `measured`.
    """

    metric: str
    value: float
    unit: str
    better: str
    goal: float | None
    samples: tuple[float, ...]
    baseline: Baseline | None
    ratio: float | None
    device: str
    versions: dict[str, str]
    command: str
    date: str
    note: str = ""


def cpu_name() -> str:
    """Cores and model name, as the results page shows them."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{os.cpu_count()}-core CPU, {model}"


def measured(
    metric: str,
    samples: Sequence[float],
    unit: str,
    *,
    better: str,
    device: str,
    goal: float | None = None,
    value: float | None = None,
    baseline: Baseline | None = None,
    ratio: float | None = None,
    note: str = "",
) -> Result:
    """Returns a Result dated now, of this command and these package versions.

    `value` defaults to the median of `samples`. Raises ValueError on another `better`.
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"better must be 'higher' or 'lower', not {better!r}")
    return Result(
        metric=metric,
        value=statistics.median(samples) if value is None else value,
        unit=unit,
        better=better,
        goal=goal,
        samples=tuple(samples),
        baseline=baseline,
        ratio=ratio,
        device=device,
        versions=versions(),
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        note=note,
    )


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages a figure depends on, where installed."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "numpy", "torch", "vllm", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def append(path: str | os.PathLike[str], results: Sequence[Result]) -> None:
    """Appends one JSON line a result and syncs; first closes a line that a killed run tore."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        for result in results:
            file.write(json.dumps(dataclasses.asdict(result)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(root: str | os.PathLike[str]) -> Iterator[Result]:
    """Yields every result under `root`, file by file. Raises ConfigError naming a malformed line.

    Lines without a "metric" (raw series beside the figures) are passed over.
    """
    for path in sorted(Path(root).glob("**/*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                data: dict[str, Any] = json.loads(line)
                if "metric" not in data:
                    continue
                baseline = data.pop("baseline")
                yield Result(
                    **{**data, "samples": tuple(data["samples"])},
                    baseline=Baseline(baseline["name"], tuple(baseline["samples"]))
                    if baseline
                    else None,
                )
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{path}:{number} is no result line: {error}") from error


def _from_json(data: dict[str, Any]) -> Result:
    base = data["baseline"]
    baseline = Baseline(base["name"], tuple(base["samples"])) if base else None
    return Result(**{**data, "samples": tuple(data["samples"]), "baseline": baseline})
