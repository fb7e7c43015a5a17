"""How plans are promoted: who asks, which way a plan takes, and the queue of tuners' proposals."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polyjax.core.errors import PolyjaxError, RequestError
from polyjax.core.plan import Plan

if TYPE_CHECKING:
    from polyjax.engine.installation import Installation

MAX_QUEUED = 16
_REMEMBERED = 64
_MAX_TEXT = 200  # characters of what others write about themselves


class Way(enum.StrEnum):
    """IMMEDIATE: gates, then in force. CANARY: also a first run in a process that can be killed,
    shadow steps and a paired canary, and in force only if that finds it faster."""

    IMMEDIATE = "immediate"
    CANARY = "canary"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Who asks for a plan, how it came about, and which way it takes."""

    way: Way = Way.IMMEDIATE
    agent: str = "operator"
    lineage: str = ""
    proposal_id: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "promotion": self.way.value,
            "agent": self.agent,
            "lineage": self.lineage,
            "proposal_id": self.proposal_id,
        }


@dataclasses.dataclass(frozen=True)
class Policy:
    """How much a promotion may disturb traffic, and for how long it looks.

    Under traffic, at most one piece of work is done between two steps, and pieces take at most the
    share `work_share` of the time. At most every `shadow_every`-th step is shadowed. A candidate
    is refused once `most_steps_without` steps in a row could not be shadowed; without traffic it
    waits.
    """

    work_share: float = 0.2
    shadow_every: int = 4
    shadow_steps: int = 12
    most_steps_without: int = 5000
    watch_steps: int = 200


@dataclasses.dataclass
class Proposal:
    """A plan that a tuner asks for. `installation` once its turn has come."""

    id: int
    plan: Plan
    origin: Origin
    installation: Installation | None = None
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "proposal_id": self.id,
            "digest": self.plan.digest,
            "stage": "refused" if self.refusal else "queued",
            "reason": self.refusal,
            **self.origin.to_json(),
        }
        if self.installation is not None:
            told |= self.installation.to_json()
            told["stage"] = told["state"]
        return told


class Proposals:
    """Takes proposals and starts them one after another, each when nothing else is on its way."""

    def __init__(self, start: Callable[[Plan, Origin], Installation]):
        self._start = start
        self._waiting: collections.deque[Proposal] = collections.deque()
        self._known: collections.OrderedDict[int, Proposal] = collections.OrderedDict()
        self._next_id = 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, plan: Plan, lineage: str, agent: str) -> Proposal:
        """Raises RequestError (409) while too many wait."""
        if len(self._waiting) >= MAX_QUEUED:
            raise RequestError(f"{MAX_QUEUED} proposals are waiting already", status=409)
        origin = Origin(Way.CANARY, agent[:_MAX_TEXT], lineage[:_MAX_TEXT], self._next_id)
        proposal = Proposal(self._next_id, plan, origin)
        self._next_id += 1
        self._waiting.append(proposal)
        self._known[proposal.id] = proposal
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return proposal

    def find(self, proposal_id: object) -> Proposal:
        """Raises RequestError (404) for one that is not known, or not any more."""
        proposal = self._known.get(proposal_id) if isinstance(proposal_id, int) else None
        if proposal is None:
            raise RequestError(f"no proposal {proposal_id!r}", "proposal_id", 404)
        return proposal

    def start_next(self) -> None:
        """Starts the proposal whose turn it is; the caller has seen that the way is free."""
        if not self._waiting:
            return
        proposal = self._waiting.popleft()
        try:
            proposal.installation = self._start(proposal.plan, proposal.origin)
        except PolyjaxError as error:
            proposal.refusal = str(error)
