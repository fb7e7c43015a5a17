"""A sleeping engine: its devices' memory is free, its requests keep their tokens and wait.

    AWAKE -> FALLING_ASLEEP -> ASLEEP -> WAKING -> AWAKE

At level 1 the weights wait in host memory, at level 2 they are read again from where they came. KV
pools are gone at either level: what ran is computed again after waking, from its tokens. What takes
time runs in a thread, so that the engine process goes on telling that it is alive.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.engine.background import BackgroundTask
from polyjax.engine.checkpoint import DeviceParams, HostParams
from polyjax.engine.memory import available_host_bytes
from polyjax.engine.weights import Running, WeightsLoader, choice
from polyjax.io.files import Progress

if TYPE_CHECKING:
    from polyjax.engine.engine import Engine

WEIGHTS_ON_HOST, WEIGHTS_DROPPED = 1, 2
DROPPED = "the engine was put to sleep, and the operator chose to end what was running"

log = logging.getLogger("polyjax.engine")


class SleepState(enum.StrEnum):
    AWAKE = "awake"
    FALLING_ASLEEP = "falling asleep"
    ASLEEP = "asleep"
    WAKING = "waking"


class Sleeper:
    """Puts an engine to sleep and wakes it. `error` says why it could not be woken last time."""

    def __init__(self, weights: WeightsLoader):
        self.state = SleepState.AWAKE
        self.level = 0
        self.error = ""
        self._weights = weights
        self._on_host: HostParams | None = None
        self._falling: BackgroundTask[HostParams] | None = None
        self._waking: BackgroundTask[tuple[DeviceParams, str]] | None = None

    @property
    def is_awake(self) -> bool:
        return self.state is SleepState.AWAKE

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted to take note of what the thread has done."""
        task = self._falling or self._waking
        return task is not None and task.is_finished

    def to_json(self) -> dict[str, Any]:
        task = self._falling or self._waking
        return {
            "is_sleeping": not self.is_awake,
            "state": self.state.value,
            "level": self.level,
            "doing": task.what if task else "",
            "done": task.done if task else 0,
            "total": task.total if task else 0,
            "error": self.error,
        }

    def sleep(self, engine: Engine, level: int, running: Running) -> None:
        """Frees pools at once and weights as soon as they are elsewhere; repeating it is harmless.

        An engine asleep can go deeper, not less deep. Raises RequestError (409) while it wakes,
        while a plan or other weights are on their way in, or where the host has no room.
        """
        if not self.is_awake:
            self._deepen(level)
            return
        if engine.installer.active or engine.programs.pending:
            raise RequestError("a plan is being installed: wait for it, or roll back", status=409)
        if self._weights.active:
            raise RequestError("other weights are being loaded: wait for them", status=409)
        if level == WEIGHTS_ON_HOST:
            _check_host_room(engine.state.params)
        self.error = ""
        engine.pause()
        if running is Running.DROP:
            engine.drop_started(DROPPED)
        engine.release_pools()
        self.state, self.level = SleepState.FALLING_ASLEEP, level
        if level == WEIGHTS_ON_HOST:
            params = engine.state.params
            self._falling = BackgroundTask("sleep", lambda progress: _to_host(params, progress))
        else:
            self._fall_asleep(engine, None)

    def wake(self) -> None:
        """Begins to bring the weights back. Raises RequestError (409) while it falls asleep."""
        if self.state is SleepState.FALLING_ASLEEP:
            raise RequestError("the engine is falling asleep: wait for it", status=409)
        if self.state is not SleepState.ASLEEP:
            return
        on_host, reader = self._on_host, self._weights.reader
        current, in_force = self._weights.current, self._weights.files

        def bring_back(progress: Progress) -> tuple[DeviceParams, str]:
            if on_host is not None:
                return reader.place(on_host, progress), current.digest
            files = in_force and reader.open(str(in_force.path), progress)
            return reader.read_to_devices(files, progress)

        self.error = ""
        self.state = SleepState.WAKING
        self._waking = BackgroundTask("wake", bring_back)

    def advance(self, engine: Engine) -> None:
        """Takes note of what the thread has done."""
        if self._falling is not None and self._falling.is_finished:
            falling, self._falling = self._falling, None
            try:
                self._fall_asleep(engine, falling.take_result())
            except Exception as error:
                log.exception("the weights could not be brought to the host")
                self._wake_up(engine, engine.state.params)
                self.error = f"{type(error).__name__}: {error}"
        if self._waking is not None and self._waking.is_finished:
            waking, self._waking = self._waking, None
            self._finish_waking(waking, engine)

    def close(self) -> None:
        for task in (self._falling, self._waking):
            if task is not None:
                task.cancel()

    # -- inside ------------------------------------------------------------------------------

    def _deepen(self, level: int) -> None:
        if self.state is SleepState.WAKING:
            raise RequestError("the engine is waking: wait for it", status=409)
        if self.state is SleepState.FALLING_ASLEEP and level > self.level:
            raise RequestError("the engine is falling asleep: wait for it", status=409)
        if level > self.level:
            self._on_host, self.level = None, level

    def _fall_asleep(self, engine: Engine, on_host: HostParams | None) -> None:
        engine.state.replace_params(())
        self._on_host = on_host
        self.state = SleepState.ASLEEP
        engine.events.add("asleep", level=self.level)

    def _finish_waking(
        self, task: BackgroundTask[tuple[DeviceParams, str]], engine: Engine
    ) -> None:
        try:
            params, digest = task.take_result()
            self._wake_up(engine, params)
        except Exception as error:
            engine.state.replace_params(())
            engine.release_pools()
            self.state = SleepState.ASLEEP
            known = isinstance(error, PolyjaxError)
            self.error = str(error) if known else f"{type(error).__name__}: {error}"
            engine.events.add("sleeps_on", error=self.error)
            return
        current = self._weights.current
        if digest != current.digest:
            self._weights.put_in_force(self._weights.files, digest, engine)
            engine.events.add("weights_current", path=current.path, digest=digest, changed=True)

    def _wake_up(self, engine: Engine, params: DeviceParams) -> None:
        engine.state.replace_params(params)
        engine.state.rebuild()
        self._on_host = None
        self.state, self.level = SleepState.AWAKE, 0
        engine.events.add("awake")


def read_sleep_request(payload: Mapping[str, Any]) -> tuple[int, Running]:
    """What was asked for. Raises RequestError naming the field that is wrong."""
    if unknown := sorted(set(payload) - {"level", "running"}):
        raise RequestError(f"unknown field {unknown[0]!r}: level, running", unknown[0])
    level = payload.get("level", WEIGHTS_ON_HOST)
    if level not in (WEIGHTS_ON_HOST, WEIGHTS_DROPPED) or isinstance(level, bool):
        raise RequestError(
            "level must be 1 (weights wait on the host) or 2 (they are read again)", "level"
        )
    return level, choice(payload, "running", Running, Running.KEEP)


def _to_host(params: DeviceParams, progress: Progress) -> HostParams:
    on_host: list[np.ndarray] = []
    for param in params:
        progress("moving weights to the host", len(on_host), len(params))
        on_host.append(np.array(param))  # a copy: on a CPU a view would keep the array alive
    return tuple(on_host)


def _check_host_room(params: tuple[jax.Array, ...]) -> None:
    needed, free = sum(param.nbytes for param in params), available_host_bytes()
    if needed > free:
        raise RequestError(
            f"the weights take {needed / 2**30:.2f} GiB and the host has {free / 2**30:.2f} GiB "
            "free: sleep at level 2, which reads them again",
            "level",
            409,
        )
