"""The compiler process: programs are compiled here and reach the engine through the cache.

    engine --- JSON line {"id", "request", "cache"} --> compiler
    engine <-- JSON line {"id", "entry" or "error"} --- compiler

A request is a pickled `ProgramRequest`, made by this code for this code. The answer names a cache
entry; the serving process never imports or unpickles anything else that came from outside. The
process can be killed at any time: what it was compiling is reported as failed and the next request
starts another one.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import queue
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from polyjax.compiler.cache import ProgramCache
from polyjax.compiler.kernel_files import allow_kernel_files
from polyjax.compiler.program import ProgramRequest, compile_program
from polyjax.core.lifetime import (
    kill_when_parent_ends,
    parent_pipe,
    watch_parent,
    yield_to_serving,
)

DEFAULT_TIMEOUT_S = 900.0  # large programs on a slow CPU; a hang is cut off, not waited for

log = logging.getLogger("polyjax.compiler")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The answer to one request: the cache entry that now holds the program, or an error."""

    request: ProgramRequest
    entry: str | None
    error: str | None
    seconds: float


class CompilerProcess:
    """The engine's end. Nothing here waits, except `poll` for as long as it is told to.

    The process starts with the first request, or with `start` where its start would disturb
    traffic. One program is in work at a time, so that a crash names its program. `module` is what
    runs in it: another one answers the same messages (`gates/first_run.py`), under another `name`.
    """

    def __init__(
        self,
        cache: ProgramCache,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        module: str = "polyjax.compiler.worker",
        name: str = "compiler",
    ):
        self._cache = cache
        self._timeout_s = timeout_s
        self._module = module
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: collections.deque[ProgramRequest] = collections.deque()
        self._current: ProgramRequest | None = None
        self._started_s = 0.0
        self._buffer = b""
        self._number = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def start(self) -> None:
        """Starts the process unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        command = [sys.executable, "-P", "-m", self._module]
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        os.set_blocking(_pipe(self._process.stdout).fileno(), False)
        self._buffer = b""

    def submit(self, request: ProgramRequest) -> None:
        self._waiting.append(request)

    def cancel(self) -> None:
        """Forgets all requests; one in work is killed with its process."""
        self._waiting.clear()
        if self._current is not None:
            self._current = None
            self.kill()

    def poll(self, wait_s: float = 0.0) -> list[Compiled]:
        """Returns what was finished, failed or timed out since the last call."""
        done: list[Compiled] = []
        deadline_s = time.monotonic() + wait_s
        while self.busy:
            self._send_next(done)
            if self._current is not None:
                self._receive(done)
            if done or time.monotonic() >= deadline_s:
                break
            time.sleep(0.005)
        return done

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # it held what the dead process never read
                    _pipe(pipe).close()
            self._process = None

    close = kill

    def _send_next(self, done: list[Compiled]) -> None:
        if self._current is not None or not self._waiting:
            return
        self._current = self._waiting.popleft()
        self._started_s = time.monotonic()
        self._number += 1
        message = {
            "id": self._number,
            "request": base64.b64encode(pickle.dumps(self._current)).decode(),
            "cache": str(self._cache.directory),
        }
        try:
            self.start()
            assert self._process is not None
            pipe = _pipe(self._process.stdin)
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            self._finish(done, f"the {self._name} process did not take the request: {error}")
            self.kill()

    def _receive(self, done: list[Compiled]) -> None:
        assert self._process is not None
        chunk = _pipe(self._process.stdout).read()
        if chunk:
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take_answer(line, done)
        if self._current is None:
            return
        waited_s = time.monotonic() - self._started_s
        if (code := self._process.poll()) is not None:
            self._finish(done, f"the {self._name} process ended with code {code}")
            self.kill()
        elif waited_s > self._timeout_s:
            self._finish(done, f"the {self._name} did not finish within {self._timeout_s:g} s")
            self.kill()

    def _take_answer(self, line: bytes, done: list[Compiled]) -> None:
        try:
            answer = json.loads(line)
            number, entry, error = answer["id"], answer["entry"], answer["error"]
        except (ValueError, KeyError, TypeError):
            log.warning("the %s process said %r, which is no answer", self._name, line[:200])
            return
        if number == self._number and self._current is not None:
            self._finish(done, None if error is None else str(error), entry)

    def _finish(self, done: list[Compiled], error: str | None, entry: str | None = None) -> None:
        assert self._current is not None
        seconds = time.monotonic() - self._started_s
        done.append(Compiled(self._current, entry, error, seconds))
        self._current = None


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was asked for it
    return pipe


# -- inside the process ----------------------------------------------------------------------


def _compile(request: ProgramRequest, cache: ProgramCache) -> str:
    """Compiles into the cache; returns the entry's name."""
    mesh = request.plan.mesh.mesh()
    return cache.store(request, mesh, compile_program(request, mesh)).name


Work = Callable[[ProgramRequest, ProgramCache], str]
"""What a process does with a request: returns the answer's entry, or raises what went wrong."""


def _answer(line: bytes, work: Work) -> dict[str, object]:
    message = json.loads(line)
    try:
        request: ProgramRequest = pickle.loads(base64.b64decode(message["request"]))
        entry = work(request, ProgramCache(message["cache"]))
        return {"id": message["id"], "entry": entry, "error": None}
    except Exception as error:  # a failure is an answer: search and install decide what it means
        log.warning("a program failed", exc_info=True)
        return {"id": message["id"], "entry": None, "error": f"{type(error).__name__}: {error}"}


def answer_requests(work: Work, name: str) -> None:
    """Answers the engine's requests with `work`, one after another, until the engine ends."""
    kill_when_parent_ends()
    yield_to_serving()
    allow_kernel_files()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s")
    lines: queue.Queue[bytes] = queue.Queue()
    watch_parent(parent_pipe(), lines.put)
    while True:
        answers.write(json.dumps(_answer(lines.get(), work)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    answer_requests(_compile, "compiler")
