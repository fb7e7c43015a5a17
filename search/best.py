"""What a ledger's decisions amount to: the plan in force for a model, the choices of each device.

No device is touched: a server asks before it starts one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError
from polyjax.core.op import Choice
from polyjax.core.plan import Plan
from search.ledger import Ledger


def best_plan(ledger: Ledger, model: str | None) -> Plan | None:
    """Returns the last plan that was promoted for a model (as --model names it), or None.

    Raises ConfigError if what the ledger holds is no plan.
    """
    wanted = model or ""
    made = [
        p for p in ledger.promotions()
        if p.promoted and "plan" in p.evidence and p.evidence.get("model", "") == wanted
    ]  # fmt: skip
    return Plan.from_json(made[-1].evidence["plan"]) if made else None


def best_choices(ledger: Ledger) -> dict[str, dict[str, Choice]]:
    """Returns device kind -> workload key -> the last kernel and schedule promoted there."""
    targets = {trial.id: trial.target for trial in ledger.trials()}
    found: dict[str, dict[str, Choice]] = {}
    for made in ledger.promotions():
        choice = made.evidence.get("choice", {})
        if made.promoted and "kernel" in choice:
            device = found.setdefault(made.evidence["device_kind"], {})
            schedule = tuple(sorted(choice["schedule"].items()))
            device[targets[made.trial]] = Choice(choice["kernel"], schedule)
    return found


def read_json(path: Path, what: str) -> Any:
    """Returns a file's JSON. Raises ConfigError naming the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no {what}: {error}") from error
