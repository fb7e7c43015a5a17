"""Progress of long work on standard error: what, how far, and how much time is left.

On a terminal one line is written over and over; in a log a line comes now and then.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

REDRAW_S = 0.1
LOG_S = 2.0


class ShownLine:
    """One line that changes: written over on a terminal, now and then in a log."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = REDRAW_S if self._stream.isatty() else LOG_S
        self._shown_s = 0.0

    def show(self, line: str, is_last: bool = False) -> None:
        """Shows `line` unless the one before is too recent; the last one always, and it stays."""
        now = time.monotonic()
        if now - self._shown_s < self._interval_s and not is_last:
            return
        self._shown_s = now
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[Kpolyjax: {line}" + ("\n" if is_last else ""))
        else:
            self._stream.write(f"polyjax: {line}\n")
        self._stream.flush()

    def begin(self) -> None:
        """The next line is shown however recent the one before is."""
        self._shown_s = 0.0


class ShownProgress:
    """A callback `(what, done, total)`. Phases are told apart by `what`; total 0 is unknown."""

    def __init__(self, stream: TextIO | None = None):
        self._line = ShownLine(stream)
        self._phase: str | None = None
        self._started_s = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._phase:
            self._phase, self._started_s = what, now
            self._line.begin()
        is_last = 0 < total <= done
        self._line.show(describe(what, done, total, now - self._started_s), is_last)
        if is_last:
            self._phase = None


def describe(what: str, done: int, total: int, elapsed_s: float) -> str:
    """Returns e.g. "compiling 12/49, 24 s, 74 s left"."""
    if not total:
        return f"{what} ..."
    if done >= total:
        return f"{what} {total}/{total}, took {elapsed_s:.1f} s"
    left = f", {elapsed_s / done * (total - done):.0f} s left" if done and elapsed_s > 1 else ""
    return f"{what} {done}/{total}, {elapsed_s:.0f} s{left}"
