"""What a served model can do with tools: its chat template for them, and how it writes calls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from polyjax.core.errors import RequestError
from polyjax.io.chat import ChatTemplate
from polyjax.io.tokenizer import Tokenizer
from polyjax.server.tool_formats import FORMATS
from polyjax.server.tool_formats.contract import Marks, ToolFormat


@dataclasses.dataclass(frozen=True, slots=True)
class ToolSupport:
    """`template` is the one for requests with tools, `format` how its model writes calls.

    Either is None where there is none. `template_name` says where the template is from.
    `allows_auto` is False where the operator wants no calls unless a request asks for one.
    `shown_ids` are special tokens that are marks of calls and must not be hidden from the parser.
    """

    template: ChatTemplate | None
    template_name: str
    format: ToolFormat | None
    allows_auto: bool
    marks: Marks
    shown_ids: frozenset[int]

    @classmethod
    def build(
        cls,
        template: ChatTemplate | None,
        template_name: str,
        tool_format: ToolFormat | None,
        allows_auto: bool,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
    ) -> ToolSupport:
        texts = () if tool_format is None else tool_format.marks
        ids = {text: tokenizer.backend.token_to_id(text) for text in texts}
        return cls(
            template if template is not None and template.takes_tools else None,
            template_name,
            tool_format,
            allows_auto,
            _marks(tokenizer, texts, eos_token_ids),
            frozenset(ids.values()) & tokenizer.special_ids,
        )

    def template_for_tools(self) -> ChatTemplate:
        """Returns the template of requests with tools. Raises RequestError if there is none."""
        if self.template is None:
            raise RequestError(
                f"{self.template_name} takes no tools; start the server with "
                "--chat_template=FILE, a Jinja template that does",
                "tools",
            )
        return self.template

    def format_for(self, is_auto: bool) -> ToolFormat:
        """Returns how the model writes calls. Raises RequestError if requests cannot ask for any.

        `is_auto` says that the request leaves it to the model whether to call.
        """
        self.template_for_tools()
        if self.format is None:
            raise RequestError(
                f"it is not known how the model of {self.template_name} writes tool calls; start "
                f"the server with --tool_call_parser, one of {', '.join(FORMATS)}",
                "tools",
            )
        if is_auto and not self.allows_auto:
            raise RequestError(
                "tool_choice auto is off on this server (--noenable_auto_tool_choice)",
                "tool_choice",
            )
        return self.format


def _marks(tokenizer: Tokenizer, texts: Sequence[str], eos_token_ids: Sequence[int]) -> Marks:
    """llguidance takes an added token for text unless it is special or spelled <...>."""
    added = tokenizer.backend.get_added_tokens_decoder()
    no_text = {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or (token.content.startswith("<") and token.content.endswith(">"))
    }

    def symbol(mark: str) -> str:
        return f"<[{no_text[mark]}]>" if mark in no_text else json.dumps(mark)

    others = [i for text, i in no_text.items() if text not in texts and i not in eos_token_ids]
    return Marks(symbol, f"<[{','.join(map(str, sorted(others)))}]>" if others else "")
