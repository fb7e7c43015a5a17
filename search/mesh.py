"""Which mesh plan a model should be served on: all are ranked, the best few measured, one written.

costs = rank(config, dtype, traffic, chip, num_devices)      # cheapest first, refused ones last
measured = measure(engine_config, costs, traffic, best=3)    # engines, one after the other
write_plan(path, measured[0].plan)                           # python -m polyjax.serve --plan=
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.model import ModelConfig
from polyjax.core.plan import Plan
from polyjax.core.whole_file import write_whole
from polyjax.engine.engine import Engine
from polyjax.engine.types import EngineConfig, Request, SamplingParams
from search.cost.mesh import Load, MeshCost, ServedModel, cost
from search.traffic import TrafficSpec

ROUNDS = 3  # timed ones; one more before them fills caches and is not counted

_clock = time.perf_counter


def plans(num_devices: int) -> Iterator[MeshPlan]:
    """Yields every (data, model, expert) whose product is at most `num_devices` and divides it."""
    counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for data in counts:
        for model in counts:
            for expert in counts:
                if num_devices % (data * model * expert) == 0:
                    yield MeshPlan(data=data, model=model, expert=expert)


def rank(
    config: ModelConfig, dtype: str, traffic: TrafficSpec, chip: ChipSpec, num_devices: int
) -> list[MeshCost]:
    """Returns the cost of every mesh plan, fastest token first; refused ones last, with reasons.

    `dtype` is that of weights and cache, never "auto".
    """
    model, load = ServedModel.of(config, dtype), Load.of(traffic)
    costs = [cost(model, plan, load, chip) for plan in plans(num_devices)]
    return sorted(costs, key=lambda c: (c.refused is not None, c.us_per_token, c.plan.num_devices))


@dataclasses.dataclass(frozen=True)
class MeasuredMesh:
    """An engine's plan on a mesh and what a generated token took, one sample a round.

    `plan` is None where the engine could not be built; `failed` then says why.
    """

    cost: MeshCost
    plan: Plan | None
    samples_us: tuple[float, ...] = ()
    failed: str | None = None

    @property
    def us_per_token(self) -> float:
        return statistics.median(self.samples_us)


def measure(
    config: EngineConfig,
    costs: Sequence[MeshCost],
    traffic: TrafficSpec,
    best: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> list[MeasuredMesh]:
    """Serves the traffic on the `best` cheapest legal plans in turn; returns them fastest first.

    `config` names model and limits; its mesh flags and plan are set here. Plans that fail come last
    with their reason. Raises ConfigError if no plan is legal: the message has every reason.
    """
    legal = [c for c in costs if c.refused is None]
    if not legal:
        reasons = "\n  ".join(map(str, costs))
        raise ConfigError(f"no mesh plan can serve this model here:\n  {reasons}")
    measured = []
    for chosen in legal[:best]:
        found = _measured(config, chosen, Load.of(traffic), traffic.seed)
        measured.append(found)
        report(f"{chosen}; measured {found.failed or f'{found.us_per_token:.1f} us a token'}")
    return sorted(measured, key=lambda m: (m.plan is None, m.us_per_token if m.plan else 0.0))


def _measured(config: EngineConfig, chosen: MeshCost, load: Load, seed: int) -> MeasuredMesh:
    flags = dataclasses.replace(
        config,
        tensor_parallel_size=chosen.plan.model,
        expert_parallel_size=chosen.plan.expert,
        plan="default",
        enable_prefix_caching=False,  # prompts repeat from round to round
    )
    engine = None
    try:
        engine = Engine(flags)
        plan = engine.programs.current.plan
        samples = [_round_us(engine, load, seed, number) for number in range(ROUNDS + 1)]
    except Exception as error:  # a mesh that fails is a result
        return MeasuredMesh(chosen, None, failed=" ".join(str(error).split())[:300])
    finally:
        if engine is not None:
            engine.close()
    return MeasuredMesh(chosen, plan, tuple(samples[1:]))


def _round_us(engine: Engine, load: Load, seed: int, number: int) -> float:
    """Microseconds a generated token: every row at once, from its prompt to its last token."""
    rng = np.random.default_rng([seed, number])
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    for row in range(load.rows):
        prompt = rng.integers(3, engine.info.vocab_size, load.prompt_tokens).tolist()
        engine.add(Request(f"mesh-{number}-{row}", prompt, params))
    begun, tokens = _clock(), 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise ConfigError(output.error)
            tokens += len(output.token_ids)
    return (_clock() - begun) / max(tokens, 1) * 1e6


def write_plan(path: str | Path, plan: Plan) -> None:
    """Replaces a plan file whole. `--plan` serves it, its mesh with it.

    The ladder is left out where the engine derived it: it belongs to limits, not to the plan.
    """
    text = json.dumps(plan.to_json(), indent=1, sort_keys=True)
    write_whole(Path(path), f"{text}\n".encode())
