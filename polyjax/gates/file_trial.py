"""The trial of a kernel file: loaded and judged by the op-level gates in a process of its own.

    engine --- JSON line {"trial": pickled FileTrial} --> trial process
    engine <-- JSON lines, one a stage or verdict, the last with "choices" or "refused"

The file is executed here for the first time. Whatever it does (hang, crash, exit, print) becomes a
verdict; the process is killed at its time limit, with every process it started.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyjax.compiler.kernel_files import FileKernel, allow_kernel_files, load_kernel
from polyjax.compiler.program import ProgramRequest
from polyjax.compiler.workloads import step_workloads
from polyjax.core.errors import ConfigError, PolyjaxError
from polyjax.core.kernel_source import KernelSource
from polyjax.core.lifetime import (
    kill_when_parent_ends,
    parent_pipe,
    watch_parent,
    yield_to_serving,
)
from polyjax.core.op import Choice, Schedule, Workload
from polyjax.core.whole_file import write_whole
from polyjax.gates import environment, registry
from polyjax.gates.candidate import Candidate, first_line
from polyjax.gates.trial import OpTrial
from polyjax.gates.verdict import Verdict

GATE = "kernel_file"
DEFAULT_TIMEOUT_S = 300.0
MEMORY_SHARE = 0.05  # of an accelerator, beside the server

log = logging.getLogger("polyjax.gates")


@dataclasses.dataclass(frozen=True)
class FileTrial:
    """What is to be judged: the text of a kernel file, for the steps of the plan in force.

    `op` is the op the file is said to compute, or None where that is not said.
    """

    name: str
    text: str
    source: KernelSource
    op: str | None
    requests: tuple[ProgramRequest, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class TrialEnd:
    """How a trial ended: choices for the workloads it passed on, or the verdict that refused it."""

    choices: tuple[tuple[str, Choice], ...]
    refused: Verdict | None


class FileTrialProcess:
    """The engine's end of one trial. Nothing here waits."""

    def __init__(self, trial: FileTrial, timeout_s: float = DEFAULT_TIMEOUT_S):
        """Starts the process. Raises OSError where it cannot be started."""
        self.op: str | None = None
        self.verdicts: list[tuple[str, Verdict]] = []
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self.stage = "starting"
        self._buffer = b""
        command = [sys.executable, "-P", "-m", "polyjax.gates.file_trial"]
        paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(
                os.environ,
                PYTHONPATH=os.pathsep.join(filter(None, paths)),
                XLA_PYTHON_CLIENT_PREALLOCATE="false",
                XLA_PYTHON_CLIENT_MEM_FRACTION=str(MEMORY_SHARE),
            ),
            start_new_session=True,  # so that what the file starts can be killed with it
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        message = {"trial": base64.b64encode(pickle.dumps(trial)).decode()}
        self._unsent = memoryview(json.dumps(message).encode() + b"\n")
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> TrialEnd | None:
        """Takes in what the process said. Returns how it ended, once it has."""
        self._send()
        ended = self._process.poll() is not None  # asked first: what it said last is there then
        self._buffer += self._stdout.read() or b""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if (end := self._take(line)) is not None:
                self.close()
                return end
        if ended:
            return self._refused(f"the process ended with code {self._process.returncode}")
        if time.monotonic() - self._started_s > self._timeout_s:
            return self._refused(f"did not finish within {self._timeout_s:g} s")
        return None

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]

    def _take(self, line: bytes) -> TrialEnd | None:
        try:
            said = json.loads(line)
        except ValueError:
            return self._refused(f"wrote {line[:80]!r} into the trial's own pipe")
        if "stage" in said:
            self.stage = said["stage"]
            self.op = said.get("op", self.op)
        elif "verdict" in said:
            self.verdicts.append((said["workload"], Verdict(**said["verdict"])))
        elif "choices" in said:
            choices = tuple(
                (key, Choice(c["kernel"], tuple(sorted(c["schedule"].items()))))
                for key, c in sorted(said["choices"].items())
            )
            return TrialEnd(choices, None)
        elif "refused" in said:
            return TrialEnd((), Verdict(**said["refused"]))
        return None

    def _refused(self, what: str) -> TrialEnd:
        self.close()
        return TrialEnd((), Verdict(GATE, False, f"{self.stage}: {what}"))

    def close(self) -> None:
        """Kills the process and whatever the file started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


# -- inside the process ----------------------------------------------------------------------

Say = Callable[..., None]


def judge(trial: FileTrial, say: Say) -> None:
    """Says stages, verdicts and the end of a trial."""
    write_source(trial.source, trial.text)
    say(stage="loading the file")
    try:
        kernel = load_kernel(trial.name, trial.source)
    except BaseException as error:  # SystemExit too: whatever it raises says that it is no kernel
        _refuse(say, f"cannot be loaded: {first_line(error)}")
        return
    if trial.op is not None and trial.op != kernel.op.name:
        _refuse(say, f"computes {kernel.op.name}, not {trial.op}")
        return
    say(stage="looking for workloads", op=kernel.op.name)
    mesh = trial.requests[0].plan.mesh.mesh()
    found = step_workloads(trial.requests, mesh).values()
    own = sorted((w for w in found if w.op == kernel.op.name), key=lambda w: (len(w.key), w.key))
    if not own:
        _refuse(say, f"the plan in force calls no {kernel.op.name}, so it would not be used")
        return
    choices: dict[str, Any] = {}
    for workload in own:
        say(stage=f"judging {workload.key}")
        for verdict in judge_workload(kernel, workload, trial.seed):
            say(workload=workload.key, verdict=verdict.to_json())
            if not verdict.passed:
                say(refused=verdict.to_json())
                return
            if verdict.gate == environment.GATE:  # the last one
                schedule = kernel.default(workload)
                choices[workload.key] = {"kernel": kernel.name, "schedule": schedule.to_json()}
    if not choices:
        _refuse(say, f"supports none of the plan's {len(own)} workloads, such as {own[0].key}")
        return
    say(choices=choices)


def judge_workload(
    kernel: FileKernel, workload: Workload, seed: int, schedule: Schedule | None = None
) -> Iterator[Verdict]:
    """Yields verdicts on a schedule, the default one if none is named; the first failure ends it.

    Yields nothing where the kernel does not support the workload.
    """
    try:
        if kernel.supports(workload) is not None:
            return
        chosen = schedule or kernel.default(workload)
        kernel.check(workload, chosen)
    except Exception as error:
        yield Verdict(GATE, False, f"{workload.key}: {first_line(error)}")
        return

    def build(resized: Workload) -> Callable[..., Any] | None:
        try:
            kernel.check(resized, chosen)
        except PolyjaxError:
            return None
        return kernel.build(resized, chosen)

    candidate = Candidate(kernel.name, workload, build, pallas=kernel.pallas)
    for verdict in registry.judge_op(OpTrial(candidate, seed)):
        yield verdict
        if not verdict.passed:
            return


def _refuse(say: Say, reason: str) -> None:
    say(refused=Verdict(GATE, False, reason).to_json())


def write_source(source: KernelSource, text: str) -> None:
    """Keeps the text under its digest: whole or not at all."""
    path = Path(source.path)
    with contextlib.suppress(ConfigError):
        source.read()
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o600)


def main() -> None:
    kill_when_parent_ends()
    yield_to_serving()
    allow_kernel_files()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s kernel trial: %(message)s")
    parent = parent_pipe()
    line = parent.readline()
    watch_parent(parent)

    def say(**fields: Any) -> None:
        answers.write(json.dumps(fields).encode() + b"\n")
        answers.flush()

    say(stage="starting")
    judge(pickle.loads(base64.b64decode(json.loads(line)["trial"])), say)
    os._exit(0)  # threads that the file left behind do not matter


if __name__ == "__main__":
    main()
