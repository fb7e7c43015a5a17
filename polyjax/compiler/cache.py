"""Compiled programs on disk, found without tracing.

A key is a digest of everything the program's bits depend on: the request, the source text that
traces it, library versions, device, driver, flags. An entry holds the serialized executable behind
a checksum; one that is torn, foreign or of another format is a miss, never an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import Mesh

import models
import pallas_kernels
from polyjax.compiler.program import ProgramRequest, StepProgram, loaded_program
from polyjax.core.whole_file import write_whole

MAGIC = b"polyjax-program-1\n"
DEFAULT_CAPACITY_BYTES = 8 << 30

log = logging.getLogger("polyjax.compiler")


def default_cache_dir() -> Path:
    """$POLYJAX_COMPILE_CACHE, or polyjax/programs in the user's cache directory."""
    if named := os.environ.get("POLYJAX_COMPILE_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "polyjax" / "programs"


class ProgramCache:
    """The entries in one directory, the least recently used deleted beyond `capacity_bytes`.

    `misses` tells why lookups failed: "absent", "torn", "foreign" or "unloadable".
    """

    def __init__(self, directory: Path | str, capacity_bytes: int = DEFAULT_CAPACITY_BYTES):
        self.directory = Path(directory)
        self.capacity_bytes = capacity_bytes
        self.hits = 0
        self.misses: dict[str, int] = {}

    def path(self, request: ProgramRequest, mesh: Mesh) -> Path:
        return self.directory / f"{request.key.kind.value}-{cache_key(request, mesh)}.program"

    def load(self, request: ProgramRequest, mesh: Mesh) -> StepProgram | None:
        """Returns the program, or None if there is no sound entry."""
        path = self.path(request, mesh)
        payload = self._read(path)
        if payload is None:
            return None
        try:
            serialized, in_tree, out_tree, used = pickle.loads(payload)
            executable = serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, execution_devices=list(mesh.devices.flat)
            )
            program = loaded_program(request, mesh, executable, used)
        except Exception as error:  # whatever a damaged entry raises, compiling again heals it
            self._miss("unloadable", f"{path.name}: {error!r}")
            return None
        self.hits += 1
        os.utime(path)
        return program

    def store(self, request: ProgramRequest, mesh: Mesh, program: StepProgram) -> Path:
        """Writes an entry whole or not at all. Raises OSError where the disk refuses it."""
        serialized, in_tree, out_tree = serialize_executable.serialize(program.executable)
        payload = pickle.dumps((serialized, in_tree, out_tree, program.used))
        path = self.path(request, mesh)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, MAGIC + hashlib.sha256(payload).digest() + payload, mode=0o600)
        self._evict()
        return path

    def link(self, known: ProgramRequest, equal: ProgramRequest, mesh: Mesh) -> None:
        """Lets `equal` find the entry of `known`, which is the same program, if there is one."""
        with contextlib.suppress(OSError):  # then it is compiled when it is wanted
            os.link(self.path(known, mesh), self.path(equal, mesh))

    def _read(self, path: Path) -> bytes | None:
        try:
            with path.open("rb") as file:
                info = os.fstat(file.fileno())
                if hasattr(os, "getuid") and info.st_uid != os.getuid():
                    # Entries are unpickled: only what this user wrote is trusted.
                    self._miss("foreign", f"{path.name} belongs to user {info.st_uid}")
                    return None
                if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    self._miss("foreign", f"{path.name} can be written by others")
                    return None
                content = file.read()
        except OSError:
            self._miss("absent")
            return None
        head = len(MAGIC) + hashlib.sha256().digest_size
        payload = content[head:]
        if not content.startswith(MAGIC):
            self._miss("torn", f"{path.name} is no program of this format")
            return None
        if hashlib.sha256(payload).digest() != content[len(MAGIC) : head]:
            self._miss("torn", f"{path.name} does not match its checksum")
            return None
        return payload

    def _miss(self, reason: str, detail: str = "") -> None:
        self.misses[reason] = self.misses.get(reason, 0) + 1
        if detail:
            log.warning("compile cache: %s; it will be compiled again", detail)

    def _evict(self) -> None:
        entries = []
        for path in self.directory.glob("*.program"):
            try:
                entries.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another process evicted it
                continue
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.capacity_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def cache_key(request: ProgramRequest, mesh: Mesh) -> str:
    """Returns 40 hex digits naming a program on this machine; costs no tracing."""
    bucket = request.key.bucket
    text = json.dumps(
        [
            repr(request.spec),
            request.plan.digest,
            [request.key.kind.value, *dataclasses.astuple(bucket)],
            list(mesh.devices.shape),
            _environment(mesh),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@functools.cache
def _environment(mesh: Mesh) -> list[Any]:
    """Everything outside the request that a compiled program depends on."""
    device = mesh.devices.flat[0]
    paths = ("cache_dir", "log", "dump", "traceback", "profil", "explain", "cache")
    config = sorted(
        (name, repr(value))
        for name, value in jax.config.values.items()
        if not any(part in name for part in paths)
    )
    return [
        source_digest(),
        jax.__version__,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        [d.id for d in mesh.devices.flat],
        device.client.platform_version,
        _driver_version(),
        _cpu_features(),
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
        config,
    ]


@functools.cache
def source_digest() -> str:
    """Digest of the source text that traces programs: core, compiler, models, kernels."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    package = Path(__file__).resolve().parent.parent
    folders = [package / "core", package / "compiler"]
    folders += [Path(next(iter(p.__path__))) for p in (models, pallas_kernels)]
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def _driver_version() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


def _cpu_features() -> str:
    """XLA compiles for the features of the host it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(line for line in lines if line.startswith(wanted))
