"""The catalogue: every kernel polyjax ships, on one screen. Adding one is one file and one line."""

from __future__ import annotations

from polyjax.core.op import Kernel

CATALOGUE: dict[str, Kernel] = {}
"""Kernel name -> kernel."""
