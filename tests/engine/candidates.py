"""Candidate plans for an engine whose programs are those in force, wrapped: nothing is compiled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from polyjax.compiler.program import Kind, StepProgram
from polyjax.compiler.worker import Compiled
from polyjax.core.plan import Plan
from polyjax.engine.engine import Engine
from polyjax.engine.types import Request
from tests.engine.serving import Stream, greedy, prompt, step_without_compiling

Wrap = Callable[[StepProgram], StepProgram]
_numbers = itertools.count()
SCRATCH_PAGES = 36  # of an engine for 4 sequences


@dataclasses.dataclass
class Switch:
    """Programs wrapped by `breaks` behave until it is on. `calls` counts what they did since."""

    on: bool = False
    calls: int = 0


def key_sequences(program: StepProgram) -> int:
    return program.key.bucket.sequences


def breaks(
    switch: Switch, change: Callable[..., Any], kind: Kind = Kind.DECODE_GREEDY, sequences: int = 0
) -> Wrap:
    """Programs of `kind`, of one bucket size if given, that `change(run, *args)` takes over."""

    def wrap(program: StepProgram) -> StepProgram:
        if program.key.kind is not kind or (sequences and key_sequences(program) != sequences):
            return program

        def run(*args: Any) -> Any:
            if not switch.on:
                return program.executable(*args)
            switch.calls += 1
            return change(program.executable, *args)

        return dataclasses.replace(program, executable=run)

    return wrap


def on_device(array: np.ndarray, like: jax.Array) -> jax.Array:
    """Without compiling anything."""
    return jax.device_put(array.astype(like.dtype), like.sharding)


def scaled_hidden(run: Any, *args: Any) -> Any:
    *rest, hidden, following = run(*args)
    return *rest, on_device(np.asarray(hidden) * 1.01, hidden), following


def nan_hidden(run: Any, *args: Any) -> Any:
    *rest, hidden, following = run(*args)
    return *rest, on_device(np.asarray(hidden) * np.nan, hidden), following


def nan_prefill(run: Any, *args: Any) -> Any:
    kv, hidden, all_hidden = run(*args)
    return kv, on_device(np.asarray(hidden) * np.nan, hidden), all_hidden


def raising(run: Any, *args: Any) -> Any:
    run(*args)  # what was donated is gone
    raise RuntimeError("injected")


def shifted_kv(run: Any, params: Any, kv: Any, last_tokens: Any, flat: Any) -> Any:
    """The same results, and pages with something else in them."""
    kv, *rest = run(params, kv, last_tokens, flat)
    pool = np.array(kv[0])
    pool[-SCRATCH_PAGES:] += 1.0
    return (on_device(pool, kv[0]), *kv[1:]), *rest


class FirstRuns:
    """In place of the first-run process: answers at once, with `error` for programs of `kind`."""

    def __init__(self, error: str | None = None, kind: Kind = Kind.DECODE_GREEDY):
        self.error, self.kind = error, kind
        self.waiting: list[Any] = []
        self.seen = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: Any) -> None:
        self.waiting.append(request)

    def poll(self, wait_s: float) -> list[Compiled]:
        requests, self.waiting = self.waiting, []
        self.seen += len(requests)
        failing = {r: self.error if r.key.kind is self.kind else None for r in requests}
        return [Compiled(r, "", failing[r], 0.0) for r in requests]

    def cancel(self) -> None:
        self.waiting.clear()

    close = cancel


def offer(
    engine: Engine,
    patch: pytest.MonkeyPatch,
    wrap: Wrap = lambda program: program,
    rung: StepProgram | None = None,
) -> Plan:
    """A plan whose programs are those in force, wrapped, and lie in the cache.

    `rung` is one more, whose decode bucket the ladder has besides.
    """
    current = engine.programs.current
    base, ladder = dict(current.programs), current.ladder
    if rung is not None:
        base[rung.key] = rung
        decode = tuple(sorted((*ladder.decode, rung.key.bucket)))
        ladder = dataclasses.replace(ladder, decode=decode)
    options = (*current.plan.compiler_options, ("candidate", str(next(_numbers))))
    plan = dataclasses.replace(current.plan, compiler_options=options, ladder=ladder)
    cached, is_cached = engine.source.cached, engine.source.is_cached

    def load(request: Any) -> Any:
        if request.plan.digest != plan.digest:
            return cached(request)
        return wrap(dataclasses.replace(base[request.key], plan_digest=plan.digest))

    def knows(request: Any) -> bool:
        return request.plan.digest == plan.digest or is_cached(request)

    patch.setattr(engine.source, "cached", load)
    patch.setattr(engine.source, "is_cached", knows)
    return plan


def settle(engine: Engine) -> None:
    """Leaves an engine without work, whatever a test that failed left of it."""
    engine.installer.cancel()
    engine.probation._supersede("another test begins")
    for name in list(engine.scheduler._roster.by_id):
        engine.abort(name)
    while engine.has_work:
        engine.step()


def serve(
    engine: Engine, until: Callable[[], bool], each_step: Callable[[], None] = lambda: None
) -> list[tuple[Request, Stream]]:
    """Keeps four greedy streams running until `until`, then lets them end; returns all of them."""
    streams: dict[str, tuple[Request, Stream]] = {}
    for step in itertools.count():
        assert step < 20_000, engine.admin("plan", {})["installation"]
        over = until()
        while not over and engine.scheduler.num_running + engine.scheduler.num_waiting < 4:
            number = next(_numbers)
            request = Request(f"s{number}", prompt(5 + number % 7, number), greedy(30))
            engine.add(request)
            streams[request.id] = (request, Stream())
        if over and not engine.scheduler.has_work:
            break
        each_step()
        for output in step_without_compiling(engine):
            streams[output.request_id][1].take(output)
    for _, stream in streams.values():
        assert len(stream.tokens) == 30  # none lost, none repeated
    return list(streams.values())
