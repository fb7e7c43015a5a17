"""Model families. Adding one is one file here and one line in FAMILIES."""

from __future__ import annotations

import importlib
from types import ModuleType

from polyjax.core.errors import ModelError

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "models.llama",
}
"""Hugging Face architecture name -> module with `Config` and `Model`."""


def family(architecture: str) -> ModuleType:
    """Returns the module of an architecture. Raises ModelError naming the supported ones."""
    if architecture not in FAMILIES:
        raise ModelError(
            "config.json",
            [f"architecture {architecture!r} is none of {', '.join(sorted(FAMILIES))}"],
        )
    return importlib.import_module(FAMILIES[architecture])
