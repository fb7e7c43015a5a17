"""Counts traces and compiles in this process: after warm-up there must be none."""

from __future__ import annotations

import jax

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Traces and compiles since `start`, whoever in this process caused them."""

    def __init__(self) -> None:
        self._traces = _COUNTS.get(TRACE_EVENT, 0)
        self._compiles = _COUNTS.get(COMPILE_EVENT, 0)

    @property
    def traces(self) -> int:
        return _COUNTS.get(TRACE_EVENT, 0) - self._traces

    @property
    def compiles(self) -> int:
        return _COUNTS.get(COMPILE_EVENT, 0) - self._compiles


_COUNTS: dict[str, int] = {}


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event in (TRACE_EVENT, COMPILE_EVENT):
        _COUNTS[event] = _COUNTS.get(event, 0) + 1


jax.monitoring.register_event_duration_secs_listener(_count)
