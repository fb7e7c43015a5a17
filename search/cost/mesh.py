"""What a mesh plan costs: whether a model fits it, and the roofline of its steps with collectives.

Everything follows from the model's declarations: a parameter's bytes and flops are divided by the
ways its logical axes are cut; where the axis that a product sums over is cut, its result needs an
all-reduce. Memory comes first: what does not fit is refused with the bytes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping

import models
from polyjax.core.arrays import num_bytes
from polyjax.core.chips import ChipSpec
from polyjax.core.mesh import MeshPlan
from polyjax.core.model import ModelConfig, ParamSpec
from search.cost.analytical import XLA_START_US, all_reduce_us
from search.traffic import TrafficSpec

MEMORY_SHARE = 0.9  # of a device's memory that weights, cache and activations may take
OPS_PER_LAYER = 13  # kernels XLA launches: Llama-3.2-1B's decode step has 213 ops in 16 layers


@dataclasses.dataclass(frozen=True)
class Load:
    """A traffic in round numbers: `rows` sequences decode together, at `context_tokens` each."""

    rows: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, traffic: TrafficSpec) -> Load:
        """The medians of a traffic's distributions."""
        middle = lambda values: max(1, round(statistics.median(values)))  # noqa: E731
        return cls(
            middle(traffic.concurrency),
            middle(traffic.prompt_tokens),
            middle(traffic.output_tokens),
        )

    @property
    def context_tokens(self) -> int:
        """Of a sequence half way through its answer."""
        return self.prompt_tokens + self.output_tokens // 2


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """What mesh costs read of a model: config, dtype of weights and cache, parameters by name.

    `experts_per_token` is 0 without experts.
    """

    config: ModelConfig
    dtype: str
    specs: Mapping[str, ParamSpec]
    experts_per_token: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> ServedModel:
        specs = models.abstract(config, dtype).specs
        chosen = 0
        if any("experts" in spec.axes for spec in specs.values()):
            step = config.workloads(1, 1, 1, 16, dtype)
            chosen = next(w["A"] for w in step if w.op == "experts")
        return cls(config, dtype, specs, chosen)

    def memory(self, plan: MeshPlan) -> models.Memory:
        """As `--dry_run` tells it."""
        return models.memory(self.config, self.dtype, plan, self.specs)

    def bytes_of(self, spec: ParamSpec) -> int:
        return num_bytes(spec.shape, spec.dtype or self.dtype)

    @property
    def lookups(self) -> frozenset[str]:
        """Parameters whose rows are looked up: the embedding, where the head has its own matrix."""
        tables = [name for name, spec in self.specs.items() if "vocab" in spec.axes]
        return frozenset(tables[:1] if len(tables) > 1 else ())


@dataclasses.dataclass(frozen=True)
class MeshCost:
    """A mesh plan's prediction. `refused` says why it cannot serve; its times are then infinite.

    Bytes are those of the fullest device, the cache's for the whole load. `us_per_token` is what a
    generated token takes, its share of prompts included.
    """

    plan: MeshPlan
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    budget_bytes: int
    decode_us: float = math.inf
    prefill_us: float = math.inf
    collective_us: float = 0.0
    us_per_token: float = math.inf
    refused: str | None = None

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __str__(self) -> str:
        sizes = f"data={self.plan.data} model={self.plan.model} expert={self.plan.expert}"
        if self.refused is not None:
            return f"{sizes}: refused: {self.refused}"
        return (
            f"{sizes}: {self.us_per_token:.1f} us a token (decode step {self.decode_us:.0f} us, of "
            f"it {self.collective_us:.0f} us collectives; {self.needed_bytes:,} of "
            f"{self.budget_bytes:,} bytes a device)"
        )


def cost(model: ServedModel, plan: MeshPlan, load: Load, chip: ChipSpec) -> MeshCost:
    """Returns the cost of a plan, or why it is refused: by name, by divisibility, by bytes."""
    sized = _memory(model, plan, load, chip)
    reason = next(_refusals(model, plan, sized), None)
    if reason is not None:
        return dataclasses.replace(sized, refused=reason)
    host = _share_of_host(plan, chip)
    decode_us, collective_us = _step_us(model, plan, load.rows, 1, load.context_tokens, host)
    prefill_us, _ = _step_us(model, plan, 1, load.prompt_tokens, load.prompt_tokens, host)
    per_token = decode_us / load.rows + prefill_us / load.output_tokens
    return dataclasses.replace(
        sized,
        decode_us=decode_us,
        prefill_us=prefill_us,
        collective_us=collective_us,
        us_per_token=per_token,
    )


