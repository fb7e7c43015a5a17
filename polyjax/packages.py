"""Whether the generic top-level names of this project are this project's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from polyjax.core.errors import ConfigError

GENERIC_NAMES = ("models", "search", "pallas_kernels")
_ROOT = Path(__file__).resolve().parent.parent


def refuse_foreign_packages() -> None:
    """Raises ConfigError if a generic name is somebody else's package, telling where that is."""
    for name in GENERIC_NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        places = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if spec.origin is not None:
            places.append(Path(spec.origin).resolve())
        if not any(place.is_relative_to(_ROOT / name) for place in places):
            found = ", ".join(map(str, places)) or "nowhere that can be named"
            raise ConfigError(
                f"`import {name}` would load {found} instead of polyjax's own {_ROOT / name}; "
                "run from another directory, use `python -P`, or uninstall the other package"
            )
