"""The plan: kernel and schedule of every workload, bucket ladder, mesh plan, compiler options.

A plan is immutable, has a digest and a JSON form. It changes only between two steps, as a whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from polyjax.core.buckets import Bucket as Bucket
from polyjax.core.buckets import BucketLadder as BucketLadder
from polyjax.core.errors import ConfigError
from polyjax.core.kernel_source import PREFIX, KernelSource, check_name
from polyjax.core.mesh import MeshPlan
from polyjax.core.op import REFERENCE_NAME, Choice

UNLISTED = (REFERENCE_NAME, "default")
NUMERICS_CLASSES = ("batch_invariant", "bounded", "quality")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Immutable map from workload key to (kernel, schedule), with mesh plan, ladder and options.

    `ladder` None lets the engine derive one from its limits. `compiler_options` are XLA options for
    `Lowered.compile`, as (name, value) strings. `sources` says, for every kernel named `file:...`,
    which text is behind it; a digest covers the text, not where it lies. `unlisted` says what
    computes workloads without a choice: their "reference", or the "default" kernel of the chip, so
    that a ladder may grow.
    """

    choices: tuple[tuple[str, Choice], ...] = ()
    mesh: MeshPlan = dataclasses.field(default_factory=MeshPlan)
    ladder: BucketLadder | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()
    numerics: str = "bounded"
    sources: tuple[tuple[str, KernelSource], ...] = ()
    unlisted: str = REFERENCE_NAME

    def __post_init__(self) -> None:
        if self.unlisted not in UNLISTED:
            raise ConfigError(f"unlisted {self.unlisted!r} is none of {UNLISTED}")
        if self.numerics not in NUMERICS_CLASSES:
            raise ConfigError(f"numerics {self.numerics!r} is none of {NUMERICS_CLASSES}")
        for name, source in self.sources:
            check_name(name, source)
        known = {name for name, _ in self.sources}
        for key, choice in self.choices:
            if choice.kernel.startswith(PREFIX) and choice.kernel not in known:
                raise ConfigError(f"{key} takes {choice.kernel}, which sources do not list")

    @property
    def digest(self) -> str:
        """Returns 16 hex digits that name this plan; equal plans have equal digests."""
        content = self.to_json() | {"sources": {name: s.sha256 for name, s in self.sources}}
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "choices": {
                key: {"kernel": c.kernel, "schedule": dict(c.schedule)}
                for key, c in sorted(self.choices)
            },
            "mesh": self.mesh.to_json(),
            "ladder": dataclasses.asdict(self.ladder) if self.ladder else None,
            "compiler_options": dict(self.compiler_options),
            "numerics": self.numerics,
            "sources": {name: source.to_json() for name, source in self.sources},
            "unlisted": self.unlisted,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Returns the plan. Raises ConfigError naming an unknown or malformed field."""
        unknown = set(data) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"a plan has no field {sorted(unknown)}")
        try:
            choices = tuple(
                sorted(
                    (key, Choice(c["kernel"], tuple(sorted(c["schedule"].items()))))
                    for key, c in data.get("choices", {}).items()
                )
            )
            ladder = data.get("ladder")
            return cls(
                choices=choices,
                mesh=MeshPlan.from_json(data.get("mesh", {})),
                ladder=_ladder_from_json(ladder) if ladder else None,
                compiler_options=tuple(
                    sorted((k, str(v)) for k, v in data.get("compiler_options", {}).items())
                ),
                numerics=data.get("numerics", "bounded"),
                sources=tuple(
                    (n, KernelSource(**s)) for n, s in sorted(data.get("sources", {}).items())
                ),
                unlisted=data.get("unlisted", REFERENCE_NAME),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"malformed plan: {error!r}") from error


def _ladder_from_json(data: Mapping[str, Any]) -> BucketLadder:
    buckets = lambda rows: tuple(sorted(Bucket(**row) for row in rows))  # noqa: E731
    return BucketLadder(
        buckets(data["decode"]),
        buckets(data["prefill"]),
        tuple(sorted(map(int, data["sampler_sequences"]))),
    )
