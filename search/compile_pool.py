"""Compiles ahead of the device, on all cores, in processes that a bad candidate may take down."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from search.job_process import Answer, JobProcess

Tag = Any  # whatever tells a caller's jobs apart
_NICENESS = 10  # measuring and serving go first


class CompilePool:
    """Jobs in, answers out, each under the tag it was submitted with; a crash fails one job.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        workers: int = 0,
        timeout_s: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ):
        """`workers` 0 takes a process per core."""
        count = workers or os.cpu_count() or 1
        self._timeout_s = timeout_s
        self._workers = [JobProcess(f"compiler {n}", environment, _NICENESS) for n in range(count)]
        self._waiting: collections.deque[tuple[Tag, Callable[..., Any], tuple[Any, ...]]] = (
            collections.deque()
        )
        self._tags: dict[int, Tag] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def pending(self) -> int:
        """Jobs without an answer yet."""
        return len(self._waiting) + sum(worker.busy for worker in self._workers)

    def submit(self, tag: Tag, function: Callable[..., Any], *arguments: Any) -> None:
        self._waiting.append((tag, function, arguments))
        self._send()

    def poll(self, wait_s: float = 0.0) -> list[tuple[Tag, Answer]]:
        """Returns what was answered since the last call, waiting up to `wait_s` for the first."""
        until_s = time.monotonic() + wait_s
        while True:
            self._send()
            done = []
            for number, worker in enumerate(self._workers):
                answer = worker.poll()
                if answer is None:
                    continue
                if answer.poisoned:
                    worker.kill()
                done.append((self._tags.pop(number), answer))
            if done or not self.pending or time.monotonic() >= until_s:
                self._send()
                return done
            time.sleep(0.002)

    def pause(self) -> None:
        """Frees the cores; nothing is lost. For timing on the cores that also compile."""
        for worker in self._workers:
            worker.pause()

    def resume(self) -> None:
        for worker in self._workers:
            worker.resume()

    def close(self) -> None:
        self._waiting.clear()
        for worker in self._workers:
            worker.kill()

    def _send(self) -> None:
        for number, worker in enumerate(self._workers):
            if self._waiting and not worker.busy:
                self._tags[number], function, arguments = self._waiting.popleft()
                worker.submit(function, *arguments, timeout_s=self._timeout_s)
