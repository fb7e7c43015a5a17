"""One request on its way through the engine: the only mutable record the scheduler keeps of it."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import random
from typing import TYPE_CHECKING

from polyjax.engine.pages import SequencePages
from polyjax.engine.types import Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from polyjax.engine.constraints import Constraint

SortKey = tuple[int, float, int]


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # in the queue: new, preempted or re-queued after a failed step
    RUNNING = "running"  # holds a slot and pages
    FINISHED = "finished"  # holds nothing; rows still in flight are discarded when they arrive


class SamplerKind(enum.IntEnum):
    """What a sampling row needs, cheapest first: a launch takes the largest of its rows'."""

    NONE = 0  # no row samples
    GREEDY = 1  # argmax
    GUMBEL = 2  # temperature only; greedy rows among them have temperature 0
    FULL = 3  # filters, penalties, bias, masks, logprobs


class Sequence:
    """A request, its tokens and what the device holds of it.

    `token_ids` are the tokens the host knows: the prompt, then what was sampled and read back.
    `num_total` adds the sampled tokens still in flight, known to the device only. The KV of the
    first `num_computed` tokens is written once every launched step has run. `max_total` bounds
    `num_total`: no step is scheduled beyond it. `slot` indexes the per-slot state on the device
    (-1: none). `constraint` is what a grammar allows next, None until it is compiled.
    """

    __slots__ = (
        "admitted_s",
        "constraint",
        "eos_ids",
        "event_total",
        "failed_steps",
        "finished_s",
        "first_token_s",
        "id",
        "key",
        "max_total",
        "min_total",
        "num_cached",
        "num_computed",
        "num_total",
        "pages",
        "params",
        "prompt_logprobs",
        "prompt_logprobs_due",
        "prompt_tokens",
        "request",
        "sampler",
        "seed",
        "slot",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        number: int,
        max_total: int,
        eos_token_ids: tuple[int, ...],
        pages: SequencePages,
    ):
        params = request.params
        self.request = request
        self.id = request.id
        self.params: SamplingParams = params
        self.key: SortKey = (request.priority, request.arrival_s, number)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.prompt_tokens = len(self.token_ids)
        self.num_total = self.prompt_tokens
        self.num_computed = 0
        self.num_cached = 0
        self.max_total = max_total
        self.min_total = self.prompt_tokens + params.min_tokens
        # Number of known tokens at which a commit has more to do than to pass a token on.
        self.event_total = self.prompt_tokens + 1
        self.slot = -1
        self.pages = pages
        self.eos_ids = () if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(self.eos_ids) | frozenset(params.stop_token_ids)
        self.sampler = sampler_kind(params)
        self.seed = random.getrandbits(32) if params.seed is None else fold_seed(params.seed)
        self.constraint: Constraint | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs_due = params.prompt_logprobs is not None
        self.failed_steps = 0
        self.admitted_s = 0.0
        self.first_token_s = 0.0
        self.finished_s = 0.0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id!r}, {self.status.value}, slot={self.slot}, "
            f"computed={self.num_computed}, known={len(self.token_ids)}, total={self.num_total})"
        )

    @property
    def ready(self) -> bool:
        """Whether it may be admitted as far as its grammar goes."""
        return self.constraint is not None or self.params.grammar is None

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled by launched steps and not read back yet."""
        return self.num_total - len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]


def sampler_kind(params: SamplingParams) -> SamplerKind:
    """The sampler a request needs once `min_tokens` are out (FULL until then)."""
    simple = (dataclasses.replace(params, min_tokens=0) if params.min_tokens else params).plain
    if not simple:
        return SamplerKind.FULL
    return SamplerKind.GREEDY if params.greedy else SamplerKind.GUMBEL


def fold_seed(seed: int) -> int:
    """The 32 bits the device takes of a signed 64-bit seed: itself if it fits, else a digest."""
    if 0 <= seed < 2**32:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return int.from_bytes(digest, "little")
