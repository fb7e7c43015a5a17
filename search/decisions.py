"""Whether a trial replaces the incumbent: from raw paired samples, so that it can be decided again.

Evidence is JSON: `arms` maps a group of work ("decode", "prefill", "op") to the samples of
candidate and incumbent, taken in pairs; `noise` maps it to those of an A/A run, two copies of the
incumbent. The rule is the performance gate's: faster somewhere beyond noise, slower nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyjax.gates.performance import Comparison, Decision, compare, noise_floor, promotable
from search.ledger import Ledger, Promotion

RULE = "paired: faster in some group beyond the A/A floor, slower in none"


def floors(noise: Mapping[str, Any]) -> dict[str, float]:
    """Returns the relative noise floor of each group of an A/A run."""
    return {g: noise_floor(arm["first_us"], arm["second_us"]) for g, arm in noise.items()}


def comparisons(evidence: Mapping[str, Any]) -> dict[str, Comparison]:
    """Returns the comparison of each group as the evidence stands."""
    floor = floors(evidence["noise"])
    return {
        group: compare(
            arm["candidate_us"], arm["incumbent_us"], floor[group], int(evidence["max_pairs"])
        )
        for group, arm in evidence["arms"].items()
    }


def decide(evidence: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether the candidate is promoted, and why.

    `refused` is what a gate said of a candidate that its samples would have promoted.
    """
    promoted, reason = promotable(comparisons(evidence))
    refused = evidence.get("refused")
    return (False, f"{reason}, but {refused}") if promoted and refused else (promoted, reason)


def is_settled(evidence: Mapping[str, Any]) -> bool:
    """Whether no further pair is needed: every group is decided, or one is slower already."""
    found = {c.decision for c in comparisons(evidence).values()}
    return Decision.SLOWER in found or Decision.UNDECIDED not in found


def replay(ledger: Ledger) -> list[tuple[Promotion, bool, str]]:
    """Returns every decision of a ledger, and what its samples say now: (made, again, reason)."""
    return [(made, *decide(made.evidence)) for made in ledger.promotions()]
