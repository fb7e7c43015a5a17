"""What a ledger's decisions amount to: the plan in force for a model, the choices of each device.

Imports no jax: a server's main process asks before any engine is there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError
from search.environment import why_not_here
from search.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class BestPlan:
    """The plan promoted last for a model, as JSON, and the trial that found it."""

    plan: Mapping[str, Any]
    trial: int


def best_plan(ledger: Ledger, model: str | None) -> BestPlan | None:
    """Returns the last plan that was promoted for a model (as --model names it), or None."""
    wanted = model or ""
    for made in reversed(list(ledger.promotions())):
        ours = made.evidence.get("model", "") == wanted
        if made.promoted and ours and "plan" in made.evidence:
            return BestPlan(made.evidence["plan"], made.trial)
    return None


def best_plan_here(path: Path, model: str | None) -> tuple[BestPlan | None, str]:
    """Returns the plan that a server on this machine starts with, or None and why.

    Raises ConfigError if the file is no ledger.
    """
    if not path.exists():
        return None, f"there is no ledger {path} yet"
    ledger = Ledger(path, None)
    try:
        found = best_plan(ledger, model)
        if found is None:
            return None, f"{path} has promoted no plan for {model or 'the demo model'}"
        differing = why_not_here(ledger.environments()[found.trial])
    finally:
        ledger.close()
    if differing:
        return None, f"{path} was measured elsewhere: {differing}"
    return found, ""


def best_choices(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Returns device kind -> workload key -> the last {"kernel", "schedule"} promoted there."""
    targets = {trial.id: trial.target for trial in ledger.trials()}
    found: dict[str, dict[str, Any]] = {}
    for made in ledger.promotions():
        choice = made.evidence.get("choice", {})
        if made.promoted and "kernel" in choice:
            found.setdefault(made.evidence["device_kind"], {})[targets[made.trial]] = choice
    return found


def read_json(path: Path, what: str) -> Any:
    """Returns a file's JSON. Raises ConfigError naming the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no {what}: {error}") from error
