"""The servers that scripts/bench_serve compares: found by URL, or started and ended by it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError
from polyjax.load import LoadError

ASK_TIMEOUT_S = 30
READY_POLL_S = 0.05
READY_ANSWERS = 64  # of 8 processes one that is late is missed once in 5,000 times
STOP_LIMIT_S = 15.0  # for a server to end in order; then its process group is killed
LOG_TAIL_LINES = 15


@dataclasses.dataclass(frozen=True)
class ArmSpec:
    """One --arm: its name, and the URL of a server that runs or the command that starts one."""

    name: str
    target: str

    @property
    def is_url(self) -> bool:
        return self.target.startswith(("http://", "https://"))

    @classmethod
    def parse(cls, text: str) -> ArmSpec:
        """Reads NAME=URL or NAME=COMMAND. Raises ConfigError."""
        name, _, target = (part.strip() for part in text.partition("="))
        if not name.replace("_", "").isalnum() or not target:
            raise ConfigError(
                f"--arm={text}: must be NAME=URL or NAME=COMMAND, the name of letters, digits, _"
            )
        arm = cls(name, target)
        if arm.is_url:
            arm = cls(name, target.rstrip("/"))
        if arm.target.startswith("https://"):
            raise ConfigError(f"--arm={text}: the load clients speak http only")
        if not arm.is_url and "{port}" not in target:
            raise ConfigError(f"--arm={text}: the command needs {{port}} where its port belongs")
        return arm


@dataclasses.dataclass(frozen=True)
class Arm:
    """A server that is ready. `tells` is its /version; `has_phases` whether it counts its time."""

    name: str
    url: str
    model: str
    command: str
    tells: dict[str, Any]
    has_phases: bool


def fetch(url: str, api_key: str | None = None) -> bytes:
    """Returns the body at `url`. Raises LoadError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except (OSError, ValueError) as error:
        raise LoadError(f"{url}: {error}") from error


def ask(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Returns the JSON object at `url`. Raises LoadError."""
    try:
        answer: dict[str, Any] = json.loads(fetch(url, api_key))
        return answer
    except ValueError as error:
        raise LoadError(f"{url}: {error}") from error


def describe(spec: ArmSpec, url: str, model: str | None, api_key: str | None) -> Arm:
    """Returns the server at `url`, asked for what it serves; `model` None takes its first."""
    model = model or ask(f"{url}/v1/models", api_key)["data"][0]["id"]
    try:
        tells = ask(f"{url}/version")
    except LoadError:
        tells = {}
    try:
        has_phases = b"polyjax_phase_seconds" in fetch(f"{url}/metrics")
    except LoadError:
        has_phases = False
    return Arm(spec.name, url, model, spec.target, tells, has_phases)


def vocab_size(arms: Sequence[Arm], api_key: str | None) -> int:
    """The smallest vocabulary that an arm tells. Raises LoadError where none does."""
    told = []
    for arm in arms:
        with contextlib.suppress(LoadError, KeyError):
            told.append(int(ask(f"{arm.url}/tokenizer_info", api_key)["vocab_size"]))
    if not told:
        raise LoadError("no server tells its vocabulary; give --vocab_size")
    return min(told)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server started from a command, in a process group of its own. `log` gets what it says."""

    def __init__(self, name: str, command: str, log: Path):
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.started_s = time.monotonic()
        words = shlex.split(command.replace("{port}", str(self.port)))
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
                )
        except OSError as error:
            raise LoadError(f"{name}: {words[0]} cannot be started: {error}") from error

    def wait_ready(self, limit_s: float, api_key: str | None = None) -> float:
        """Waits until it tells its models; returns the seconds since it was started.

        /v1/models is what every OpenAI-compatible server has, and only when it is ready. It has to
        answer many times in a row: of several HTTP processes some are ready before others. Raises
        LoadError with the end of its log.
        """
        answered = 0
        while time.monotonic() < self.started_s + limit_s:
            if self._process.poll() is not None:
                raise LoadError(self._failure(f"ended with code {self._process.returncode}"))
            try:
                ask(f"{self.url}/v1/models", api_key)
                answered += 1
            except LoadError:
                answered = 0
                time.sleep(READY_POLL_S)
            if answered == READY_ANSWERS:
                return time.monotonic() - self.started_s
        raise LoadError(self._failure(f"was not ready within {limit_s:g} s"))

    def stop(self) -> None:
        """Ends it in order if it can be, and whatever it leaves behind."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failure(self, what: str) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{self.name} {what}; {self.log} ends with:", *tail])


@contextlib.contextmanager
def running_arms(
    specs: Sequence[ArmSpec],
    log_dir: Path,
    ready_limit_s: float,
    model: str | None = None,
    api_key: str | None = None,
) -> Iterator[list[Arm]]:
    """The arms, ready; those with commands are started one after another and ended at the end.

    Not at once: each sizes its KV cache by the memory that it finds free. Raises LoadError.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        arms = []
        for spec in specs:
            url = spec.target
            if not spec.is_url:
                server = ServerProcess(spec.name, spec.target, log_dir / f"{spec.name}.log")
                stack.callback(server.stop)
                url = server.url
                print(f"{spec.name}: ready after {server.wait_ready(ready_limit_s, api_key):.1f} s")
            arms.append(describe(spec, url, model, api_key))
        yield arms


def end_in_order_when_told() -> None:
    """Lets SIGTERM raise SystemExit, so that servers that were started are ended, too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
