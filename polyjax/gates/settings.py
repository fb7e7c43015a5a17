"""Global settings that change what a program computes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_debug_nans", "jax_disable_jit")
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Global settings that change what is computed."""

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def now(cls) -> Settings:
        config = [(name, jax.config.values[name]) for name in SETTINGS]
        variables = [(name, os.environ.get(name)) for name in VARIABLES]
        return cls((*config, *variables, ("numpy errors", tuple(sorted(np.geterr().items())))))
