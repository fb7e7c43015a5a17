"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """The text that is certain after a piece, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds the first stop string to be complete, across the borders of pieces.

    Text that may yet turn out to begin a stop string is held back, no more than that. With
    `include_stop` the stop string itself is part of the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool):
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str) -> Stopped:
        text = self._held + piece
        found = self._first_complete(text)
        if found is not None:
            end, stop = found
            self._held = ""
            return Stopped(text[: end if self._include_stop else end - len(stop)], stop)
        certain = len(text) - self._length_to_hold(text)
        self._held = text[certain:]
        return Stopped(text[:certain])

    def finish(self) -> str:
        """Returns what was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """What ends first, as if the text came by characters; of those the longest."""
        ends = [(at + len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(ends, key=lambda end: (end[0], -len(end[1])), default=None)

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
