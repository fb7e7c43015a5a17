"""A server on a tiny golden checkpoint, and streams that run on it one after another."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import tiny_llama
from tests.server.serving import Server, running

ADMIN = {"Authorization": "Bearer admin-secret"}
MAX_TOKENS = 100
PROMPTS = [[5, 9, 200, 31, 77], [8, 100, 3, 62, 19, 240, 11]]
READY_LIMIT_S = 300.0  # to compile the programs on a machine that is busy with other tests


@contextlib.contextmanager
def golden_server(model: Path, folder: Path) -> Iterator[Server]:
    flags = (
        *(f"--block_size={tiny_llama.PAGE_SIZE}", "--num_kv_pages=48", "--max_num_seqs=3"),
        *(f"--max_model_len={tiny_llama.MAX_TOKENS}", "--max_num_batched_tokens=32"),
        *(f"--plan={tiny_llama.write_plan(folder / 'plan.json')}", "--admin_key=admin-secret"),
    )
    with running(model, flags, ready_limit_s=READY_LIMIT_S) as server:
        yield server


def admin(server: Server, path: str, body: dict[str, Any] | None = None) -> Any:
    """POSTs to an admin route, which must answer 2xx; returns the answer."""
    response = server.post(path, body or {}, headers=ADMIN)
    assert response.is_success, response.text
    return response.json()


def request(prompt: list[int], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **greedy}


def answer(server: Server, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    """The greedy tokens of a prompt."""
    response = server.post("/v1/completions", request(prompt, max_tokens))
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


class Streams:
    """One stream after another for each prompt, in threads, until told to stop.

    `finished` holds (index of the prompt, [(token, fingerprint)]) of streams that ended well,
    `failed` the errors of those that did not.
    """

    def __init__(self, server: Server):
        self.finished: list[tuple[int, list[tuple[int, str]]]] = []
        self.failed: list[dict[str, Any]] = []
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._runs = [self._pool.submit(self._run, server, i) for i in range(len(PROMPTS))]

    def _run(self, server: Server, index: int) -> None:
        while not self._stopping.is_set():
            tokens: list[tuple[int, str]] = []
            error = None
            for event in self._events(server, request(PROMPTS[index])):
                error = event.get("error", error)
                for choice in event.get("choices", ()):
                    tokens += [(t, event["system_fingerprint"]) for t in choice["token_ids"]]
            if error is None:
                self.finished.append((index, tokens))
            else:
                self.failed.append(error)

    def _events(self, server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, or the error it was refused with."""
        with server.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as response:
            if response.status_code != 200:
                yield json.loads(response.read())
                self._stopping.wait(0.05)
                return
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def stop(self) -> None:
        """Lets the running ones end. Raises what a thread raised."""
        self._stopping.set()
        for run in self._runs:
            run.result()
        self._pool.shutdown()
