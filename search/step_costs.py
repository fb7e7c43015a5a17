"""What a token costs at least in each workload of a step: where a search has most to gain.

The roofline of every op call that generating a token takes on given traffic, by workload. It ranks;
it predicts nothing.
"""

from __future__ import annotations

import base64
import collections
import functools
import pickle

from polyjax.compiler.program import Kind, ProgramKey, ProgramRequest
from polyjax.compiler.workloads import program_calls
from polyjax.core.buckets import Bucket
from polyjax.core.chips import ChipSpec, chip
from polyjax.core.op import Workload
from polyjax.core.ops import OPS
from polyjax.engine.bucketing import BucketChooser
from polyjax.engine.types import EngineConfig
from search.cost.analytical import floor_us
from search.plan_bench import SizedModel, program_plan, sized_model
from search.traffic import TrafficSpec, draw, launches


def describe_costs(config: EngineConfig, traffic: TrafficSpec) -> str:
    """Returns pickled, in base64: workload key -> microseconds of a token, 0 where it is missing.

    Reads the model's config alone. Raises ConfigError or ModelError as an engine does.
    """
    model = sized_model(config)
    costs = step_costs(model, traffic, chip(model.device.device_kind))
    return base64.b64encode(pickle.dumps(costs)).decode()


def step_costs(model: SizedModel, spec: TrafficSpec, target: ChipSpec) -> dict[str, float]:
    """Returns workload key -> least microseconds that a generated token spends in it on a chip."""
    limits, page_size = model.sizing.limits, model.sizing.spec.page_size
    chooser = BucketChooser(model.ladder, -(-limits.max_model_len // page_size))
    chunk = min(limits.max_num_batched_tokens, max(b.tokens for b in model.ladder.prefill))
    traffic = draw(spec, limits.max_model_len, limits.max_num_seqs, chunk)
    call_us = functools.cache(lambda key: _program_us(model, key, target))
    costs: dict[str, float] = collections.defaultdict(float)
    for group, steps in traffic.steps.items():
        share = traffic.steps_per_token[group] / len(steps)
        for step in steps:
            for bucket, _ in launches(step, group, chooser, page_size):
                for key in _programs(group, bucket):
                    for workload, us in call_us(key).items():
                        costs[workload.key] += share * us
    return dict(costs)


def _programs(group: str, bucket: Bucket) -> tuple[ProgramKey, ...]:
    """What a launch runs."""
    if group == "decode":
        return (ProgramKey(Kind.DECODE_GREEDY, bucket),)
    sampler = ProgramKey(Kind.SAMPLE_GREEDY, Bucket(1, bucket.sequences, 0))
    return ProgramKey(Kind.PREFILL, bucket), sampler


def _program_us(model: SizedModel, key: ProgramKey, target: ChipSpec) -> dict[Workload, float]:
    request = ProgramRequest(model.sizing.spec, program_plan(model.base), key)
    calls = program_calls(request, model.mesh_plan.mesh())
    return {w: count * floor_us(OPS[w.op], w, target) for w, count in calls.items()}
