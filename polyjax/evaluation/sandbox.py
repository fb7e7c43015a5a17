"""Runs code that a model wrote: bounded time and memory, no network, a folder of its own.

The program gets a network namespace with no interface in it, a process namespace that ends with it,
hard resource limits, an empty environment and a temporary working folder. Where the kernel refuses
the namespaces nothing is run: a sandbox that is not one would be worse than an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from polyjax.core.errors import ConfigError

_READY = b"sandboxed\n"

# The first process of a process namespace takes every other one with it when it ends.
_ENTER = """
import os, resource, sys
os.unshare({flags})
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
for limit, value in {limits}:
    resource.setrlimit(limit, (value, value))
sys.stdout.buffer.write({ready}); sys.stdout.flush()
source = open(sys.argv[1]).read()
exec(compile(source, "program", "exec"), {{"__name__": "__main__"}})
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended: `passed` is exit status 0; `reason` says why it did not."""

    passed: bool
    reason: str


def run(program: str, timeout_s: float = 5.0, memory_bytes: int = 512 * 2**20) -> Outcome:
    """Runs Python source and returns how it ended. Raises ConfigError if it cannot be isolated."""
    with tempfile.TemporaryDirectory(prefix="polyjax-sandbox-") as folder:
        path, out, err = (Path(folder) / name for name in ("program.py", "stdout", "stderr"))
        path.write_text(program)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", _entry(timeout_s, memory_bytes), str(path)],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                child.wait(timeout_s + 2.0)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"did not end within {timeout_s:g} s")
            finally:
                _kill_session(child)
        errors = err.read_text(errors="replace").strip().splitlines()[-1:]
        if not out.read_bytes().startswith(_READY):
            raise ConfigError(
                "model-written code cannot be isolated here (no permission for namespaces): "
                + " ".join(errors)
            )
        return _outcome(child.returncode, errors)


def _entry(timeout_s: float, memory_bytes: int) -> str:
    cpu_s = max(1, round(timeout_s))
    limits = [
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 2**20),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ]
    flags = os.CLONE_NEWNET | os.CLONE_NEWPID
    if os.geteuid() != 0:
        flags |= os.CLONE_NEWUSER
    return _ENTER.format(flags=flags, limits=limits, ready=_READY)


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """Ends the child; its process namespace ends with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _outcome(status: int, errors: list[str]) -> Outcome:
    if status == 0:
        return Outcome(True, "")
    if status < 0:
        return Outcome(False, f"ended by {signal.Signals(-status).name}")
    return Outcome(False, errors[0] if errors else f"exit status {status}")
