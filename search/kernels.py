"""Kernels by name: those of the catalogue, others as "module:NAME", and those from files."""

from __future__ import annotations

import importlib
from typing import cast

from pallas_kernels import CATALOGUE
from polyjax.compiler.cache import default_cache_dir
from polyjax.compiler.kernel_files import KERNEL_FOLDER, kept_kernel
from polyjax.core.errors import ConfigError
from polyjax.core.kernel_source import PREFIX
from polyjax.core.op import Kernel, Workload


def kernel_named(name: str) -> Kernel:
    """Returns the kernel. Raises ConfigError for a name that leads nowhere."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name.startswith(PREFIX):
        return cast(Kernel, kept_kernel(name, default_cache_dir() / KERNEL_FOLDER))
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
