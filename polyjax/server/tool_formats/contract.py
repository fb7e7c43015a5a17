"""What a tool format is: how a family of models writes calls of functions, read and constrained."""

from __future__ import annotations

import dataclasses
import enum
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclasses.dataclass(slots=True)
class CallDelta:
    """What a piece of text added to the call numbered `index`: its name, which comes first, once,
    and a piece of its arguments, JSON as the model wrote it."""

    index: int
    name: str | None
    arguments: str


Event = str | CallDelta  # a str is content: text for people


class ToolParser(Protocol):
    """Reads one answer as it arrives. How the text is cut into pieces makes no difference to what
    the events add up to; no text is lost, and what may yet begin a call is held back."""

    def push(self, text: str) -> list[Event]:
        """Returns what became certain with `text`."""

    def finish(self) -> list[Event]:
        """Returns what was held back, now that nothing follows."""


class Calls(enum.Enum):
    """How many calls a grammar makes a model write."""

    ONE = enum.auto()
    SOME = enum.auto()  # at least one
    ANY = enum.auto()  # text, with calls in it where the model wants them


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """How a grammar spells a format's marks, and which tokens are no text to it.

    `symbol` returns the symbol of a mark: a string, or a reference to the token that it is.
    `others` refers to all tokens that are no text, besides the format's marks and those that end
    an answer; it is empty where there are none.
    """

    symbol: Callable[[str], str]
    others: str

    def is_text(self, mark: str) -> bool:
        return self.symbol(mark).startswith('"')


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    `marks` are the texts around calls, which may be special tokens. `is_of` tells from a chat
    template's source whether its model writes this format. `is_bare_json` says that calls begin as
    any JSON does, so that a grammar cannot offer them beside a JSON answer. `grammar` returns Lark
    rules, of which `calls` is the first, that admit these functions with arguments of their
    schemas.
    """

    name: str
    marks: tuple[str, ...]
    is_of: Callable[[str], bool]
    parser: Callable[[], ToolParser]
    grammar: Callable[[Sequence[Function], Calls, Marks], str]
    is_bare_json: bool = False
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


def call_rules(functions: Sequence[Function], before_arguments: str) -> str:
    """Returns Lark rules: `call` is one JSON object that calls one of `functions`.

    `before_arguments` is the key of the arguments. JSON is spaced as Python's json.dumps does it,
    which is what chat templates show to models.
    """
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{before_arguments}": '
        schema = {**function.parameters, "x-guidance": _SPACING}
        rules.append(f'call_{i}: {json.dumps(head)} %json {json.dumps(schema)} "}}"')
    return "\n".join(rules) + "\n"


_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
