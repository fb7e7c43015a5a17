"""The traffic a plan is timed on: a bounded set of steps drawn from distributions of lengths.

A step is the rows of its launch: new tokens and context of each. Which buckets they run in is the
ladder's business, so that one traffic serves every ladder. No jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError
from polyjax.engine.bucketing import LAUNCH_COST_TOKENS, BucketChooser

GROUPS = ("decode", "prefill")
CONTEXT_TOKEN_COST = 1 / 64  # about what models of a few billion parameters have


@dataclasses.dataclass(frozen=True)
class TrafficSpec:
    """Observed or assumed lengths, as samples: prompt and answer tokens, rows decoding at once.

    `decode_steps` and `prefill_steps` bound what is replayed.
    """

    prompt_tokens: tuple[int, ...] = (256,)
    output_tokens: tuple[int, ...] = (128,)
    concurrency: tuple[int, ...] = (1,)
    decode_steps: int = 8
    prefill_steps: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ConfigError(f"traffic: {name} must be positive lengths, not {values}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrafficSpec:
        """Raises ConfigError on unknown fields or values that are no lengths."""
        unknown = set(data) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"traffic has no field {', '.join(sorted(unknown))}")
        try:
            lists = ("prompt_tokens", "output_tokens", "concurrency")
            read: dict[str, Any] = {
                name: tuple(map(int, value)) if name in lists else int(value)
                for name, value in data.items()
            }
            return cls(**read)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"malformed traffic: {error}") from error

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence in a step: `tokens` new ones, which end a context of `context` tokens."""

    tokens: int
    context: int


Step = tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Steps by group, and what the mean step of a group contributes to one generated token."""

    steps: Mapping[str, tuple[Step, ...]]
    steps_per_token: Mapping[str, float]

    def us_per_token(self, step_us: Mapping[str, float]) -> float:
        """Microseconds a generated token takes, from the mean step of each group."""
        return sum(self.steps_per_token[group] * us for group, us in step_us.items())


def draw(
    spec: TrafficSpec, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> Traffic:
    """Returns steps drawn by the spec's seed, within the engine's limits.

    Decode rows sit at a uniformly drawn place in their answer. A prompt longer than the most tokens
    of a step is computed in chunks, of which one is drawn.
    """
    rng = np.random.default_rng(spec.seed)
    decode, prefill, chunk_counts, answers, rows_at_once = [], [], [], [], []
    for _ in range(spec.decode_steps):
        count = min(int(rng.choice(spec.concurrency)), max_num_seqs)
        rows = []
        for _ in range(count):
            prompt, answer = _lengths(spec, rng, max_model_len)
            rows.append(Row(1, prompt + int(rng.integers(1, answer + 1))))
        decode.append(tuple(rows))
        rows_at_once.append(count)
    for _ in range(spec.prefill_steps):
        prompt, answer = _lengths(spec, rng, max_model_len)
        chunks = -(-prompt // max_num_batched_tokens)
        start = int(rng.integers(chunks)) * max_num_batched_tokens
        end = min(prompt, start + max_num_batched_tokens)
        prefill.append((Row(end - start, end),))
        chunk_counts.append(chunks)
        answers.append(answer)
    per_token = {"decode": 1.0 / float(np.mean(rows_at_once)) if decode else 0.0}
    per_token["prefill"] = float(np.mean(chunk_counts) / np.mean(answers)) if prefill else 0.0
    steps = {"decode": tuple(decode), "prefill": tuple(prefill)}
    kept = [group for group in GROUPS if steps[group]]
    if not kept:
        raise ConfigError("traffic without a step: raise decode_steps or prefill_steps")
    return Traffic({g: steps[g] for g in kept}, {g: per_token[g] for g in kept})


def _lengths(spec: TrafficSpec, rng: np.random.Generator, longest: int) -> tuple[int, int]:
    """A prompt and an answer that together fit the context."""
    prompt = min(int(rng.choice(spec.prompt_tokens)), longest - 1)
    answer = min(int(rng.choice(spec.output_tokens)), longest - prompt)
    return max(prompt, 1), max(answer, 1)


def launches(
    step: Step, group: str, chooser: BucketChooser, page_size: int
) -> list[tuple[Bucket, list[int]]]:
    """Returns the buckets a step runs in on the chooser's ladder, with its row numbers in each.

    Raises ConfigError where a chunk fits no prefill bucket.
    """
    pages = [-(-row.context // page_size) for row in step]
    if group == "prefill":
        try:
            return chooser.group([row.tokens for row in step], pages)
        except ValueError as error:
            longest = max(row.tokens for row in step)
            raise ConfigError(f"no prefill bucket takes {longest} tokens") from error
    bucket = chooser.decode(len(step), max(pages))
    if bucket is not None:
        return [(bucket, list(range(len(step))))]
    return chooser.split_decode(pages)


def padded_tokens(traffic: Traffic, ladder: BucketLadder, page_size: int, max_pages: int) -> float:
    """Returns the padded tokens that a generated token costs on `ladder`: a prior, no time.

    A token of context to attend to counts as a small part of a token to compute.
    """
    chooser = BucketChooser(ladder, max_pages)
    total = 0.0
    for group, steps in traffic.steps.items():
        for step in steps:
            for bucket, _ in launches(step, group, chooser, page_size):
                context = bucket.pages * page_size * CONTEXT_TOKEN_COST
                work = LAUNCH_COST_TOKENS + bucket.sequences * (bucket.tokens + context)
                total += work * traffic.steps_per_token[group] / len(steps)
    return total


def buckets_used(
    traffic: Traffic, ladder: BucketLadder, page_size: int, max_pages: int
) -> dict[str, tuple[Bucket, ...]]:
    """Returns the buckets of each group that replaying on `ladder` needs.

    Raises ConfigError where a step fits no bucket.
    """
    chooser = BucketChooser(ladder, max_pages)
    found: dict[str, tuple[Bucket, ...]] = {}
    for group, steps in traffic.steps.items():
        used: Iterable[Bucket] = (
            bucket for step in steps for bucket, _ in launches(step, group, chooser, page_size)
        )
        found[group] = tuple(sorted(set(used)))
    return found
