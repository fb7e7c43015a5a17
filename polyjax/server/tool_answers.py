"""Chat answers that may hold tool calls, whole and in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyjax.server.answers import Json
from polyjax.server.choice import Choice, Delta
from polyjax.server.formats import ChatFormat
from polyjax.server.tool_formats.contract import CallDelta
from polyjax.server.tools import ToolUse


class CallReader:
    """Reads one choice. Of the calls that a request takes but one of, further ones are dropped."""

    def __init__(self, use: ToolUse):
        self._use = use
        self._parser = use.format.parser()
        self._has_content = False
        self._num_calls = 0

    def read(self, delta: Delta) -> tuple[str, list[Json]]:
        """Returns what `delta` adds to the content, and to calls, as a stream spells it."""
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        content = "".join([event for event in events if isinstance(event, str)])
        self._has_content |= bool(content)
        return content, self._spell([event for event in events if isinstance(event, CallDelta)])

    def finish_reason(self, delta: Delta) -> str | None:
        """As OpenAI has it: "tool_calls", but "stop" where the request named the function."""
        is_call = self._num_calls > 0 and not self._use.is_named
        return "tool_calls" if is_call and delta.finish_reason == "stop" else delta.finish_reason

    @property
    def has_nothing(self) -> bool:
        return not self._has_content and not self._num_calls

    def _spell(self, deltas: Sequence[CallDelta]) -> list[Json]:
        """One entry for each call that something was added to."""
        entries: dict[int, Json] = {}
        for delta in deltas:
            if delta.index > 0 and not self._use.is_parallel:
                continue
            if delta.name is not None:
                self._num_calls += 1
                entries[delta.index] = {
                    "index": delta.index,
                    "id": self._use.format.new_id(),
                    "type": "function",
                    "function": {"name": delta.name, "arguments": delta.arguments},
                }
            elif delta.index in entries:
                entries[delta.index]["function"]["arguments"] += delta.arguments
            else:
                function = {"arguments": delta.arguments}
                entries[delta.index] = {"index": delta.index, "function": function}
        return list(entries.values())


@dataclasses.dataclass(slots=True)
class ToolChatFormat:
    """Spells choices as `chat` does, with the calls in their text taken out of it."""

    chat: ChatFormat
    use: ToolUse
    object_name: str = "chat.completion"
    chunk_object_name: str = "chat.completion.chunk"
    has_plain_pieces: bool = False
    _readers: dict[int, CallReader] = dataclasses.field(default_factory=dict)

    def whole(self, choice: Choice, deltas: Sequence[Delta]) -> Json:
        reader = CallReader(self.use)
        whole = dataclasses.replace(deltas[-1], text="".join(delta.text for delta in deltas))
        content, calls = reader.read(whole)
        answer = self.chat.whole(choice, deltas)
        answer["message"]["content"] = content if content or not calls else None
        if calls:
            answer["message"]["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in calls
            ]
        return {**answer, "finish_reason": reader.finish_reason(deltas[-1])}

    def piece(self, choice: Choice, delta: Delta) -> Json:
        """An event for every token, as ever; the delta of one that adds nothing yet is empty."""
        if (reader := self._readers.get(choice.index)) is None:
            reader = self._readers[choice.index] = CallReader(self.use)
        content, calls = reader.read(delta)
        piece = self.chat.piece(choice, delta)
        piece["delta"]["content"] = content
        is_empty_answer = delta.finish_reason is not None and reader.has_nothing
        if not content and not is_empty_answer:
            del piece["delta"]["content"]
        if calls:
            piece["delta"]["tool_calls"] = calls
        return {**piece, "finish_reason": reader.finish_reason(delta)}

    def opening(self, choice: Choice) -> Json | None:
        return None
