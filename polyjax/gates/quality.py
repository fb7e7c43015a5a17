"""The quality gate: does a candidate predict public text as well as the incumbent, beyond noise?

For programs whose numbers may differ by more than rounding (class `quality`). Arms answer the same
windows of text; arms that are known to be equal (the incumbent again, at concurrency 1 and at the
highest bucket, or by another plan of the bounded class) give the spread that is no difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyjax.evaluation.intervals import bootstrap, paired_difference
from polyjax.gates.candidate import GateFailure

GATE = "quality"

Arm = Callable[[np.ndarray], np.ndarray]
"""Token ids [W,T] int32 -> logits [W,T,V] float32, of the token after each position."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far an arm is from the incumbent, a number a window each.

    `log_prob` is the change of the text's mean log-probability (below 0 is worse), `divergence` the
    mean KL divergence in nats, `disagreement` the share of positions whose best token differs.
    """

    log_prob: np.ndarray
    divergence: np.ndarray
    disagreement: np.ndarray


@dataclasses.dataclass(frozen=True)
class Limits:
    """What equal arms can differ by; see `limits`."""

    log_prob_loss: float
    divergence: float
    disagreement: float


def distance(tokens: np.ndarray, incumbent: np.ndarray, other: np.ndarray) -> Distance:
    """Compares logits [W,T,V] of two arms on tokens [W,T]. Raises GateFailure on NaN or inf."""
    if other.shape != incumbent.shape:
        raise GateFailure(f"logits are {other.shape}, the incumbent's {incumbent.shape}")
    if not np.isfinite(other).all():
        raise GateFailure(f"{int((~np.isfinite(other)).sum())} logits are not finite")
    ours, theirs = _log_softmax(other), _log_softmax(incumbent)
    following = tokens[:, 1:, None]
    gains = [np.take_along_axis(a[:, :-1], following, -1)[..., 0].mean(-1) for a in (ours, theirs)]
    divergence = np.sum(np.exp(theirs) * (theirs - ours), -1).mean(-1)
    differs = np.argmax(ours, -1) != np.argmax(theirs, -1)
    return Distance(gains[0] - gains[1], divergence, differs.mean(-1))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def limits(equal: Sequence[Distance]) -> Limits:
    """Returns the largest upper 95 % bound of each distance over arms known to be equal, doubled.

    Doubled because a candidate that is as good as an equal arm errs as much as one, in its own way,
    and the bound is of the equal arms' mean. Raises ValueError without equal arms.
    """
    if not equal:
        raise ValueError("the spread of equal arms is needed: run the incumbent again")

    def upper(samples: np.ndarray) -> float:
        return max(0.0, bootstrap(samples.tolist()).high)

    return Limits(
        2 * max(upper(np.abs(d.log_prob)) for d in equal),
        2 * max(upper(d.divergence) for d in equal),
        2 * max(upper(d.disagreement) for d in equal),
    )


def check(
    tokens: np.ndarray, incumbent: Arm, equal: Sequence[Arm], candidate: Arm
) -> dict[str, Any]:
    """Evidence with distances and limits. Raises GateFailure naming what got worse.

    tokens [W,T], windows of text; at least two, a bootstrap needs them.
    """
    base = incumbent(tokens)
    allowed = limits([distance(tokens, base, arm(tokens)) for arm in equal])
    found = distance(tokens, base, candidate(tokens))
    change = paired_difference(found.log_prob.tolist(), [0.0] * len(found.log_prob))
    divergence = bootstrap(found.divergence.tolist())
    disagreement = bootstrap(found.disagreement.tolist())
    evidence = {
        "log_prob_change": str(change),
        "divergence": str(divergence),
        "disagreement": str(disagreement),
        "limits": dataclasses.asdict(allowed),
    }
    # A text that it predicts worse, by more than the windows' own spread explains.
    if change.high < -allowed.log_prob_loss:
        raise GateFailure(f"log-probability changes by {change}, equal arms: {allowed}")
    if divergence.low > allowed.divergence:
        raise GateFailure(f"KL divergence {divergence} nats, equal arms: {allowed}")
    if disagreement.low > allowed.disagreement:
        raise GateFailure(
            f"best tokens differ at {disagreement} of positions, equal arms: {allowed}"
        )
    return evidence
