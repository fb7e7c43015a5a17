"""Which workloads of a step a token costs most in, on given traffic."""

from __future__ import annotations

import dataclasses

import pytest

from polyjax.core.chips import chip
from polyjax.core.op import Workload
from polyjax.core.ops import OPS
from polyjax.core.plan import Plan
from polyjax.engine.types import EngineConfig
from search.cost.analytical import floor_us
from search.plan_bench import SizedModel, sized_model
from search.step_costs import step_costs
from search.traffic import TrafficSpec
from tests import tiny_llama

H200 = chip("NVIDIA H200")
LAYERS = tiny_llama.HF_CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SizedModel:
    folder = tmp_path_factory.mktemp("model")
    found = sized_model(
        EngineConfig(
            model=str(tiny_llama.write_model(folder)),
            load_format="dummy",
            block_size=tiny_llama.PAGE_SIZE,
            max_model_len=128,
            max_num_seqs=4,
            num_kv_pages=32,
        )
    )
    return dataclasses.replace(found, base=Plan(ladder=tiny_llama.LADDER))


def traffic(rows: int, prefill_steps: int = 0) -> TrafficSpec:
    return TrafficSpec((8,), (16,), (rows,), 3, prefill_steps)


def test_costs_are_of_the_buckets_that_the_traffic_runs_in(model: SizedModel) -> None:
    alone, four = (step_costs(model, traffic(rows), H200) for rows in (1, 4))
    for found, rows in ((alone, 1), (four, 4)):
        assert all(
            f"M={rows}," in key or f"B={rows}," in key or f"M={rows}|" in key for key in found
        )
    assert {key.partition("[")[0] for key in alone} == {key.partition("[")[0] for key in four}


@pytest.mark.parametrize("rows", [1, 4])
def test_a_workload_counts_as_often_as_it_is_called_for_a_token(
    model: SizedModel, rows: int
) -> None:
    """Each layer has one, the step one head, and the rows of a step share it."""
    costs, known = step_costs(model, traffic(rows), H200), model.workloads()
    for start, calls in (
        (f"norm_gate_up[M={rows},", LAYERS),
        (f"lm_head_sample[M={rows},", 1),
    ):
        (key,) = (key for key in costs if key.startswith(start))
        assert costs[key] == pytest.approx(calls * us(known[key]) / rows)


def us(workload: Workload) -> float:
    return floor_us(OPS[workload.op], workload, H200)


def test_prompts_weigh_as_much_as_they_are_part_of_a_token(model: SizedModel) -> None:
    plain, mixed = step_costs(model, traffic(4), H200), step_costs(model, traffic(4, 2), H200)
    assert set(plain) < set(mixed)
    assert all(mixed[key] >= us for key, us in plain.items())
