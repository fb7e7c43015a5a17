"""What operators tell a running engine: which plan is in force, install another, go back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyjax.core.errors import ConfigError, RequestError, StateABIError
from polyjax.core.plan import Plan
from polyjax.engine.bucketing import BucketChooser

if TYPE_CHECKING:
    from polyjax.engine.engine import Engine


def run_command(engine: Engine, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs an admin command between two steps.

    "plan" tells the plan in force. "plan/install" takes {"plan": {...}}, {"path": ...} or
    {"compiler_options": {...}} (the plan in force with other options) and returns at once; "plan"
    then tells how far it got. "plan/rollback" returns to the plan before. Raises RequestError: 400
    for a malformed payload, 404 for an unknown command, 409 for what cannot be done now.
    """
    match command:
        case "plan":
            pass
        case "plan/install":
            _install(engine, payload)
        case "plan/rollback":
            engine.programs.roll_back(engine.step_number)
            if engine.installer.active:
                engine.installer.cancel()
            if not engine.has_work:  # nobody steps an idle engine: apply it now
                engine.step()
        case _:
            raise RequestError(f"no admin command {command!r}", status=404)
    return describe(engine)


def describe(engine: Engine) -> dict[str, Any]:
    """The plan in force, those resident, and the installation under way or last made."""
    programs, installation = engine.programs, engine.installer.current
    return {
        "digest": programs.current.plan.digest,
        "epoch": programs.epoch,
        "numerics": programs.current.plan.numerics,
        "programs": len(programs.current.programs),
        "state_abi": engine.source.abi_digest(programs.current.plan),
        "plan": programs.current.plan.to_json(),
        "resident": [resident.plan.digest for resident in programs.resident],
        "installation": installation.to_json() if installation else None,
    }


def _install(engine: Engine, payload: Mapping[str, Any]) -> None:
    current = engine.programs.current
    plan = read_plan(payload, current.plan)
    ladder = plan.ladder or current.ladder
    try:
        BucketChooser(ladder, -(-engine.info.max_model_len // engine.spec.page_size))
        engine.installer.start(plan, current.plan.mesh, ladder)
    except (ConfigError, StateABIError) as error:
        raise RequestError(str(error), "plan", 409) from error


def read_plan(payload: Mapping[str, Any], current: Plan) -> Plan:
    """The plan a payload describes. Raises RequestError naming what is wrong with it."""
    given = [name for name in ("plan", "path", "compiler_options") if name in payload]
    if len(given) != 1 or set(payload) - set(given):
        raise RequestError(
            'give exactly one of "plan" (an object), "path" (a JSON file of the server) and '
            '"compiler_options" (an object of XLA options)'
        )
    name, value = given[0], payload[given[0]]
    try:
        if name == "path" and isinstance(value, str):
            name, value = "plan", json.loads(Path(value).read_text())
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be {'a string' if name == 'path' else 'an object'}")
        if name == "compiler_options":
            options = tuple(sorted((str(key), str(option)) for key, option in value.items()))
            return dataclasses.replace(current, compiler_options=options)
        return Plan.from_json({"mesh": current.mesh.to_json(), **value})
    except (ConfigError, OSError, ValueError) as error:
        raise RequestError(str(error), given[0]) from error
