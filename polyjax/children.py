"""Starting polyjax modules as child processes that are told their work on standard input."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

Child = asyncio.subprocess.Process

_ROOT = Path(__file__).resolve().parent.parent


async def start_child(module: str, first_line: bytes, pipes_output: bool = False) -> Child:
    """Runs `python -m module` with `first_line` on standard input, which stays open.

    With `pipes_output`, what it prints comes through `stdout`.
    """
    environment = dict(os.environ)
    if not sys.flags.safe_path:  # then polyjax may be found only by the working directory
        paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE if pipes_output else None,
        env=environment,
    )
    assert child.stdin is not None
    child.stdin.write(first_line + b"\n")
    await child.stdin.drain()
    return child
