"""polyjax serves open-weight language models with JAX and makes itself faster while it serves.

    from polyjax import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text)

Names are imported when they are first used: `import polyjax` alone does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyjax.core.buckets import Bucket, BucketLadder
    from polyjax.core.errors import (
        ConfigError,
        EngineDead,
        ModelError,
        PolyjaxError,
        RequestError,
        ScheduleError,
        StateABIError,
    )
    from polyjax.core.mesh import MeshPlan
    from polyjax.core.plan import Plan
    from polyjax.engine.engine import Engine
    from polyjax.engine.types import (
        EngineConfig,
        EngineInfo,
        EngineStats,
        FinishReason,
        Grammar,
        Request,
        RequestOutput,
        SamplingParams,
        TokenLogprobs,
    )
    from polyjax.llm import LLM, Generation

_HOMES = {
    "polyjax.core.buckets": ("Bucket", "BucketLadder"),
    "polyjax.core.errors": (
        "ConfigError",
        "EngineDead",
        "ModelError",
        "PolyjaxError",
        "RequestError",
        "ScheduleError",
        "StateABIError",
    ),
    "polyjax.core.mesh": ("MeshPlan",),
    "polyjax.core.plan": ("Plan",),
    "polyjax.engine.engine": ("Engine",),
    "polyjax.engine.types": (
        "EngineConfig",
        "EngineInfo",
        "EngineStats",
        "FinishReason",
        "Grammar",
        "Request",
        "RequestOutput",
        "SamplingParams",
        "TokenLogprobs",
    ),
    "polyjax.llm": ("LLM", "Generation"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "Bucket",
    "BucketLadder",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineInfo",
    "EngineStats",
    "FinishReason",
    "Generation",
    "Grammar",
    "MeshPlan",
    "ModelError",
    "Plan",
    "PolyjaxError",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScheduleError",
    "StateABIError",
    "TokenLogprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'polyjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
