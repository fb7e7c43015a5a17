"""Hermes, Qwen 2.5 and 3: each call as JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

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

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Templates with the same marks around something else: Qwen3-Coder's and GLM-4.5's.
_OTHER_BODIES = ("<function=", "<arg_key>")


class Parser(PieceReader):
    """Calls between marks in a text. White space beside calls is dropped, except between texts.

    A mark that no call follows is content, as is its text. A call ends with its object; CLOSE also
    ends it, outside strings, so that a brace too few does not swallow the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self._call = JsonCall(0, CLOSE)
        self._before_call = ""  # what is content if no call follows: white space, mark, white space
        self._num_calls = 0
        self._follows_call = False
        self._has_content = False

    def _read_content(self, is_end: bool) -> bool:
        if self._follows_call and (not self._has_content or (is_end and self._text.isspace())):
            self._text = self._text.lstrip()
        content, mark, self._text = until_mark(self._text, OPEN, is_end)
        self._emit(content)
        if not mark:
            return False
        self._before_call = mark
        self._read = self._read_opening
        return True

    def _read_opening(self, is_end: bool) -> bool:
        call = self._text.lstrip()
        if not call and not is_end:
            return False
        self._call = JsonCall(self._num_calls, CLOSE)
        if call.startswith("{"):
            self._before_call += self._text[: -len(call)]
            self._text = call
            self._read = self._read_call
        else:
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
            self._read = self._read_closing
        return True

    def _read_closing(self, is_end: bool) -> bool:
        text = self._text.lstrip()
        if CLOSE.startswith(text):
            if text != CLOSE and not is_end:
                return False
            text = ""
        self._text = text.removeprefix(CLOSE)
        self._follows_call = True
        self._read = self._read_content
        return True

    def _emit(self, content: str) -> None:
        super()._emit(content)
        if content:
            self._follows_call = False
            self._has_content = True


def _is_of(template: str) -> bool:
    return OPEN in template and not any(body in template for body in _OTHER_BODIES)


def _grammar(functions: Sequence[Function], calls: Calls, marks: Marks) -> str:
    opening, closing = marks.symbol(OPEN), marks.symbol(CLOSE)
    rules = f'block: "\\n" call "\\n" {closing}\n' + call_rules(functions, "arguments")
    match calls:
        case Calls.ONE:
            return f"calls: {opening} block\n{rules}"
        case Calls.SOME:
            return f'calls: {opening} block ("\\n" {opening} block)*\n{rules}'
        case Calls.ANY if marks.is_text(OPEN):
            other = f" | TEXT {marks.others}" if marks.others else ""
            text = f"opened[lazy]: TEXT {opening}\nTEXT: /(.|\\n)*/\n"
            return f"calls: (opened block{other})* TEXT\n{text}{rules}"
        case Calls.ANY:
            other = f"TEXT? ({marks.others} TEXT?)*" if marks.others else "TEXT?"
            text = f"text: {other}\nTEXT: /(.|\\n)+/\n"
            return f"calls: text ({opening} block text)*\n{text}{rules}"


FORMAT = ToolFormat("hermes", (OPEN, CLOSE), _is_of, Parser, _grammar)
