"""Turns: beside a server, the measuring process times something only while it is its turn.

Both ends map one small file: the tuner writes until when the turn lasts, the measuring process
whether it waits for one. A turn ends between two samples, so that no sample is cut in two.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "POLYJAX_TURNS"  # in the environment of a measuring process: the file's path
_UNTIL_S, _WAITS, _SAMPLES = range(3)
_FIELDS = 3
_BYTES = 8 * _FIELDS
_NAP_S = 0.002

_clock = time.monotonic  # CLOCK_MONOTONIC: the same in all processes of a machine


class Turns:
    """One end of the file, which is made if it is not there."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        with self.path.open("a+b") as file:
            file.truncate(_BYTES)
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._fields = memoryview(self._map).cast("d")
        self._granted_s = 0.0  # the end of the turn that the last sample was in
        self._began_s = 0.0

    # -- the tuner's end ---------------------------------------------------------------------

    def begin(self, until_s: float) -> None:
        self._fields[_UNTIL_S] = until_s

    def end(self) -> None:
        self._fields[_UNTIL_S] = 0.0

    def forget(self) -> None:
        """The measuring process is gone, and what it said with it."""
        self._fields[_WAITS] = 0.0

    @property
    def is_wanted(self) -> bool:
        return self._fields[_WAITS] != 0.0

    @property
    def samples(self) -> int:
        """How many samples were begun."""
        return int(self._fields[_SAMPLES])

    # -- the measuring process's end ---------------------------------------------------------

    def wait(self) -> None:
        """Returns once it is our turn and the next sample, if it takes as long as the last, fits.

        The first sample of a turn need not fit: it may take longer than any turn.
        """
        last_s = _clock() - self._began_s if self._began_s else 0.0
        while not self._may_begin(last_s):
            self._fields[_WAITS] = 1.0
            time.sleep(_NAP_S)
        self._fields[_WAITS] = 0.0
        self._fields[_SAMPLES] += 1.0
        self._began_s = _clock()

    def _may_begin(self, last_s: float) -> bool:
        until_s, now_s = self._fields[_UNTIL_S], _clock()
        if until_s != self._granted_s and now_s < until_s:
            self._granted_s = until_s
            return True
        return now_s + last_s < until_s


def waiting() -> Callable[[], None]:
    """What to call before each sample; does nothing where no turns are taken."""
    path = os.environ.get(VARIABLE)
    return Turns(path).wait if path else lambda: None
