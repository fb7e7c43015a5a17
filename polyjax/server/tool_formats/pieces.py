"""Reading a text that arrives in pieces: what readers share, and marks in it."""

from __future__ import annotations

from collections.abc import Callable

from polyjax.server.tool_formats.contract import Event


class PieceReader:
    """A parser that is in one of several readers at a time, `_read`, and collects events.

    A reader consumes what it can of `_text` and returns whether another one may go on. A subclass
    gives the first of them as `_read_content`.
    """

    def __init__(self) -> None:
        self._text = ""  # undecided
        self._read: Callable[[bool], bool] = self._read_content
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        self._text += text
        return self._advance(is_end=False)

    def finish(self) -> list[Event]:
        return self._advance(is_end=True)

    def _read_content(self, is_end: bool) -> bool:
        raise NotImplementedError

    def _emit(self, content: str) -> None:
        if content:
            self._events.append(content)

    def _advance(self, is_end: bool) -> list[Event]:
        while self._read(is_end):
            pass
        events, self._events = self._events, []
        return events


def until_mark(text: str, mark: str, is_end: bool) -> tuple[str, str, str]:
    """Returns what `text` certainly has before the first `mark`, the mark, and the rest.

    White space before the mark counts to it. Where there is no mark yet, the middle is empty and
    the rest is what may turn out to begin with one; at the end there is no such rest.
    """
    at = text.find(mark)
    if at >= 0:
        end = len(text[:at].rstrip())
        return text[:end], text[end : at + len(mark)], text[at + len(mark) :]
    if is_end:
        return text, "", ""
    end = len(text[: _begun_at_end(text, mark)].rstrip())
    return text[:end], "", text[end:]


def _begun_at_end(text: str, mark: str) -> int:
    """Where the longest end of `text` lies that `mark` begins with; len(text) if there is none."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return at if at >= 0 else len(text)
