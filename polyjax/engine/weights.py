"""Other weights for a running engine: checked and read in a thread, swapped between two steps.

    CHECKING -> LOADING -> PENDING -> CURRENT
        (from each of the first three) -> REFUSED, and nothing has changed

Both copies exist until the swap. Staged on the devices, the new one is put beside the old one while
steps go on, and the swap replaces a reference. Staged on the host, it waits there; the swap gives
up the KV pools for the time both copies lie on the devices, and steps wait for the transfer. Either
way no cached key or value survives: requests that keep running are computed again.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyjax.core.errors import ModelError, PolyjaxError, RequestError
from polyjax.engine.background import BackgroundTask
from polyjax.engine.checkpoint import CheckpointReader, DeviceParams, HostParams, Weights
from polyjax.engine.memory import Room
from polyjax.io.files import ModelFiles, Progress, no_progress

if TYPE_CHECKING:
    from polyjax.engine.engine import Engine

REMEMBERED_LOADS, REMEMBERED_WEIGHTS = 8, 1024
DROPPED = "other weights were loaded, and the operator chose to end what was running"

log = logging.getLogger("polyjax.engine")


class LoadState(enum.StrEnum):
    CHECKING = "checking"
    LOADING = "loading"
    PENDING = "pending"  # swaps before the next step
    CURRENT = "current"
    REFUSED = "refused"


class Running(enum.StrEnum):
    """What becomes of requests that have begun under the old weights."""

    KEEP = "keep"  # they go on: what they have is computed again under the new ones
    DROP = "drop"  # they end with an error


class Staging(enum.StrEnum):
    """Where the new weights wait for the swap; the module says what that costs."""

    AUTO = "auto"
    DEVICE = "device"
    HOST = "host"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Weights that are read, and wait in one place or the other."""

    files: ModelFiles
    digest: str
    on_devices: DeviceParams | None = None
    on_host: HostParams | None = None


@dataclasses.dataclass
class WeightsLoad:
    """One set of weights on its way in. `problems` say why it was refused."""

    number: int
    path: str
    running: Running
    staging: Staging
    state: LoadState = LoadState.CHECKING
    changed: bool = False  # whether the values are others than before
    digest: str = ""
    problems: tuple[str, ...] = ()
    task: BackgroundTask[Prepared] | None = None
    prepared: Prepared | None = None
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.state in (LoadState.CHECKING, LoadState.LOADING, LoadState.PENDING)

    def to_json(self) -> dict[str, Any]:
        task = self.task
        return {
            "number": self.number,
            "path": self.path,
            "state": self.state.value,
            "running": self.running.value,
            "staging": self.staging.value,
            "changed": self.changed,
            "digest": self.digest,
            "doing": task.what if task else "",
            "done": task.done if task else 0,
            "total": task.total if task else 0,
            "problems": list(self.problems),
            "seconds": round(self.seconds, 3),
        }


