"""Child processes that run jobs one at a time and may be killed at any moment.

    parent --- JSON line {"id", "job"} -----------------------------> child
    parent <-- JSON line {"id", "result" or "error", "poisoned"} ---- child

A job is a pickled (function, arguments) of this code, made by the parent; an answer is JSON, since
a candidate ran where it was made and must not decide what the parent unpickles. Crash, hang and
exception are answers like any other. After an exception the child checks that its device still
computes; if it does not, the answer says so, and its owner starts another process.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyjax.compiler.kernel_files import allow_kernel_files
from polyjax.core.lifetime import kill_when_parent_ends, parent_pipe, watch_parent

_ROOT = Path(__file__).resolve().parent.parent

log = logging.getLogger("polyjax.search")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one job: status "ok", "failed" (it raised), "crashed" or "timeout".

    `result` is JSON data where ok, `error` says what went wrong. `poisoned`: the device no longer
    computes what it should, and the process must not be used again.
    """

    status: str
    result: Any = None
    error: str = ""
    seconds: float = 0.0
    poisoned: bool = False


class JobProcess:
    """The parent's end. The process starts with the first job, or with `start`."""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None, niceness: int = 0):
        self.name = name
        self._environment = dict(environment or {})
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._number = 0
        self._deadline_s = 0.0
        self._started_s = 0.0
        self._paused_s: float | None = None
        self.busy = False
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process unless it runs."""
        if self.alive:
            return
        self.kill()
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **self._environment}
        paths = [str(_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-P", "-m", "search.job_process"]
        self._process = subprocess.Popen(
            [*command, self.name, str(self._niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
        )
        os.set_blocking(self._stdout.fileno(), False)
        self._buffer = b""
        self.starts += 1

    def submit(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Starts a job. The process must not be busy."""
        assert not self.busy, f"{self.name} has a job already"
        with contextlib.suppress(OSError):  # `poll` finds out and says so
            self.start()
        self._number += 1
        self.busy = True
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + timeout_s
        job = base64.b64encode(pickle.dumps((function, arguments))).decode()
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died
            self._process.stdin.write(json.dumps({"id": self._number, "job": job}).encode() + b"\n")
            self._process.stdin.flush()

    def poll(self, wait_s: float = 0.0) -> Answer | None:
        """Returns the answer to the job in work, or None while there is none."""
        if not self.busy:
            return None
        until_s = time.monotonic() + wait_s
        while True:
            answer = self._look(max(0.0, min(until_s, self._deadline_s) - time.monotonic()))
            if answer is not None:
                self.busy = False
                return answer
            if time.monotonic() >= until_s:
                return None

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Answer:
        """Runs a job and waits for its answer."""
        self.submit(function, *arguments, timeout_s=timeout_s)
        while (answer := self.poll(1.0)) is None:
            pass
        return answer

    def pause(self) -> None:
        """Stops the process where it is, so that it takes no core; `resume` lets it go on."""
        if self.alive and self._paused_s is None:
            assert self._process is not None
            self._process.send_signal(signal.SIGSTOP)
            self._paused_s = time.monotonic()

    def resume(self) -> None:
        if self._paused_s is None:
            return
        self._deadline_s += time.monotonic() - self._paused_s
        self._paused_s = None
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process and forgets its job."""
        self.busy = False
        self._paused_s = None
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # it held what the dead process never read
                if pipe is not None:
                    pipe.close()
        self._process = None

    @property
    def _stdout(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    def _look(self, wait_s: float) -> Answer | None:
        seconds = time.monotonic() - self._started_s
        if self._process is None:
            return Answer("crashed", error=f"{self.name} could not be started", seconds=seconds)
        select.select([self._stdout], [], [], wait_s)
        chunk = self._stdout.read()
        self._buffer += chunk or b""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if (answer := self._parse(line)) is not None:
                return answer
        seconds = time.monotonic() - self._started_s
        if chunk == b"" and (code := self._process.wait()) is not None:
            self.kill()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Answer("crashed", error=f"{self.name} ended with {cause}", seconds=seconds)
        if self._paused_s is None and time.monotonic() >= self._deadline_s:
            self.kill()
            return Answer("timeout", error=f"no answer after {seconds:.1f} s", seconds=seconds)
        return None

    def _parse(self, line: bytes) -> Answer | None:
        try:
            said = json.loads(line)
            if said["id"] != self._number:
                return None
            seconds = time.monotonic() - self._started_s
            if said["error"] is not None:
                poisoned = bool(said["poisoned"])
                return Answer("failed", None, str(said["error"]), seconds, poisoned)
            return Answer("ok", said["result"], "", seconds)
        except (ValueError, KeyError, TypeError):
            log.warning("%s said %r, which is no answer", self.name, line[:200])
            return None


# -- inside the process ----------------------------------------------------------------------


def _answer(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    answer = {"id": message["id"], "result": None, "error": None, "poisoned": False}
    try:
        function, arguments = pickle.loads(base64.b64decode(message["job"]))
        answer["result"] = function(*arguments)
        json.dumps(answer)  # a result that is no JSON fails here, as the job's failure
    except Exception as error:
        log.info("a job failed:\n%s", traceback.format_exc())
        text = " ".join(str(error).split())[:1000]
        answer |= {"result": None, "error": f"{type(error).__name__}: {text}"}
        answer["poisoned"] = not _computes()
    return answer


def _computes() -> bool:
    """Whether the device still gives right results; True where no device is in use."""
    jax = sys.modules.get("jax")
    if jax is None:
        return True
    try:
        numbers = jax.numpy.arange(1024)
        return int(jax.block_until_ready((numbers * 3).sum())) == 3 * 1023 * 512
    except Exception:
        return False


def main() -> None:
    kill_when_parent_ends()
    name, niceness = sys.argv[1:3]
    os.nice(int(niceness))
    allow_kernel_files()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library or a candidate prints must not look like an answer
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {name}: %(message)s")
    lines: queue.Queue[bytes] = queue.Queue()
    watch_parent(parent_pipe(), lines.put)
    while True:
        answers.write(json.dumps(_answer(lines.get())).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
