"""What a measurement depends on besides the candidate: the ledger's environment. No jax."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DRIVER = "/proc/driver/nvidia/version"


def facts(device: Any) -> dict[str, str]:
    """Returns the facts of a jax device and this process, as short strings."""
    return {
        **_versions(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "client": " ".join(str(device.client.platform_version).split())[:120],
        "driver": _first_line(DRIVER),
        "cpu": _cpu_model() if device.platform == "cpu" else "",
        "cpu_count": str(os.cpu_count()) if device.platform == "cpu" else "",
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def why_not_here(there: Mapping[str, str]) -> str:
    """Returns which facts of a measurement do not hold on this machine; "" if they may all.

    Only those that can be known without a device are compared.
    """
    here = {**_versions(), "driver": _first_line(DRIVER)}
    if there.get("platform") == "cpu":
        here |= {"cpu": _cpu_model()}
    differing = [
        f"{name} {there.get(name) or 'none'} there, {value or 'none'} here"
        for name, value in here.items()
        if there.get(name, "") != value
    ]
    return "; ".join(differing)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


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
