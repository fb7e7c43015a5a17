"""The last good plan on disk: a server that restarts comes back on it.

Good is a plan that survived its watch. One that was in force but did not get so far is never
written, so a candidate that takes the engine down is gone with it.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path
from typing import Any

from polyjax.compiler.worker import CompilerProcess
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.core.whole_file import write_whole
from polyjax.engine import build
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.programs import PlanPrograms
from polyjax.engine.types import EngineConfig
from polyjax.io.files import Progress

FILE_NAME = "last_good_plan.json"

log = logging.getLogger("polyjax.engine")


class LastGoodPlan:
    """The file in `--state_dir`, for one model on one kind of device.

    Raises ConfigError for a directory that cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str], model: str, device_kind: str):
        self.path = Path(directory) / FILE_NAME
        self._subject = {"model": model, "device": device_kind}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--state_dir={directory}: {error}") from error

    def read(self, mesh_plan: MeshPlan) -> Plan | None:
        """The plan, or None where there is none for this model, device and mesh."""
        try:
            data: dict[str, Any] = json.loads(self.path.read_text())
            plan = Plan.from_json(data["plan"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            log.warning("%s is not used: %r", self.path, error)
            return None
        found = {name: data.get(name) for name in self._subject}
        if found != self._subject or plan.mesh != mesh_plan:
            log.warning("%s is for %s on %s, not used", self.path, found, plan.mesh)
            return None
        return plan

    def write(self, plan: Plan) -> None:
        """Whole or not at all; on disk when this returns. Raises OSError."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        data = {**self._subject, "digest": plan.digest, "date": now, "plan": plan.to_json()}
        write_whole(self.path, json.dumps(data).encode(), mode=0o600)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too
        finally:
            os.close(directory)


def first_programs(
    config: EngineConfig,
    sizing: build.Sizing,
    mesh_plan: MeshPlan,
    device: Any,
    source: build.ProgramSource,
    compiler: CompilerProcess,
    last_good: LastGoodPlan | None,
    progress: Progress,
) -> PlanPrograms:
    """What the engine starts with: the last good plan, unless --plan names another one.

    A last good plan that cannot be built any more, or whose ladder is too short by now, is passed
    over. Raises ConfigError for flags that give no plan.
    """
    if last_good is not None and config.plan == "default":
        plan = last_good.read(mesh_plan)
        if plan is not None:
            try:
                ladder = build.engine_ladder(config, sizing, plan, device)
                BucketChooser(ladder, -(-sizing.limits.max_model_len // sizing.spec.page_size))
                return source.build(plan, ladder, progress, compiler)
            except Exception:
                log.exception("the last good plan %s cannot be used", plan.digest)
    plan = build.initial_plan(config, sizing, mesh_plan, device, source.cache)
    ladder = build.engine_ladder(config, sizing, plan, device)
    return source.build(plan, ladder, progress, compiler)
