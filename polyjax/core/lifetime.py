"""Child processes that never outlive their parent, and those that give way to it.

The parent keeps the write end of the child's standard input open. When the parent ends, however it
ends, the kernel closes that end and the child reads end-of-file. On Linux the kernel can also kill
the child outright, which covers a child stuck in native code that holds the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
EXIT_ORPHANED = 75  # EX_TEMPFAIL of <sysexits.h>
_NICENESS = 10  # on a machine with few cores serving goes first
_KILLED_FIRST = 800  # of at most 1000: proc(5), oom_score_adj


def kill_when_parent_ends() -> None:
    """Asks the kernel to send SIGKILL here when the parent ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def yield_to_serving() -> None:
    """For processes whose work can be done again: less of the processor, first to go if memory
    runs out."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # no Linux, or not allowed in this container
        Path("/proc/self/oom_score_adj").write_text(str(_KILLED_FIRST))


def parent_pipe() -> RawIOBase:
    """Standard input without a buffer, whose lock would be in the way when the process ends."""
    return open(0, "rb", buffering=0, closefd=False)


def watch_parent(
    stream: RawIOBase | BinaryIO,
    on_line: Callable[[bytes], None] = lambda line: None,
    on_orphaned: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Ends this process when `stream`, the pipe from the parent, ends; returns the watching thread.

    `on_line` gets each line the parent writes until then; `on_orphaned` runs before the end.
    """

    def watch() -> None:
        while line := stream.readline():
            on_line(line.strip())
        try:
            on_orphaned()
        finally:
            os._exit(EXIT_ORPHANED)

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread
