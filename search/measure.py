"""The measuring process of a device: killable, restarted after a hang, crash or poisoned device.

    with MeasuringProcess() as process:
        opened = process.open(setup)                 # loads the model or the op's inputs
        found = process.measure(plan, incumbent)     # Measurement: status, samples, verdicts
        found = process.judge(plan)                  # every gate, before a promotion

Whatever a candidate does, the answer is a `Measurement`; the next candidate finds a process that
works. Its times are checked against this side's clock: samples are positive, and all together no
longer than the job, so that nothing looks fast beside an incumbent made to look slow.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from polyjax.core.errors import PolyjaxError
from search import measure_jobs
from search.job_process import Answer, JobProcess

OPEN_TIMEOUT_S = 1800.0  # weights of a large model come over a network disk
TRIAL_TIMEOUT_S = 300.0

log = logging.getLogger("polyjax.search")


class MeasureError(PolyjaxError):
    """The bench itself cannot be opened; no candidate is to blame."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What became of one candidate: a trial status of the ledger, and what it was found to be.

    `arms` and `noise` are paired samples as `search.decisions` reads them.
    """

    status: str
    reason: str = ""
    arms: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    noise: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    verdicts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)


class MeasuringProcess:
    """One process for one device, which `environment` may select (CUDA_VISIBLE_DEVICES, ...)."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        trial_timeout_s: float = TRIAL_TIMEOUT_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ):
        self._process = JobProcess("measurer", environment)
        self._trial_timeout_s = trial_timeout_s
        self._open_timeout_s = open_timeout_s
        self._name, self._setup = "", None
        self.restarts: dict[str, int] = {}

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        """Starts the process now, where starting it later would disturb traffic."""
        self._process.start()

    def close(self) -> None:
        self._process.kill()

    def open(self, setup: Any) -> Any:
        """Opens the bench of a setup; returns its `opened`. Raises MeasureError if it cannot be."""
        self._setup, self._name = setup, f"bench {self._process.starts} {id(setup)}"
        return self._open()

    def ask(self, function: Callable[..., str], *arguments: Any) -> Any:
        """Returns what a function of ours answers, pickled in base64, before any candidate ran.

        Raises MeasureError if it fails.
        """
        answer = self._process.call(function, *arguments, timeout_s=self._open_timeout_s)
        if answer.status != "ok":
            self._process.kill()
            raise MeasureError(f"the measuring process cannot start: {answer.error}")
        return pickle.loads(base64.b64decode(str(answer.result)))

    def measure(self, *arguments: Any) -> Measurement:
        """Measures a candidate on the open bench."""
        return self._on_bench(measure_jobs.measure, *arguments)

    def judge(self, candidate: Any) -> Measurement:
        """Runs every gate on a candidate that is about to be promoted."""
        return self._on_bench(measure_jobs.judge, candidate)

    def _open(self) -> Any:
        return self.ask(measure_jobs.open_bench, self._name, self._setup)

    def _on_bench(self, job: Callable[..., Any], *arguments: Any) -> Measurement:
        if not self._process.alive:
            self._open()  # what it says again is what it said at first
        return self.run(job, self._name, *arguments)

    def run(self, job: Callable[..., Any], *arguments: Any) -> Measurement:
        """Runs a job that measures; whatever becomes of it, the process works afterwards."""
        answer = self._process.call(job, *arguments, timeout_s=self._trial_timeout_s)
        if answer.status == "ok":
            return _checked(answer)
        if answer.poisoned:
            self._process.kill()
        cause = "poisoned" if answer.poisoned else answer.status
        if not self._process.alive:
            self.restarts[cause] = self.restarts.get(cause, 0) + 1
            log.warning("the measuring process is started again: %s", answer.error)
        status = "timeout" if answer.status == "timeout" else "crashed"
        note = " (and left the device unusable)" if answer.poisoned else ""
        return Measurement(status, answer.error + note, spent={"lost": answer.seconds})


def _checked(answer: Answer) -> Measurement:
    """The measurement, or a rejection where its samples cannot be true."""
    try:
        found = Measurement(**answer.result)
        timed_s = sum(_samples_us(found.arms)) * 1e-6
        sound = all(us > 0 for us in (*_samples_us(found.arms), *_samples_us(found.noise)))
    except (TypeError, ValueError, AttributeError) as error:
        return Measurement("crashed", f"its answer is no measurement: {error}")
    if not sound or not math.isfinite(timed_s):
        return Measurement("rejected", "a sample is not a positive number")
    if timed_s > answer.seconds:
        return Measurement("rejected", "its samples add up to more than the time it ran")
    return found


def _samples_us(part: Mapping[str, Any]) -> list[float]:
    return [float(us) for arm in part.values() for values in arm.values() for us in values]
