"""A kernel that came as a file: its name in plans, and the text that is behind it. No jax.

A plan names such a kernel `file:<first digits of the text's sha256>/<name>` and lists its source.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError

PREFIX = "file:"
MAX_SOURCE_BYTES = 1 << 20
_NAME_DIGITS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """Where a kernel's text lies, and the sha256 it must have. The path is no part of identity."""

    path: str
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not _DIGEST.fullmatch(str(self.sha256)):
            raise ConfigError("a kernel source is a path and a sha256 of 64 hex digits")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def read(self) -> str:
        """Returns the text. Raises ConfigError if it is gone or is not what it was."""
        text = read_source(Path(self.path))
        if digest_of(text) != self.sha256:
            raise ConfigError(f"{self.path} has changed: its sha256 is no longer {self.sha256}")
        return text


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_name(sha256: str, name: str) -> str:
    """Returns the name in plans. Raises ConfigError for a name plans cannot carry."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"kernel name {name!r}: letters, digits, '_', '.', '-', at most 64")
    return f"{PREFIX}{sha256[:_NAME_DIGITS]}/{name}"


def check_name(name: str, source: KernelSource) -> None:
    """Raises ConfigError unless `name` is a file kernel's and carries the source's digits."""
    digits, _, own = name.removeprefix(PREFIX).partition("/")
    if not name.startswith(PREFIX) or kernel_name(source.sha256, own or "?") != name:
        raise ConfigError(f"source {name!r} does not belong to sha256 {source.sha256} ({digits!r})")


def read_source(path: Path) -> str:
    """Returns the text of a kernel file, which must be a regular file of at most 1 MiB.

    Raises ConfigError with the reason. Never waits for a pipe that nobody writes to.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} is no regular file")
            content = file.read(MAX_SOURCE_BYTES + 1)
        if len(content) > MAX_SOURCE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_SOURCE_BYTES} bytes")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
