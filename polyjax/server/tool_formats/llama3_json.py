"""Llama 3.1 and later: the answer is {"name": ..., "parameters": {...}}, and nothing before it.

The prompt format allows <|python_tag|> in front. Several calls are joined by semicolons; Llama 3's
own templates take one a turn, so that a grammar asks for one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from polyjax.server.tool_formats.contract import (
    Calls,
    Event,
    Function,
    Marks,
    ToolFormat,
    call_rules,
)
from polyjax.server.tool_formats.json_call import JsonCall

TAG = "<|python_tag|>"
_BEFORE_FIRST = re.compile(rf"\s*(?:{re.escape(TAG)}\s*)?(?={{)")
_BEFORE_NEXT = re.compile(r"\s*;\s*(?={)")


class Parser:
    """Calls from the beginning on; from where there is none, all is content.

    White space after a call is no part of it.
    """

    def __init__(self) -> None:
        self._text = ""  # undecided
        self._call: JsonCall | None = None
        self._before_call = ""  # what is content if no call follows
        self._num_calls = 0
        self._is_content = False

    def push(self, text: str) -> list[Event]:
        self._text += text
        return self._read(is_end=False)

    def finish(self) -> list[Event]:
        return self._read(is_end=True)

    def _read(self, is_end: bool) -> list[Event]:
        events: list[Event] = []
        while not self._is_content and (
            self._begin(is_end) if self._call is None else self._go_on(self._call, is_end, events)
        ):
            pass
        if self._is_content and self._text:
            events.append(self._text)
            self._text = ""
        return events

    def _begin(self, is_end: bool) -> bool:
        """Returns whether it is decided if a call begins here."""
        pattern, mark = (_BEFORE_NEXT, ";") if self._num_calls else (_BEFORE_FIRST, TAG)
        if before := pattern.match(self._text):
            self._before_call, self._text = before[0], self._text[before.end() :]
            self._call = JsonCall(self._num_calls)
            return True
        bare = self._text.lstrip()
        if not is_end and (mark.startswith(bare) or bare.rstrip() == mark):
            return False
        if self._num_calls:
            self._text = bare
        self._is_content = True
        return True

    def _go_on(self, call: JsonCall, is_end: bool, events: list[Event]) -> bool:
        """Returns whether the call has ended."""
        events += call.read(self._text, is_end)
        self._text = call.rest or ""
        if call.rest is None:
            return False
        self._call = None
        if call.name is None:
            before = self._before_call.lstrip() if self._num_calls else self._before_call
            self._text = before + call.text + self._text
            self._is_content = True
        else:
            self._num_calls += 1
        return True


def _is_of(template: str) -> bool:
    return "<|start_header_id|>" in template and '"parameters"' in template


def _grammar(functions: Sequence[Function], calls: Calls, marks: Marks) -> str:
    rules = call_rules(functions, "parameters")
    if calls is not Calls.ANY:
        return f"calls: call\n{rules}"
    text = f"TEXT? ({marks.others} /(.|\\n)+/?)*" if marks.others else "TEXT?"
    return f"calls: call | text\ntext: {text}\nTEXT: /[^{{](.|\\n)*/\n{rules}"


FORMAT = ToolFormat("llama3_json", (TAG,), _is_of, Parser, _grammar, is_bare_json=True)