class WeightsLoader:
    """Takes one set of weights at a time from its path into the state; remembers those in force.

    `history` lists what was in force, the newest last: an answer's epoch finds the weights that
    computed it. `files` are those in force, None for random numbers.
    """

    def __init__(self, reader: CheckpointReader, first: Weights):
        self.reader = reader
        self.history = collections.deque([first], maxlen=REMEMBERED_WEIGHTS)
        self.files: ModelFiles | None = reader.first_files
        self.loads: list[WeightsLoad] = []
        self._numbers = itertools.count(1)

    def to_json(self) -> dict[str, Any]:
        return {
            "current": self.current.to_json(),
            "history": [weights.to_json() for weights in self.history],
            "loads": [load.to_json() for load in self.loads],
        }

    @property
    def current(self) -> Weights:
        return self.history[-1]

    @property
    def active(self) -> bool:
        return bool(self.loads) and self.loads[-1].active

    @property
    def has_work(self) -> bool:
        """Whether a step is wanted to take note of what the thread has done."""
        load = self.loads[-1] if self.loads else None
        if load is None or not load.active:
            return False
        return load.state is LoadState.PENDING or load.task is None or load.task.is_finished

    def start(self, path: str, running: Running, staging: Staging, room: Room) -> WeightsLoad:
        """Begins to load what `path` names, or returns the same load if it is on its way already.

        Raises RequestError (409) while other weights are on their way, or where memory is short.
        """
        if self.active:
            load = self.loads[-1]
            if (load.path, load.running) == (path, running):
                return load
            raise RequestError(f"weights are being loaded from {load.path}", status=409)
        load = WeightsLoad(next(self._numbers), path, running, choose_staging(staging, room))
        load.task = BackgroundTask("load-weights", lambda progress: self._prepare(load, progress))
        self.loads = [*self.loads[1 - REMEMBERED_LOADS :], load]
        return load

    def advance(self, engine: Engine) -> None:
        """Takes note of what the thread has done; swaps once nothing else is being installed."""
        load = self.loads[-1] if self.loads else None
        if load is None or not load.active:
            return
        load.seconds = time.monotonic() - load.started_s
        try:
            if load.task is not None and load.task.is_finished:
                load.prepared = load.task.take_result()
                load.task = None
                load.state = LoadState.PENDING
            if load.state is LoadState.PENDING and not engine.installer.active:
                self._swap(load, engine)
        except ModelError as error:
            self._refuse(load, engine, *error.problems)
        except PolyjaxError as error:
            self._refuse(load, engine, str(error))
        except Exception as error:
            log.exception("weights could not be loaded from %s", load.path)
            if (
                load.digest == self.current.digest
            ):  # only the pools have no room; a step tries again
                load.state = LoadState.CURRENT
            else:
                self._refuse(load, engine, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self.active and (task := self.loads[-1].task) is not None:
            task.cancel()

    # -- inside ------------------------------------------------------------------------------

    def _prepare(self, load: WeightsLoad, progress: Progress) -> Prepared:
        files = self.reader.open(load.path, progress)
        load.state = LoadState.LOADING
        if load.staging is Staging.HOST:
            params, digest = self.reader.read(files, progress)
            return Prepared(files, digest, on_host=params)
        placed, digest = self.reader.read_to_devices(files, progress)
        return Prepared(files, digest, on_devices=placed)

    def _swap(self, load: WeightsLoad, engine: Engine) -> None:
        prepared, load.prepared = load.prepared, None
        assert prepared is not None
        load.digest = prepared.digest
        load.changed = prepared.digest != self.current.digest
        if load.changed:
            self._replace(prepared, engine)
            if load.running is Running.DROP:
                engine.drop_started(DROPPED)
        load.state = LoadState.CURRENT
        engine.events.add(
            "weights_current",
            path=load.path,
            digest=load.digest,
            changed=load.changed,
            running=load.running.value,
        )

    def _replace(self, prepared: Prepared, engine: Engine) -> None:
        """Raises, with everything as it was, where the devices have no room after all."""
        engine.pause()
        if prepared.on_devices is not None:
            engine.state.replace_params(prepared.on_devices)
            self.put_in_force(prepared.files, prepared.digest, engine)
            return
        assert prepared.on_host is not None
        engine.release_pools()  # there is room for them or for the second copy
        try:
            params = self.reader.place(prepared.on_host, no_progress)
        except Exception:
            engine.state.rebuild()
            raise
        engine.state.replace_params(params)
        self.put_in_force(prepared.files, prepared.digest, engine)
        engine.state.rebuild()

    def put_in_force(self, files: ModelFiles | None, digest: str, engine: Engine) -> None:
        """Notes that the engine serves with other weights now, under an epoch of their own."""
        engine.programs.epoch += 1
        self.files = files
        self.history.append(Weights.of(files, digest, engine.programs.epoch))

    def _refuse(self, load: WeightsLoad, engine: Engine, *problems: str) -> None:
        load.state, load.problems = LoadState.REFUSED, problems
        load.task = load.prepared = None
        engine.events.add("weights_refused", path=load.path, problems=list(problems))


def choose_staging(wanted: Staging, room: Room) -> Staging:
    """Where new weights can wait: on the devices if they fit beside all that is there, else on
    the host if they fit there and, for the swap, into the place of the KV pools.

    Raises RequestError (409) with the figures where neither `wanted` nor anything else has room.
    """
    fits_devices = room.weight_bytes <= room.free_device_bytes
    fits_host = room.host_weight_bytes <= room.free_host_bytes and (
        room.weight_bytes <= room.free_device_bytes + room.pool_bytes
    )
    if fits_devices and wanted in (Staging.AUTO, Staging.DEVICE):
        return Staging.DEVICE
    if fits_host and wanted in (Staging.AUTO, Staging.HOST):
        return Staging.HOST
    raise RequestError(
        f"the weights take {_gib(room.weight_bytes)} on each device, where "
        f"{_gib(room.free_device_bytes)} are free beside {_gib(room.pool_bytes)} of KV cache, and "
        f"{_gib(room.host_weight_bytes)} on the host, where {_gib(room.free_host_bytes)} are free: "
        f"a second copy does not fit (staging {wanted.value!r})",
        "staging",
        409,
    )


def read_load_request(payload: Mapping[str, Any]) -> tuple[str, Running, Staging]:
    """What a load was asked for. Raises RequestError naming the field that is wrong."""
    if unknown := sorted(set(payload) - {"path", "running", "staging"}):
        raise RequestError(f"unknown field {unknown[0]!r}: path, running, staging", unknown[0])
    path = payload.get("path")
    if not isinstance(path, str) or not path:
        raise RequestError("path must name a model directory, a GGUF file or a hub id", "path")
    return (
        path,
        choice(payload, "running", Running, Running.KEEP),
        choice(payload, "staging", Staging, Staging.AUTO),
    )


def choice[C: enum.StrEnum](payload: Mapping[str, Any], field: str, kind: type[C], default: C) -> C:
    """A field that takes one of a few words. Raises RequestError naming them."""
    try:
        return kind(payload.get(field, default))
    except ValueError:
        known = ", ".join(kind)
        raise RequestError(f"{field} must be one of {known}", field) from None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
