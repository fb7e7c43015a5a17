"""Arms of a comparison: something that answers completion requests, in a process or over HTTP."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from polyjax.core.errors import ConfigError

Requests = Mapping[str, dict[str, Any]]
Choices = dict[str, dict[str, Any]]


class Arm(Protocol):
    """Answers requests by item id with the first choice of each, whose answer is its "text".

    A body with messages is a chat, any other a text completion.
    """

    @property
    def name(self) -> str: ...

    def answer(self, requests: Requests) -> Choices: ...


@dataclasses.dataclass(frozen=True)
class BatchArm:
    """`python -m polyjax.batch` with some flags: another plan, another dtype, another model.

    `folder` keeps requests and results, so that an interrupted evaluation resumes.
    """

    name: str
    flags: tuple[str, ...]
    folder: Path

    def answer(self, requests: Requests) -> Choices:
        """Returns the choices. Raises ConfigError naming requests that failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        asked, answered = (self.folder / f"{self.name}.{x}.jsonl" for x in ("requests", "results"))
        lines = [
            json.dumps({"custom_id": item, "method": "POST", "url": _route(body), "body": body})
            for item, body in requests.items()
        ]
        text = "\n".join(lines) + "\n"
        if not asked.exists() or asked.read_text() != text:
            answered.unlink(missing_ok=True)  # results of other questions
            asked.write_text(text)
        command = [
            sys.executable,
            "-m",
            "polyjax.batch",
            f"--input={asked}",
            f"--output={answered}",
        ]
        subprocess.run([*command, *self.flags], check=True)
        with answered.open() as results:
            return dict(_choice(json.loads(line)) for line in results)


def _choice(result: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if result["error"]:
        raise ConfigError(f"{result['custom_id']}: {result['error']['message']}")
    return result["custom_id"], _first(result["response"]["body"])


def _route(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _first(answer: Mapping[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = answer["choices"][0]
    return {**choice, "text": choice["message"]["content"] or ""} if "message" in choice else choice


@dataclasses.dataclass(frozen=True)
class ServerArm:
    """Any OpenAI-compatible server, by the URL its `/v1` is under."""

    name: str
    url: str
    concurrency: int = 16
    timeout_s: float = 600.0

    def answer(self, requests: Requests) -> Choices:
        """Returns the choices. Raises ConfigError with the server's answer to a failed request."""
        model = self._post("/v1/models", None)["data"][0]["id"]

        def one(item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
            return item[0], _first(self._post(_route(item[1]), {**item[1], "model": model}))

        with concurrent.futures.ThreadPoolExecutor(self.concurrency) as pool:
            return dict(pool.map(one, requests.items()))

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url.rstrip("/").removesuffix("/v1") + path,
            data,
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.url}{path}: {error.read()[:500]!r}") from error
        except OSError as error:
            raise ConfigError(f"{self.url}{path}: {error}") from error


def parse_arm(text: str, folder: Path | None = None) -> Arm:
    """Returns the arm that "NAME URL" or "NAME [--flag=value ...]" means."""
    name, *rest = text.split()
    if not name.replace("_", "").isalnum():
        raise ConfigError(f"--arm: a name is letters, digits and _, not {name!r}")
    if len(rest) == 1 and rest[0].startswith(("http://", "https://")):
        return ServerArm(name, rest[0])
    if not all(flag.startswith("-") for flag in rest):
        raise ConfigError(f"--arm={text!r} is neither 'NAME URL' nor 'NAME --flag=value ...'")
    return BatchArm(name, tuple(rest), folder or Path(tempfile.mkdtemp(prefix="polyjax-eval-")))
