"""What a measurement depends on besides the candidate: the ledger's environment."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib


def facts(device: Any) -> dict[str, str]:
    """Returns the facts of a jax device and this process, as short strings."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "client": " ".join(str(device.client.platform_version).split())[:120],
        "driver": _first_line("/proc/driver/nvidia/version"),
        "cpu": _cpu_model() if device.platform == "cpu" else "",
        "cpu_count": str(os.cpu_count()) if device.platform == "cpu" else "",
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cpu_model() -> str:
    """Model and instruction sets: XLA compiles for the features of the host it runs on."""
    found = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            found[name.strip()] = value.strip()
    except OSError:
        return platform.processor()
    sets = [f for f in found.get("flags", "").split() if f.startswith(("avx", "amx", "fma"))]
    return f"{found.get('model name', platform.machine())} {' '.join(sets)}"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
