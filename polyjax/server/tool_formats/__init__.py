"""How models write tool calls. Adding a way is one file with a `FORMAT`, and its name here."""

from __future__ import annotations

from polyjax.server.tool_formats import hermes, llama3_json, mistral
from polyjax.server.tool_formats.contract import ToolFormat

FORMATS = {
    module.FORMAT.name: module.FORMAT
    for module in (
        hermes,
        llama3_json,
        mistral,
    )
}


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template's model writes, None if it is none of these."""
    return next((known for known in FORMATS.values() if known.is_of(template)), None)
