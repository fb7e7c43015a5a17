"""What a gate says: passed or not, why, with the evidence and what it cost."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one gate. `evidence` holds numbers and short strings, ready for JSON."""

    gate: str
    passed: bool
    reason: str = ""
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    cost_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
