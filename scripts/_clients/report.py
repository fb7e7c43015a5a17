"""What a client program tells scripts/check_clients: its version, then a line a check."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What every client program is started with.

    `url` is without /v1, `tokenizer` a directory in Hugging Face's format, `work` a folder to fill.
    """

    url: str
    model: str
    tokenizer: Path
    work: Path


def arguments() -> Arguments:
    url, model, tokenizer, work = sys.argv[1:5]
    return Arguments(url, model, Path(tokenizer), Path(work))


def run_command(
    command: list[str], environment: Mapping[str, str], what_failed: str = "the client"
) -> str:
    """Runs a command of this environment to its end; returns what it said.

    Raises AssertionError with the end of that where it failed.
    """
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, file=sys.stderr, flush=True)
    assert done.returncode == 0, f"{what_failed} ended with {done.returncode}: {done.stdout[-300:]}"
    return done.stdout


class Checks:
    """Runs checks one after another, whatever becomes of those before."""

    def __init__(self, client: str, version: str):
        self._failed = False
        print(f"version {client} {version}", flush=True)

    def run(self, what: str) -> Callable[[Callable[[], None]], None]:
        """Decorates a check, which runs at once and fails by raising."""

        def run_now(check: Callable[[], None]) -> None:
            try:
                check()
            except Exception as error:
                self._failed = True
                traceback.print_exc()
                reason = " ".join(str(error).split())[:300]
                print(f"FAIL {what}: {type(error).__name__}: {reason}", flush=True)
            else:
                print(f"pass {what}", flush=True)

        return run_now

    def finish(self) -> None:
        """Ends the program; the exit code says whether all passed."""
        sys.exit(1 if self._failed else 0)
