"""What happened to plans, limits and leases: numbered events in memory, and an audit log on disk.

An audit line is written and synced by a thread of its own: a slow disk holds up no step. What is
lost when the process is killed is at most the lines of the last moments.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError

CAPACITY = 1024  # events kept in memory; the audit log keeps all
_FLUSH_LIMIT_S = 5.0  # how long closing waits for a slow disk

log = logging.getLogger("polyjax.events")

Event = dict[str, Any]
Record = Callable[..., Any]
"""Takes an event: its kind, and facts by keyword."""


class AuditLog:
    """An append-only file of JSON lines, each synced. Raises ConfigError if it cannot be opened.

    A disk that fails later costs lines, which are counted in `failures`, never a step.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.failures = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"--audit_log={path}: {error}") from error
        self._end_torn_line()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def append(self, event: Mapping[str, Any]) -> None:
        self._lines.put(json.dumps(event, default=str).encode() + b"\n")

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._lines.put(None)
        self._thread.join(_FLUSH_LIMIT_S)
        self._file.close()

    def _end_torn_line(self) -> None:
        """A killed process may have left half a line: what follows starts on one of its own."""
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except (OSError, ValueError) as error:
                self.failures += 1
                log.warning("audit log %s: %s", self.path, error)


class EventLog:
    """The events of one engine, numbered from 1; the last `capacity` can be read.

    `where` tells step number and epoch at the moment of an event.
    """

    def __init__(
        self,
        where: Callable[[], tuple[int, int]],
        audit: AuditLog | None = None,
        capacity: int = CAPACITY,
    ):
        self._where = where
        self._audit = audit
        self._events: collections.deque[Event] = collections.deque(maxlen=capacity)
        self.last = 0

    def add(self, kind: str, **details: Any) -> Event:
        """Records an event; `details` are ready for JSON."""
        step, epoch = self._where()
        self.last += 1
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        event = {"number": self.last, "time": now, "step": step, "epoch": epoch, "kind": kind}
        event |= details
        self._events.append(event)
        if self._audit is not None:
            self._audit.append(event)
        log.info("%s", " ".join(f"{name}={value}" for name, value in event.items()))
        return event

    def after(self, number: int, limit: int = CAPACITY) -> list[Event]:
        """The oldest `limit` events later than `number`."""
        later = [event for event in self._events if event["number"] > number]
        return later[:limit]

    def answer(self, after: int, limit: int = CAPACITY) -> Event:
        """What the "events" command answers: the events, and where to go on from."""
        found = self.after(after, limit)
        following = found[-1]["number"] if found else max(after, self.oldest - 1)
        return {"events": found, "next": following, "oldest": self.oldest}

    @property
    def oldest(self) -> int:
        """The number of the oldest event that can still be read; one past the last if none."""
        return self._events[0]["number"] if self._events else self.last + 1

    def close(self) -> None:
        if self._audit is not None:
            with contextlib.suppress(OSError):
                self._audit.close()
