"""A live server for tests, in processes of its own, before the scripted engine or a real one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 300  # of the scripted engine; ids from 258 on have no text
EOS = 256
ASSISTANT = 257
FAIL, CRASH, HANG = 290, 291, 292  # tokens that the scripted engine stumbles over
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
SCRIPT = {
    "step_s": 0.002,
    "vocab_size": VOCAB_SIZE,
    "eos_token_ids": [EOS],
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "fail_token": FAIL,
    "crash_token": CRASH,
    "hang_token": HANG,
}
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ suffix | default('') }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Makes a model directory without weights: one token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", special=True), AddedToken("<|assistant|>", special=True)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["Scripted"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# A server is to end with the tests, also where those are killed.
SERVE = """
import runpy
from polyjax.core.lifetime import kill_when_parent_ends
kill_when_parent_ends()
runpy.run_module("polyjax.serve", run_name="__main__", alter_sys=True)
"""


class Server:
    """A running server. `log` is what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_file: Path):
        self.process = process
        self.url = url
        self._log_file: Path | None = log_file
        self._last_log = ""
        self.http = self.new_client()

    @property
    def log(self) -> str:
        if self._log_file is not None:
            self._last_log = self._log_file.read_text()
        return self._last_log

    def delete_log_file(self) -> None:
        """`log` stays what it was."""
        if self.log and self._log_file is not None:
            self._log_file.unlink()
            self._log_file = None

    def new_client(self) -> httpx.Client:
        """A client with connections of its own."""
        return httpx.Client(base_url=self.url, timeout=30, verify=False)  # loading CAs is slow

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Returns the body of a successful, greedy text completion."""
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Returns the events of a stream as JSON; its end mark must be there and is left out."""
        events = []
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = response.read().decode()
        for event in text.removesuffix("\n\n").split("\n\n"):
            assert event.startswith("data: "), event
            events.append(event.removeprefix("data: "))
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        found = [
            float(line.rpartition(" ")[2])
            for line in self.http.get("/metrics").text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        assert found, f"no metric {name} with {labels}"
        return sum(found)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        return next(c for c in self.children() if module in c.cmdline())


def wait_for(condition: Any, what: str, limit_s: float = 20.0) -> None:
    """Returns once `condition` holds; fails after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s} s in vain for: {what}"
        time.sleep(0.02)


def start(
    model: str | Path | None, flags: Sequence[str], script: Mapping[str, Any] | None = None
) -> Server:
    """Starts a server on a free port and returns at once; without `script`, with a real engine."""
    with tempfile.NamedTemporaryFile(prefix="serve-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-P", "-c", SERVE, "--host=127.0.0.1", "--port=0"]
        command += [*([] if model is None else [f"--model={model}"]), *flags]
        if script is not None:
            command.append(f"--scripted_engine={json.dumps({**SCRIPT, **script})}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stderr=log, stdout=log, env=environment, process_group=0
        )
    log_file = Path(log.name)

    def has_port() -> bool:
        return process.poll() is not None or "listening at http://" in log_file.read_text()

    wait_for(has_port, "the server to listen")
    said = log_file.read_text()
    assert process.poll() is None, said
    url = said.partition("listening at ")[2].split()[0]
    return Server(process, url, log_file)


@contextlib.contextmanager
def running(
    model: str | Path | None,
    flags: Sequence[str] = (),
    script: Mapping[str, Any] | None = None,
    ready_limit_s: float = 20.0,
) -> Iterator[Server]:
    """A server that is ready; at the end it must stop in order, leaving no process behind."""
    server = start(model, flags, script)
    try:

        def is_ready() -> bool:
            assert server.process.poll() is None, server.log
            try:
                return server.http.get("/ready").status_code == 200
            except httpx.TransportError:  # it is ending, and its exit code comes soon
                return False

        wait_for(is_ready, "the server to be ready", ready_limit_s)
        yield server
    finally:
        stop(server)
    assert "Fatal Python error" not in server.log


def stop(server: Server) -> None:
    """Ends what a test may have left of a server."""
    server.http.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        leftover = server.children()
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(10)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
        psutil.wait_procs(leftover, timeout=5)
        for child in leftover:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    server.delete_log_file()
