"""One measured run of scripts/bench_serve: the load on one server, its figures, where time went."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

from _serve_arms import (  # type: ignore[import-not-found]  # a script beside this one
    Arm,
    fetch,
)

from polyjax.load import LoadSpec, RequestRecord, run_load

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
SETTLE_S = 0.6  # a server's counters lag by a heartbeat and a sample of 0.25 s each
WARM_UP_SEED = 500_000  # away from the seeds of measured runs

# Samples of /metrics that add up to a server's time: name, the label that tells the phase.
ENGINE_PHASES = "polyjax_phase_seconds_total"
HTTP_PHASES = "polyjax_http_phase_seconds_total"
HTTP_CPU = "polyjax_http_cpu_seconds_total"
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_PHASE = re.compile(r'phase="(\w+)"')
# Engine phases as the page calls them: waiting for results is the device's time.
RENAMED = {"readback": "device"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """The load of a point: the recipe's lengths and counts at one concurrency."""

    concurrency: int
    prompts: int
    warm_ups: int
    isl: int
    osl: int
    warm_up_osl: int
    range_ratio: float
    vocab_size: int
    processes: int

    def spec(self, arm: Arm, prompts: int, osl: int, seed: int, api_key: str | None) -> LoadSpec:
        return LoadSpec(
            *(arm.url, arm.model, prompts, self.concurrency, self.isl, osl),
            *(self.range_ratio, self.vocab_size, seed, api_key),
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's figures; times in milliseconds. `spent_s` are seconds of the server by phase."""

    arm: str
    concurrency: int
    repeat: int
    figures: dict[str, float]
    spent_s: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


def summarise(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Figures of one run by name; times in milliseconds."""
    duration_s = max(r.event_s[-1] for r in records) - min(r.start_s for r in records)
    output_tokens = sum(r.output_tokens for r in records)
    prompt_tokens = sum(r.prompt_tokens for r in records)
    values_s = {
        "ttft": [r.ttft_s for r in records],
        "tpot": [r.tpot_s for r in records],
        "itl": [interval for r in records for interval in r.itl_s] or [0.0],
        "e2e": [r.e2e_s for r in records],
    }
    figures = {
        "duration_s": duration_s,
        "requests": float(len(records)),
        "output_tokens": float(output_tokens),
        "requests_per_s": len(records) / duration_s,
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
        "events_per_token": sum(len(r.event_s) for r in records) / output_tokens,
    }
    for name in LATENCIES:
        for percent in PERCENTILES:
            figures[f"{name}_p{percent}_ms"] = 1e3 * percentile(values_s[name], percent)
        figures[f"{name}_mean_ms"] = 1e3 * statistics.fmean(values_s[name])
    return figures


def warm_up(
    arm: Arm, workload: Workload, seed: int, api_key: str | None, deadline_s: float
) -> None:
    if workload.warm_ups:
        spec = workload.spec(
            arm, workload.warm_ups, workload.warm_up_osl, seed + WARM_UP_SEED, api_key
        )
        run_load(spec, workload.processes, deadline_s)
        settle(arm)


def measure(
    arm: Arm,
    workload: Workload,
    repeat: int,
    seed: int,
    api_key: str | None,
    deadline_s: float,
) -> Run:
    """One run. Raises LoadError, OutOfTime."""
    before = read_phases(arm)
    records = run_load(
        workload.spec(arm, workload.prompts, workload.osl, seed, api_key),
        workload.processes,
        deadline_s,
    )
    settle(arm)
    after = read_phases(arm)
    spent_s = {phase: after[phase] - before.get(phase, 0.0) for phase in after}
    return Run(arm.name, workload.concurrency, repeat, summarise(records), spent_s)


def settle(arm: Arm) -> None:
    """Waits until the server's counters tell of all that was done."""
    if arm.has_phases:
        time.sleep(SETTLE_S)


def read_phases(arm: Arm) -> dict[str, float]:
    """Seconds that the server's processes have spent so far, by phase; {} where not told."""
    if not arm.has_phases:
        return {}
    return phases_of(fetch(f"{arm.url}/metrics").decode())


def phases_of(metrics: str) -> dict[str, float]:
    """Seconds by phase in the text of /metrics. "http" is processor time without named phases."""
    spent: dict[str, float] = {}
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample[1] not in (ENGINE_PHASES, HTTP_PHASES, HTTP_CPU):
            continue
        phase = _PHASE.search(sample[2])
        name = phase[1] if phase else "http"
        name = RENAMED.get(name, name)
        spent[name] = spent.get(name, 0.0) + float(sample[3])
    if "http" in spent:
        inside = spent.get("tokenise", 0.0) + spent.get("detokenise", 0.0)
        spent["http"] = max(0.0, spent["http"] - inside)
    return spent
