"""Streams with known tokens beside whatever else happens to a live server."""

from __future__ import annotations

import threading
from typing import Any

import psutil

from tests.goldens import Golden
from tests.server.serving import Server
from tests.server.test_families import body

ADMIN = {"Authorization": "Bearer admin-secret"}
LIMIT_S = 300.0  # for processes that start and compile on a machine busy with other tests
PAUSE_S = 0.2  # between two streams: compiling is niced, and would wait for ever otherwise


class Streams:
    """Streams golden prompts over and over in threads; every token must be the golden one."""

    def __init__(self, server: Server, truth: Golden):
        self.finished = 0
        self.fingerprints: set[str] = set()
        self._server, self._truth = server, truth
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(row,)) for row in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, row: int) -> None:
        try:
            while not self._stopping.is_set():
                tokens = []
                for event in self._server.stream("/v1/completions", body(self._truth, [row])):
                    tokens += event["choices"][0]["token_ids"]
                    self.fingerprints.add(event["system_fingerprint"])
                assert tokens == self._truth.continuation(row)
                self.finished += 1
                self._stopping.wait(PAUSE_S)
        except BaseException as error:
            self._failures.append(error)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        assert not self._failures, self._failures
        assert self.finished


def plan(server: Server) -> dict[str, Any]:
    described: dict[str, Any] = server.http.get("/admin/plan", headers=ADMIN).json()
    return described


def child(server: Server, module: str) -> psutil.Process | None:
    return next((c for c in server.children() if module in c.cmdline()), None)
