"""Kernels by name: those of the catalogue, and others as "module:NAME"."""

from __future__ import annotations

import importlib

from pallas_kernels import CATALOGUE
from polyjax.core.errors import ConfigError
from polyjax.core.op import Kernel, Workload


def kernel_named(name: str) -> Kernel:
    """Returns the kernel. Raises ConfigError for a name that leads nowhere."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    module, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise KeyError(name)
        kernel: Kernel = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, KeyError) as error:
        raise ConfigError(f"no kernel {name!r}: {error!r}") from error
    return kernel


def kernels_for(workload: Workload, platform: str) -> list[Kernel]:
    """Returns the catalogue's kernels of a platform that support a workload."""
    return [
        kernel
        for name, kernel in CATALOGUE.items()
        if name.split(".")[1] == workload.op
        and kernel.platform == platform
        and kernel.supports(workload) is None
    ]
