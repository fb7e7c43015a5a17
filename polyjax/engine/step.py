"""What scheduler and engine tell each other: limits, a step to launch, what came back. No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from polyjax.core.buckets import Bucket
from polyjax.core.errors import ConfigError
from polyjax.engine.sequence import SamplerKind, Sequence
from polyjax.engine.types import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What an operator may change while serving.

    `watermark` is the share of each page pool that admission leaves free for running sequences to
    grow into. Raises ConfigError where they contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int = 1024
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes a token a step"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), not {self.watermark}")


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One row of a launch: compute the tokens at positions [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One forward program (and its sampler) of a step; lists are parallel, one entry a row.

    A row's first token is in the device's slot state, not on the host, where its start equals the
    number of tokens the host knew when this was scheduled (`from_slot`; only rows of one token).
    `bans_stop`: the row's sampled token must not be one of its `stop_ids` (min_tokens not reached).
    `num_logprobs` is the most alternatives a sampling row asked for, None if none did.
    `constrained`: the token of some sampling row must follow a grammar.
    """

    bucket: Bucket
    sequences: list[Sequence]
    starts: list[int]
    num_tokens: list[int]
    samples: list[bool]
    from_slot: list[bool]
    bans_stop: list[bool]
    sampler: SamplerKind
    num_logprobs: int | None = None
    constrained: bool = False
    prompt_logprobs: bool = False

    @property
    def decode(self) -> bool:
        return self.bucket.tokens == 1

    @property
    def rows(self) -> Iterator[ScheduledRow]:
        return map(ScheduledRow, self.sequences, self.starts, self.num_tokens, self.samples)


def make_launch(
    bucket: Bucket,
    sequences: list[Sequence],
    starts: list[int],
    num_tokens: list[int],
    samples: list[bool],
    prompt_logprobs: bool = False,
) -> Launch:
    """A launch of these rows, whose sampled tokens `Sequence.num_total` counts already."""
    from_slot = [
        start >= len(sequence.token_ids) for sequence, start in zip(sequences, starts, strict=True)
    ]
    bans_stop = [
        sample and sequence.num_total <= sequence.min_total
        for sequence, sample in zip(sequences, samples, strict=True)
    ]
    sampling = list(itertools.compress(sequences, samples))
    sampler = max([sequence.sampler for sequence in sampling], default=SamplerKind.NONE)
    if any(bans_stop):
        sampler = SamplerKind.FULL
    num_logprobs, constrained = None, False
    if sampler is SamplerKind.FULL:
        constrained = any(sequence.constraint is not None for sequence in sampling)
        wanted = [sequence.params.logprobs for sequence in sampling]
        num_logprobs = max((count for count in wanted if count is not None), default=None)
    return Launch(
        bucket,
        sequences,
        starts,
        num_tokens,
        samples,
        from_slot,
        bans_stop,
        sampler,
        num_logprobs,
        constrained,
        prompt_logprobs,
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """What to launch, in order. A sequence is in at most one launch of a step.

    `admitted` got a slot in this step: its slot state on the device has to be set up first.
    `extended` got or lost pages (admitted ones included).
    """

    number: int
    launches: tuple[Launch, ...]
    admitted: list[Sequence]
    extended: list[Sequence]
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchResult:
    """What was read back from one launch: per row, padded rows allowed at the end.

    `tokens` of rows that do not sample are ignored. `logprobs[row]` belongs to the sampled token.
    `prompt_logprobs[row]` belongs to the prompt tokens at positions start + 1 to start +
    num_tokens, as far as those exist. Raw device arrays do not belong here: `tolist()` first.
    """

    tokens: SequenceOf[int]
    logprobs: SequenceOf[TokenLogprobs] | None = None
    prompt_logprobs: SequenceOf[SequenceOf[TokenLogprobs] | None] | None = None


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """Monotonic since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
