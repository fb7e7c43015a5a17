"""Kimi-K2, and the text model of Kimi-K2.5: DeepSeek-V3's decoder under other names.

The reader of model directories lifts a nested text_config and drops the vision tower's tensors.
"""

from __future__ import annotations

import dataclasses

from models import deepseek_v3

Model = deepseek_v3.Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.Config):
    """A Kimi-K2 decoder: one routing group, 384 experts."""
