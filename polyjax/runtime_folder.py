"""The private folder that holds the sockets between a server's processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "polyjax-"
# Longest path of a Unix socket is 107 bytes on Linux, 103 on macOS; the socket's name is short.
_MAX_FOLDER_CHARACTERS = 80


def make_runtime_folder() -> Path:
    """Makes a folder only this user can enter, and removes those of processes killed before."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + 40 > _MAX_FOLDER_CHARACTERS:
        parent = Path("/tmp")
    for old in parent.glob(f"{_PREFIX}[0-9]*-*"):
        if _is_orphaned(old):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _is_orphaned(folder: Path) -> bool:
    pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
    try:
        if not pid.isdigit() or folder.stat().st_uid != os.getuid():
            return False
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
