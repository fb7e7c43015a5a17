"""How long a server takes to start: scripts/bench_serve with --warm_starts."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from _serve_arms import (  # type: ignore[import-not-found]  # a script beside this one
    ArmSpec,
    ServerProcess,
    ask,
    fetch,
)

from polyjax.core.errors import ConfigError
from polyjax.core.results import Baseline, Result, measured
from polyjax.load import LoadError

GOALS = {"start_1b_warm_s": 10.0, "start_1b_warm_vs_cold": 10.0}
MIN_WARM = 3
REQUEST_TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True)
class Start:
    """One start: seconds from the process's start to ready and to the first token.

    `load_s` ends with the weights loaded, `compile_s` goes from there to ready, by the engine's
    own account.
    """

    ready_s: float
    first_token_s: float
    load_s: float
    compile_s: float
    device: str

    @property
    def told(self) -> str:
        return (
            f"first token after {self.first_token_s:.1f} s (ready {self.ready_s:.1f}, weights "
            f"{self.load_s:.1f}, weights to ready {self.compile_s:.1f})"
        )


def start_once(spec: ArmSpec, cache: Path, log: Path, ready_limit_s: float) -> Start:
    """Starts the server, asks for one token, ends it. Raises LoadError."""
    server = ServerProcess(spec.name, spec.target.replace("{cache}", str(cache)), log)
    try:
        ready_s = server.wait_ready(ready_limit_s)
        model = ask(f"{server.url}/v1/models")["data"][0]["id"]
        body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                answer = json.load(response)
        except (OSError, ValueError) as error:
            raise LoadError(f"{spec.name}: no first token: {error}") from error
        first_token_s = time.monotonic() - server.started_s
        if answer["usage"]["completion_tokens"] != 1:
            raise LoadError(f"{spec.name}: one token was asked for: {answer}")
        metrics = fetch(f"{server.url}/metrics").decode()
        device = ask(f"{server.url}/version").get("device", "unknown")
    finally:
        server.stop()
    return Start(
        ready_s,
        first_token_s,
        _gauge(metrics, "polyjax_load_seconds"),
        _gauge(metrics, "polyjax_compile_seconds"),
        device,
    )


def _gauge(metrics: str, name: str) -> float:
    found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise LoadError(f"the server's /metrics lack {name}: starts are measured of polyjax only")
    return float(found[1])


def measure_starts(
    spec: ArmSpec,
    cold_starts: int,
    warm_starts: int,
    cache_dir: str | None,
    log_dir: Path,
    ready_limit_s: float,
    deadline_s: float,
) -> tuple[list[Start], list[Start]]:
    """Returns (cold, warm) starts: with an empty compile cache, and with what the last one left.

    Without cold starts, `cache_dir` has to be filled. Raises ConfigError, LoadError.
    """
    if spec.is_url or "{cache}" not in spec.target:
        raise ConfigError(f"--arm={spec.name}: starts need a command with {{port}} and {{cache}}")
    if not cold_starts and cache_dir is None:
        raise ConfigError("without --cold_starts, --cache_dir has to name a filled compile cache")
    log_dir.mkdir(parents=True, exist_ok=True)
    cold: list[Start] = []
    warm: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="bench-serve-cache-") as scratch:
        cache = Path(cache_dir or scratch)
        kinds = [("cold", cold)] * cold_starts + [("warm", warm)] * warm_starts
        for number, (kind, starts) in enumerate(kinds):
            if time.monotonic() > deadline_s:
                print(f"the time is over: {len(kinds) - number} starts are missing")
                break
            if kind == "cold":
                cache = Path(scratch) / str(number)
                cache.mkdir()
            log = log_dir / f"{spec.name}_{kind}{number}.log"
            starts.append(start_once(spec, cache, log, ready_limit_s))
            print(f"{kind} start {len(starts)}: {starts[-1].told}", flush=True)
    return cold, warm


def start_results(
    cold: Sequence[Start], warm: Sequence[Start], label: str, note: str
) -> list[Result]:
    """Result lines; none with fewer warm starts than a result needs."""
    if len(warm) < MIN_WARM:
        return []
    device = warm[0].device
    name = f"start_{label}_warm_s"
    found = [
        measured(
            name,
            [start.first_token_s for start in warm],
            "s",
            better="lower",
            device=device,
            goal=GOALS.get(name),
            note=f"process start to first token, compile cache filled; {note}",
        )
    ]
    if cold and all(start.compile_s for start in warm):  # a scripted engine compiles nothing
        name = f"start_{label}_warm_vs_cold"
        seconds = [start.compile_s for start in warm], [start.compile_s for start in cold]
        ratio = statistics.median(seconds[1]) / statistics.median(seconds[0])
        found.append(
            measured(
                name,
                seconds[0],
                "s",
                better="higher",
                device=device,
                goal=GOALS.get(name),
                value=ratio,
                ratio=ratio,
                baseline=Baseline("empty compile cache", tuple(seconds[1])),
                note="weights loaded to ready; value is the ratio of medians; "
                f"process start to first token was {cold[-1].first_token_s:.1f} s cold; {note}",
            )
        )
    return found
