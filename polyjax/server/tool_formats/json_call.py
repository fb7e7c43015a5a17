"""One call written as a JSON object, {"name": ..., "arguments": {...}}, read as it is written."""

from __future__ import annotations

import json
import re
from typing import Any

from polyjax.server.tool_formats.contract import CallDelta

_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_MAX_HEAD_CHARACTERS = 1024  # a longer one is read when its object is complete


class JsonCall:
    """Reads from the call's `{` on, to the `}` that matches it, or to `close` outside strings.

    Once the name and the beginning of the arguments are there (`name` is no longer None) the
    arguments come as they are written, valid or not. An object that has them in another order is
    read when it is complete. Of one that is no call `name` stays None and `text` is all of it.
    `rest` is what follows the call; it is None until the call has ended.
    """

    def __init__(self, index: int, close: str = ""):
        self.name: str | None = None
        self.text = ""  # what has come, except arguments that were returned
        self.rest: str | None = None
        self._index = index
        self._close = close
        self._structure = re.compile(rf'["\\{{}}\[\]{re.escape(close[:1])}]')
        self._scanned = 0  # how far into `text` everything is understood
        self._depth = 0
        self._in_string = False
        self._arguments_end: int | None = None

    def read(self, piece: str, is_end: bool) -> list[CallDelta]:
        """Returns what became certain with `piece`, the answer's last one if `is_end`."""
        self.text += piece
        was_known = self.name is not None
        if not was_known:
            self._find_head()
        self._scan()
        if is_end and self.rest is None:
            self._end(len(self.text))
        if self.name is not None:
            arguments = self._take_arguments()
        elif self.rest is not None:
            arguments = self._read_complete()
        if self.name is None or (was_known and not arguments):
            return []
        return [CallDelta(self._index, None if was_known else self.name, arguments)]

    def _find_head(self) -> None:
        head = _HEAD.match(self.text, 0, _MAX_HEAD_CHARACTERS)
        if head is None or not isinstance(name := _loads(head["name"]), str) or not name:
            return
        self.name = name
        self.text = self.text[head.end() :]
        # Inside the object, before its arguments.
        self._scanned, self._depth, self._in_string = 0, 1, False

    def _scan(self) -> None:
        """Goes on to the end of the call, or to the last character that is understood."""
        while found := self._structure.search(self.text, self._scanned):
            at, char = found.start(), found[0]
            if self._in_string:
                if char == "\\":
                    self._scanned = at
                    at += 1  # what is escaped
                    if at == len(self.text):
                        return
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1 and self.name is not None and self._arguments_end is None:
                    self._arguments_end = at + 1
                if self._depth == 0:
                    return self._end(at + 1)
            elif self.text.startswith(self._close, at):
                return self._end(at)
            elif self._close.startswith(self.text[at:]):
                self._scanned = at
                return
            self._scanned = at + 1
        self._scanned = len(self.text)

    def _end(self, at: int) -> None:
        self.text, self.rest = self.text[:at], self.text[at:]
        self._scanned = at

    def _take_arguments(self) -> str:
        """Arguments are at the front of `text` until they end; what follows them is dropped."""
        end = self._scanned if self._arguments_end is None else self._arguments_end
        taken, self.text = self.text[:end], self.text[self._scanned :]
        self._scanned = 0
        if self._arguments_end is not None:
            self._arguments_end = 0
        return taken

    def _read_complete(self) -> str:
        call = _loads(self.text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return ""
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # JSON within a string
            arguments = _loads(arguments)
        if not isinstance(arguments, dict):
            return ""
        self.name = call["name"]
        return json.dumps(arguments, ensure_ascii=False)


def _loads(text: str) -> Any:
    """The value of a JSON text, None where it is not JSON. Strings may hold raw line breaks."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