def _memory(model: ServedModel, plan: MeshPlan, load: Load, chip: ChipSpec) -> MeshCost:
    memory = model.memory(plan)
    longest = load.prompt_tokens + load.output_tokens
    # Activations of the longest prompt and float32 logits, as the engine sets aside for them.
    widest = max(16 * model.config.embed_dim, model.config.vocab_size // 8)
    budget = _share_of_host(plan, chip).hbm_bytes * MEMORY_SHARE
    return MeshCost(
        plan,
        memory.weight_bytes,
        load.rows * memory.kv_bytes(longest),
        8 * max(load.prompt_tokens, load.rows) * widest,
        int(budget),
    )


def _refusals(model: ServedModel, plan: MeshPlan, sized: MeshCost) -> Iterator[str]:
    """Yields reasons, the ones that name what to do about them first."""
    if plan.data > 1:
        yield "data-parallel replicas share no engine: start one server a replica"
    if plan.sequence > 1:
        yield "the engine has no sequence parallelism"
    if plan.expert > 1 and not model.experts_per_token:
        yield "the model has no experts to spread"
    arrays = [(spec.axes, spec.shape) for spec in model.specs.values()]
    arrays += [(g.axes, (1, *g.page_shape(1))) for g in model.config.kv_groups()]
    problems = dict.fromkeys(p for axes, shape in arrays for p in plan.divides(axes, shape))
    if problems:
        yield "; ".join(problems)
    if sized.needed_bytes > sized.budget_bytes:
        yield (
            f"{sized.needed_bytes:,} bytes a device (weights {sized.weight_bytes:,}, KV cache "
            f"{sized.kv_bytes:,}, activations {sized.activation_bytes:,}), "
            f"{sized.budget_bytes:,} are there"
        )


def _share_of_host(plan: MeshPlan, chip: ChipSpec) -> ChipSpec:
    """One device of the mesh. Virtual CPU devices are one host: they share memory and cores."""
    if chip.platform != "cpu" or plan.num_devices == 1:
        return chip
    n = plan.num_devices
    return dataclasses.replace(
        chip,
        hbm_bytes=chip.hbm_bytes // n,
        hbm_bytes_per_s=chip.hbm_bytes_per_s / n,
        bf16_flops_per_s=chip.bf16_flops_per_s / n,
        interconnect_bytes_per_s=chip.interconnect_bytes_per_s / n,
    )


def _step_us(
    model: ServedModel, plan: MeshPlan, rows: int, tokens: int, context: int, chip: ChipSpec
) -> tuple[float, float]:
    """Returns (microseconds of a step, of them collectives). `tokens` new ones in each of `rows`.

    Every parameter is a product of its own, bound by its bytes or its flops.
    """
    count = rows * tokens
    hidden_bytes = count * model.config.embed_dim * num_bytes((), model.dtype)
    total_us = collective_us = 0.0
    for name, spec in model.specs.items():
        read, flops = _work(model, name, spec, count)
        ways = plan.ways(spec.axes)
        total_us += _roofline_us(read / ways, flops / ways, chip)
        if len(spec.shape) > 1:
            collective_us += all_reduce_us(hidden_bytes, _summed_ways(plan, name, spec), chip)
    total_us += _attention_us(model, plan, rows, tokens, context, chip)
    return total_us + _launches_us(model, chip) + collective_us, collective_us


def _roofline_us(read_bytes: float, flops: float, chip: ChipSpec) -> float:
    return max(read_bytes / chip.hbm_bytes_per_s, flops / chip.bf16_flops_per_s) * 1e6


def _work(model: ServedModel, name: str, spec: ParamSpec, count: int) -> tuple[float, float]:
    """Returns (bytes read, flops) of one parameter over the whole mesh, for `count` tokens."""
    size, elements = float(model.bytes_of(spec)), math.prod(spec.shape)
    if name in model.lookups:
        return size * min(1.0, count / spec.shape[0]), 0.0
    if len(spec.shape) < 2:
        return size, 0.0
    if "experts" not in spec.axes:
        return size, 2.0 * count * elements
    chosen = model.experts_per_token / spec.shape[0]
    # Tokens choose experts evenly: the share of them that no token of the step wants stays unread.
    return size * (1.0 - (1.0 - chosen) ** count), 2.0 * count * chosen * elements


def _summed_ways(plan: MeshPlan, name: str, spec: ParamSpec) -> int:
    """Over how many devices a product's partial results are summed.

    Products sum over a parameter's last axis, experts over their first one as well. A table cut by
    its vocabulary leaves all but one device without a token's row.
    """
    summed = {spec.axes[-1]} | ({"experts"} & set(spec.axes) if _is_down(spec) else set())
    if name == "embedding":
        summed = {"vocab"}
    return plan.ways([axis for axis in summed if axis is not None])


def _is_down(spec: ParamSpec) -> bool:
    """Whether an expert parameter leads back to the residual stream, where experts are added."""
    return spec.axes[-1] == "ffw"


def _attention_us(
    model: ServedModel, plan: MeshPlan, rows: int, tokens: int, context: int, chip: ChipSpec
) -> float:
    """Reads every live key and value once; scores and sums of a causal prompt in flops.

    Query heads x head dim is taken to be the model's width.
    """
    read = rows * model.memory(plan).kv_bytes(context)
    pairs = rows * tokens * (context if tokens == 1 else context / 2)
    flops = 4.0 * pairs * model.config.embed_dim * model.config.num_layers / plan.model
    return _roofline_us(float(read), flops, chip)


def _launches_us(model: ServedModel, chip: ChipSpec) -> float:
    """A GPU pays for every kernel; elsewhere one program is one launch."""
    if chip.platform != "gpu":
        return chip.launch_gap_us
    return model.config.num_layers * OPS_PER_LAYER * (chip.launch_gap_us + XLA_START_US)
