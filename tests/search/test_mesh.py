"""Mesh plans: what fits is ranked, what does not is refused with its bytes, the best is served."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import models
from polyjax.compiler.program import Kind, ProgramKey, ProgramRequest, compile_program
from polyjax.compiler.state import StateSpec
from polyjax.core.buckets import Bucket
from polyjax.core.chips import chip
from polyjax.core.errors import ConfigError
from polyjax.core.mesh import MeshPlan
from polyjax.core.plan import Plan
from polyjax.dry_run import describe
from polyjax.engine.engine import Engine
from polyjax.engine.types import EngineConfig, Request, SamplingParams
from polyjax.io.files import open_model
from search.cost.mesh import Load, ServedModel, cost
from search.mesh import ROUNDS, measure, plans, rank, write_plan
from search.traffic import TrafficSpec
from tests import tiny_llama

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
CPU, H200 = chip("CPU"), chip("NVIDIA H200")
TRAFFIC = TrafficSpec(prompt_tokens=(12,), output_tokens=(3,), concurrency=(2,))
eight_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")


def golden(case):
    config = json.loads((GOLDENS / case / "config.json").read_text())
    return models.family(config["architectures"][0]).Config.from_hf(config)


def llama(**sizes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return models.family("LlamaForCausalLM").Config.from_hf(config | sizes)


def sizes(costs):
    return [(c.plan.data, c.plan.model, c.plan.expert) for c in costs]


def test_every_plan_is_named_once_and_those_the_engine_cannot_serve_are_refused_by_name():
    every = list(plans(8))
    assert len(set(every)) == len(every) == 20
    costs = rank(tiny_llama.config(), "float32", TRAFFIC, CPU, 8)
    assert sorted(map(hash, every)) == sorted(hash(c.plan) for c in costs)
    legal = [c for c in costs if c.refused is None]
    assert sizes(legal) == [(1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1)]
    assert costs[: len(legal)] == legal  # refused ones come last
    reasons = {(c.plan.data, c.plan.model, c.plan.expert): c.refused for c in costs}
    assert "one server a replica" in reasons[2, 1, 1]
    assert "no experts" in reasons[1, 1, 2]


def test_heads_experts_and_widths_must_divide():
    costs = rank(golden("mixtral/full"), "float32", TRAFFIC, CPU, 8)
    legal = {(c.plan.model, c.plan.expert) for c in costs if c.refused is None}
    specs = models.abstract(golden("mixtral/full")).specs.values()
    experts = next(s.shape[0] for s in specs if "experts" in s.axes)
    assert legal and all(experts % e == 0 for _, e in legal)
    refused = {(c.plan.data, c.plan.model, c.plan.expert): c.refused for c in costs if c.refused}
    assert re.search(r"kv_heads=\d+ is not divisible by model=8", refused[1, 8, 1])


def test_memory_is_what_dry_run_says_and_what_arrays_take():
    case, plan = "llama/mha", MeshPlan(model=2)
    config = golden(case)
    load = Load(3, 20, 12)
    found = cost(ServedModel.of(config, "float32"), plan, load, CPU)
    flags = EngineConfig(tensor_parallel_size=2, max_model_len=32, max_num_seqs=3, dtype="float32")
    said = describe(flags, open_model(str(GOLDENS / case)))
    numbers = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes \(", said)]
    assert [found.weight_bytes, found.kv_bytes] == [numbers[0], numbers[2]]
    mesh = plan.mesh()
    arrays = [
        jax.device_put(np.zeros(s.shape, np.float32), plan.sharding(mesh, s.axes))
        for s in models.abstract(config, "float32").specs.values()
    ]
    assert found.weight_bytes == sum(a.addressable_shards[0].data.nbytes for a in arrays)


def test_what_does_not_fit_is_refused_with_the_bytes():
    traffic = TrafficSpec(prompt_tokens=(1024,), output_tokens=(1024,), concurrency=(64,))
    small = dataclasses.replace(H200, hbm_bytes=14 * 10**9)
    costs = rank(llama(), "bfloat16", traffic, small, 8)
    by_model = {c.plan.model: c for c in costs if c.plan.data == c.plan.expert == 1}
    assert f"{by_model[1].needed_bytes:,} bytes a device" in by_model[1].refused
    assert by_model[8].refused is None and by_model[8].needed_bytes < by_model[8].budget_bytes
    # Two bytes of: two tables, 8 layers of attention and of three feed-forward matrices.
    layer = 8192 * (10240 + 8192) + 3 * 8192 * 28672
    assert by_model[8].weight_bytes == pytest.approx(
        2 * (2 * 128256 * 8192 + 8 * layer) / 8, rel=1e-3
    )
    assert by_model[8].kv_bytes == 64 * 2048 * 8 * 8 * 128 * 2 * 2 // 8


def test_more_devices_help_a_large_model_and_collectives_hold_back_a_small_one():
    traffic = TrafficSpec(prompt_tokens=(512,), output_tokens=(256,), concurrency=(16,))
    large = [c for c in rank(llama(), "bfloat16", traffic, H200, 8) if c.refused is None]
    assert large[0].plan.model == 8
    assert large[0].decode_us > large[0].weight_bytes / H200.hbm_bytes_per_s * 1e6
    small = llama(num_hidden_layers=2, hidden_size=512, intermediate_size=1024, vocab_size=4096)
    ranked = rank(small, "bfloat16", TRAFFIC, H200, 8)
    assert ranked[0].plan.num_devices == 1
    shares = [c.collective_us for c in ranked if c.refused is None]
    assert shares == sorted(shares)


@eight_devices
@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("llama/gqa_tied", MeshPlan(model=2)),
        ("mixtral/full", MeshPlan(expert=2)),
        ("mixtral/full", MeshPlan(model=2, expert=2)),
    ],
)
def test_collectives_are_those_of_the_compiled_step(case, plan):
    """All-reduces of hidden states in the program against those that declarations predict."""
    config = golden(case)
    spec = StateSpec(config, "float32", 16, (16,) * len(config.kv_groups()), 4, 4)
    key = ProgramKey(Kind.DECODE_GREEDY, Bucket(1, 4, 2))
    program = compile_program(ProgramRequest(spec, Plan(mesh=plan), key), plan.mesh())
    text = program.executable.as_text()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-reduce(?:-start)?\(", text)
    wanted = 4 * config.embed_dim  # of a row each
    found = [s for s in shapes if np.prod([int(n) for n in s.split(",")]) == wanted]
    # Each costs base + 2(n - 1) hops on an interconnect without end.
    wire = {"interconnect_bytes_per_s": 1e30, "collective_base_us": 1.0, "collective_hop_us": 0.0}
    fast = dataclasses.replace(CPU, **wire)
    predicted = cost(ServedModel.of(config, "float32"), plan, Load(4, 8, 8), fast).collective_us
    assert predicted == pytest.approx(len(found))


def served_config(folder):
    return EngineConfig(
        model=str(tiny_llama.write_model(folder / "model")),
        load_format="dummy",
        block_size=tiny_llama.PAGE_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=32,
        num_kv_pages=8,
        max_programs=4,
        compile_cache_dir=str(folder / "programs"),
    )


@eight_devices
def test_the_best_few_are_measured_and_the_winner_is_served_from_its_plan_file(tmp_path):
    config = served_config(tmp_path)
    costs = rank(tiny_llama.config(), "float32", TRAFFIC, CPU, 8)
    two = next(c for c in costs if c.plan == MeshPlan(model=2))
    absent = dataclasses.replace(two, plan=MeshPlan(model=64))
    lines = []
    measured = measure(config, [absent, two, costs[0]], TRAFFIC, best=2, report=lines.append)
    assert [m.cost.plan.model for m in measured] == [2, 64] and len(lines) == 2
    # A mesh that fails is a result; it comes last.
    assert measured[1].plan is None and "64 devices" in measured[1].failed
    assert measured[0].failed is None and len(measured[0].samples_us) == ROUNDS
    write_plan(tmp_path / "plan.json", measured[0].plan)
    engine = Engine(with_plan(config, tmp_path / "plan.json"))
    try:
        assert engine.mesh.size == 2 and engine.programs.current.plan == measured[0].plan
        engine.add(Request("r", [5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0)))
        tokens = []
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.token_ids]
        assert len(tokens) == 3
    finally:
        engine.close()


def with_plan(config, path):
    return dataclasses.replace(config, plan=str(path))


def test_an_engine_refuses_a_plan_file_of_another_mesh_than_its_flags_or_its_abilities(tmp_path):
    config = served_config(tmp_path)
    write_plan(tmp_path / "plan.json", Plan(mesh=MeshPlan(data=2)))
    with pytest.raises(ConfigError, match="no data parallelism"):
        Engine(with_plan(config, tmp_path / "plan.json"))


def test_measuring_says_why_nothing_is_legal(tmp_path):
    config = served_config(tmp_path)
    nothing = [c for c in rank(tiny_llama.config(), "float32", TRAFFIC, CPU, 8) if c.refused]
    with pytest.raises(ConfigError, match="one server a replica"):
        measure(config, nothing, TRAFFIC)
