"""Mistral up to tokenizer version 7: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from polyjax.server.tool_formats.contract import (
    Calls,
    Function,
    Marks,
    ToolFormat,
    call_rules,
)
from polyjax.server.tool_formats.json_call import JsonCall
from polyjax.server.tool_formats.pieces import PieceReader, until_mark

MARK = "[TOOL_CALLS]"
_BEFORE_FIRST = re.compile(r"\s*\[\s*(?={)")
_BEFORE_NEXT = re.compile(r"\s*,\s*(?={)")
_MAY_COME_BEFORE = re.compile(r"\s*(?:[\[,]\s*)?")
_AFTER_LAST = re.compile(r"\s*\]\s*")
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse any other


class Parser(PieceReader):
    """Lists of calls in a text. White space beside a list is dropped.

    A mark that no list of calls follows is content, as is what breaks off a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self._call = JsonCall(0)
        self._before_call = ""  # what is content if no call follows
        self._num_calls = 0
        self._is_first = True  # of its list

    def _read_content(self, is_end: bool) -> bool:
        content, mark, self._text = until_mark(self._text, MARK, is_end)
        self._emit(content)
        if not mark:
            return False
        self._before_call, self._is_first = mark, True
        self._read = self._read_opening
        return True

    def _read_opening(self, is_end: bool) -> bool:
        before = (_BEFORE_FIRST if self._is_first else _BEFORE_NEXT).match(self._text)
        if before is not None:
            self._before_call += before[0]
            self._text = self._text[before.end() :]
            self._call = JsonCall(self._num_calls)
            self._read = self._read_call
            return True
        if _MAY_COME_BEFORE.fullmatch(self._text):
            if not is_end:
                return False
            self._text = self._text if self._is_first else ""
        end = None if self._is_first else _AFTER_LAST.match(self._text)
        if end is not None:
            if end.end() == len(self._text) and not is_end:
                return False  # more white space may come
            self._text = self._text[end.end() :]
        self._emit(self._before_call)
        self._read = self._read_content
        return True

    def _read_call(self, is_end: bool) -> bool:
        self._events += self._call.read(self._text, is_end)
        self._text = self._call.rest or ""
        if self._call.rest is None:
            return False
        if self._call.name is None:
            self._emit(self._before_call + self._call.text)
            self._read = self._read_content
        else:
            self._num_calls += 1
            self._is_first = False
            self._read = self._read_opening
        self._before_call = ""
        return True


def _is_of(template: str) -> bool:
    return MARK in template and "[ARGS]" not in template


def _grammar(functions: Sequence[Function], calls: Calls, marks: Marks) -> str:
    mark = marks.symbol(MARK)
    more = "" if calls is Calls.ONE else ' (", " call)*'
    rules = f'list: " "? "[" call{more} "]"\n' + call_rules(functions, "arguments")
    if calls is not Calls.ANY:
        return f"calls: {mark} list\n{rules}"
    if marks.is_text(MARK):
        other = f"(TEXT {marks.others})* " if marks.others else ""
        text = f"opened[lazy]: TEXT {mark}\nTEXT: /(.|\\n)*/\n"
        return f"calls: {other}(opened list | TEXT)\n{text}{rules}"
    other = f"TEXT? ({marks.others} TEXT?)*" if marks.others else "TEXT?"
    return f"calls: text ({mark} list)?\ntext: {other}\nTEXT: /(.|\\n)+/\n{rules}"


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


FORMAT = ToolFormat("mistral", (MARK,), _is_of, Parser, _grammar, new_id=_new_id)
