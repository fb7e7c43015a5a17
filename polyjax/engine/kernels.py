"""How a kernel file reaches a running engine: judged elsewhere, compiled elsewhere, then installed.

The text arrives as data. It is executed in a trial process (`gates/file_trial.py`) and in the
compiler process, never in this one; what comes back are choices for a plan, then programs.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyjax.compiler.kernel_files import KERNEL_FOLDER
from polyjax.compiler.program import PAGE_KINDS, Kind
from polyjax.core.errors import ConfigError, PolyjaxError, RequestError
from polyjax.core.kernel_source import MAX_SOURCE_BYTES, KernelSource, digest_of, kernel_name
from polyjax.core.ops import OPS
from polyjax.core.plan import Plan
from polyjax.engine.build import ProgramSource
from polyjax.engine.events import Record
from polyjax.engine.install import Installer
from polyjax.engine.installation import Installation, InstallState
from polyjax.engine.programs import ProgramTable
from polyjax.engine.promotion import Origin, Way
from polyjax.gates.file_trial import DEFAULT_TIMEOUT_S, FileTrial, FileTrialProcess
from polyjax.gates.verdict import Verdict

MAX_TIMEOUT_S = 3600.0
REMEMBERED = 32
_FIELDS = ("path", "text", "op", "name", "timeout_s", "promotion")
_WITHOUT_OPS = (Kind.ADMIT, *PAGE_KINDS)

log = logging.getLogger("polyjax.engine")


class KernelState(enum.StrEnum):
    GATING = "gating"
    WAITING = "waiting"  # for another plan's installation to end
    INSTALLING = "installing"
    CURRENT = "current"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"


@dataclasses.dataclass
class KernelFile:
    """One kernel file on its way into the plan. `reason` says why it was refused."""

    name: str
    path: str
    source: KernelSource
    way: Way = Way.IMMEDIATE
    state: KernelState = KernelState.GATING
    op: str | None = None
    reason: str = ""
    verdicts: list[tuple[str, Verdict]] = dataclasses.field(default_factory=list)
    stage: str = ""
    workloads: tuple[str, ...] = ()
    installation: Installation | None = None
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.state in (KernelState.GATING, KernelState.WAITING, KernelState.INSTALLING)

    def to_json(self) -> dict[str, Any]:
        failed = next((v.to_json() | {"workload": w} for w, v in self.verdicts if not v.passed), 0)
        job, state, reason = self.installation, self.state, self.reason
        if job is not None and job.state is InstallState.ROLLED_BACK:
            state, reason = KernelState.ROLLED_BACK, job.reason
        return {
            "kernel": self.name,
            "path": self.path,
            "sha256": self.source.sha256,
            "op": self.op,
            "state": state.value,
            "stage": self.stage if state is KernelState.GATING else "",
            "reason": reason,
            "workloads": list(self.workloads),
            "verdicts": len(self.verdicts),
            "failed_verdict": failed or None,
            "plan": job.plan.digest if job is not None else None,
            "seconds": round(self.seconds, 3),
        }


class KernelIntake:
    """Takes one kernel file at a time. `advance` is called once a step."""

    def __init__(
        self, source: ProgramSource, table: ProgramTable, installer: Installer, record: Record
    ):
        self._source = source
        self._table = table
        self._installer = installer
        self._record = record
        self._trial: FileTrialProcess | None = None
        self._choices: tuple[tuple[str, Any], ...] = ()
        self.files: collections.deque[KernelFile] = collections.deque(maxlen=REMEMBERED)

    @property
    def current(self) -> KernelFile | None:
        return self.files[-1] if self.files else None

    @property
    def active(self) -> bool:
        return self.current is not None and self.current.active

    @property
    def wants_step(self) -> bool:
        """Whether a step would get on with it even without a request to serve."""
        return self._trial is not None or (self.active and not self._installer.active)

    def add(self, payload: Mapping[str, Any]) -> KernelFile:
        """Begins with a kernel file.

        `payload` has "path", "text" (the file's) and perhaps "op", "name", "timeout_s" of the trial
        and the "promotion" of its plan. Raises RequestError: 400 for a malformed payload, 409 while
        another file is on its way or where the plan in force uses this one already.
        """
        name, text, timeout_s, way = _checked(payload)
        if self.active:
            raise RequestError("another kernel file is on its way", status=409)
        digest = digest_of(text)
        source = KernelSource(str(self._folder / f"{digest}.py"), digest)
        try:
            full_name = kernel_name(digest, name)
        except ConfigError as error:
            raise RequestError(str(error), "name") from error
        plan = self._table.current.plan
        if any(choice.kernel == full_name for _, choice in plan.choices):
            raise RequestError(f"the plan in force uses {full_name} already", "path", 409)
        keys = [k for k in self._table.current.programs if k.kind not in _WITHOUT_OPS]
        requests = tuple(self._source.request(plan, key) for key in keys)
        trial = FileTrial(full_name, text, source, payload.get("op"), requests, time.time_ns())
        try:
            self._trial = FileTrialProcess(trial, timeout_s)
        except OSError as error:
            raise RequestError(f"no trial process could be started: {error}", status=409) from error
        file = KernelFile(full_name, str(payload["path"]), source, way)
        self.files.append(file)
        self._record("kernel_received", kernel=full_name, path=file.path, sha256=digest)
        return file

    @property
    def _folder(self) -> Path:
        return self._source.cache.directory / KERNEL_FOLDER

    def advance(self, wait_s: float) -> None:
        """Does the next piece of work; `wait_s` is how long an idle engine may wait for a trial."""
        file = self.current
        if file is None or not file.active:
            return
        try:
            if file.state is KernelState.GATING:
                self._judge(file, wait_s)
            elif file.state is KernelState.WAITING:
                self._install(file)
            else:
                self._watch(file)
        except Exception as error:  # whatever a file brings about, it is the file that fails
            log.exception("kernel file %s", file.path)
            self._refuse(file, f"{type(error).__name__}: {error}")
        file.seconds = time.monotonic() - file.started_s

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None
        if self.current is not None and self.current.active:
            self._refuse(self.current, "cancelled")

    def _judge(self, file: KernelFile, wait_s: float) -> None:
        assert self._trial is not None
        end = self._trial.poll()
        file.op, file.verdicts = self._trial.op, self._trial.verdicts
        file.stage = self._trial.stage
        if end is None:
            time.sleep(wait_s)
            return
        self._trial = None
        if end.refused is not None:
            self._refuse(file, f"{end.refused.gate}: {end.refused.reason}")
            return
        file.workloads = tuple(key for key, _ in end.choices)
        self._choices = end.choices
        file.state = KernelState.WAITING
        self._record("kernel_passed", kernel=file.name, op=file.op, workloads=len(file.workloads))

    def _install(self, file: KernelFile) -> None:
        """Through the door every plan takes, once it is free."""
        if self._installer.active:
            return
        current = self._table.current
        plan = with_kernel(current.plan, file.name, file.source, self._choices)
        origin = Origin(file.way, lineage=f"kernel file {file.name}")
        try:
            file.installation = self._installer.start(
                plan, current.plan.mesh, current.ladder, origin
            )
        except PolyjaxError as error:
            self._refuse(file, str(error))
            return
        file.state = KernelState.INSTALLING
        self._record("kernel_installing", kernel=file.name, plan=plan.digest)

    def _watch(self, file: KernelFile) -> None:
        job = file.installation
        assert job is not None
        if job.state is InstallState.REFUSED:
            self._refuse(file, job.reason)
        elif not job.active:  # if it is rolled back later, the installation tells
            file.state = KernelState.CURRENT
            self._record("kernel_current", kernel=file.name, plan=job.plan.digest)

    def _refuse(self, file: KernelFile, reason: str) -> None:
        file.state, file.reason = KernelState.REFUSED, reason
        log.warning("kernel file %s was refused: %s", file.path, reason)
        self._record("kernel_refused", kernel=file.name, path=file.path, reason=reason)


def with_kernel(
    plan: Plan, name: str, source: KernelSource, choices: tuple[tuple[str, Any], ...]
) -> Plan:
    """The plan with a file kernel for some workloads; sources that nothing uses any more go."""
    merged = dict(plan.choices) | dict(choices)
    used = {choice.kernel for choice in merged.values()}
    sources = {n: s for n, s in (*plan.sources, (name, source)) if n in used}
    return dataclasses.replace(
        plan, choices=tuple(sorted(merged.items())), sources=tuple(sorted(sources.items()))
    )


def _checked(payload: Mapping[str, Any]) -> tuple[str, str, float, Way]:
    """Name, text, time limit and way. Raises RequestError naming the field that is wrong."""
    if unknown := set(payload) - set(_FIELDS):
        raise RequestError(f"unknown fields {sorted(unknown)}; known: {', '.join(_FIELDS)}")
    for field in ("path", "text", "op", "name"):
        required = field in ("path", "text")
        if (required or field in payload) and not isinstance(payload.get(field), str):
            raise RequestError(f"{field} must be a string", field)
    if len(payload["text"].encode()) > MAX_SOURCE_BYTES:
        raise RequestError(f"a kernel file has at most {MAX_SOURCE_BYTES} bytes", "path")
    if (op := payload.get("op")) is not None and op not in OPS:
        raise RequestError(f"no op {op!r}; known: {', '.join(sorted(OPS))}", "op")
    timeout_s = payload.get("timeout_s", DEFAULT_TIMEOUT_S)
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(f"timeout_s must be in (0, {MAX_TIMEOUT_S:g}]", "timeout_s")
    way = payload.get("promotion", Way.IMMEDIATE.value)
    if way not in tuple(Way):
        raise RequestError(f"promotion must be one of {', '.join(Way)}", "promotion")
    name = payload.get("name") or Path(payload["path"]).stem
    return name, payload["text"], float(timeout_s), Way(way)
