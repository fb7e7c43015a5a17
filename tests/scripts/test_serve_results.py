"""What scripts/bench_serve makes of its runs: pairs, worst ratios, names, time by phase."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> tuple[ModuleType, ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    request.addfinalizer(lambda: sys.path.remove(str(SCRIPTS)))
    return importlib.import_module("_serve_points"), importlib.import_module("_serve_results")


def run(points: ModuleType, arm: str, concurrency: int, repeat: int, rate: float, ttft: float):
    names = ("events_per_token", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "e2e_p50_ms")
    figures = dict.fromkeys(names, 1.0)
    figures |= {"output_tokens_per_s": rate, "ttft_p50_ms": ttft}
    return points.Run(arm, concurrency, repeat, figures, {})


def test_ratios_are_of_paired_runs_and_the_worst_point_counts(made) -> None:
    points, results = made
    # The machine is three times slower in the second repetition: a pair does not show it.
    slow = (1.0, 1 / 3, 1.0)
    runs = [run(points, "polyjax", 1, i, 300 * slow[i], 4.0) for i in range(3)]
    runs += [run(points, "vllm", 1, i, 100 * slow[i], 8.0) for i in range(3)]
    runs += [run(points, "polyjax", 64, i, 1000, 6.0) for i in range(3)]
    runs += [run(points, "vllm", 64, i, 800, 5.0) for i in range(3)]
    found, missing = results.results(results.Points(runs), "1b", "chip", "note")
    by_name = {result.metric: result for result in found}
    assert not missing
    assert by_name["serve_1b_c1_vs_vllm"].value == pytest.approx(3.0)
    assert by_name["serve_1b_c1_vs_vllm"].goal == 2.2
    assert by_name["serve_1b_c64_vs_vllm"].value == pytest.approx(1.25)
    first_token = by_name["serve_1b_c64_ttft_vs_vllm"]
    assert first_token.value == pytest.approx(1.2)
    assert (first_token.better, first_token.goal) == ("lower", 0.5)
    worst = by_name["serve_1b_vs_vllm"]
    assert worst.value == pytest.approx(1.25) and worst.note.startswith("worst: c64;")
    assert by_name["serve_1b_c1_vllm_output_tokens_per_s"].samples == pytest.approx(
        (100, 100 / 3, 100)
    )


def test_every_pair_of_arms_has_its_names(made) -> None:
    points, results = made
    runs = [
        run(points, arm, 64, i, rate, 1.0)
        for arm, rate in (("tuned", 120), ("default", 100), ("plain_jit", 80))
        for i in range(3)
    ]
    found, _ = results.results(results.Points(runs), "8b", "chip", "")
    by_name = {result.metric: result for result in found}
    assert by_name["serve_8b_c64_tuned_vs_default"].goal == 1.08
    assert by_name["serve_8b_default_vs_plain_jit"].value == pytest.approx(1.25)
    assert by_name["serve_8b_default_vs_plain_jit"].goal == 1.0
    assert set(results.GOALS) - set(by_name) == {
        *(f"serve_1b_c{count}_vs_vllm" for count in (1, 16, 64, 256)),
        "serve_1b_c64_ttft_vs_vllm",
        "serve_8b_c1_tuned_vs_default",
    }


def test_points_with_too_few_runs_make_no_results(made) -> None:
    points, results = made
    runs = [run(points, arm, 1, i, 100, 1.0) for arm in ("polyjax", "vllm") for i in range(3)]
    runs += [run(points, "polyjax", 256, 0, 100, 1.0)]
    found, missing = results.results(results.Points(runs), "1b", "chip", "")
    names = {result.metric for result in found}
    assert "serve_1b_c1_vs_vllm" in names
    assert not any("c256" in name for name in names)
    assert "serve_1b_vs_vllm" not in names  # the worst is not known
    assert missing == ["polyjax at concurrency 256: 1 runs", "vllm at concurrency 256: 0 runs"]
    assert "256" in results.table(results.Points(runs))


def test_time_is_read_off_metrics(made) -> None:
    points, _ = made
    text = """# HELP polyjax_phase_us Time
polyjax_phase_us{engine="0",model_name="m",phase="pack"} 100.0
polyjax_phase_seconds_total{engine="0",model_name="m",phase="pack"} 1.5
polyjax_phase_seconds_total{engine="0",model_name="m",phase="readback"} 2.5
polyjax_http_phase_seconds_total{engine="0",model_name="m",phase="tokenise"} 0.25
polyjax_http_phase_seconds_total{engine="0",model_name="m",phase="detokenise"} 0.5
polyjax_http_cpu_seconds_total{engine="0",model_name="m"} 2e0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
"""
    assert points.phases_of(text) == {
        "pack": 1.5,
        "device": 2.5,
        "tokenise": 0.25,
        "detokenise": 0.5,
        "http": 1.25,
    }


def test_starts_are_compared_from_weights_to_ready(made) -> None:
    starts = importlib.import_module("_serve_start")
    cold = [starts.Start(70.0, 71.0, 10.0, 60.0, "chip")]
    warm = [starts.Start(8.0, 8.0 + i, 5.0, 3.0, "chip") for i in range(3)]
    first, ratio = starts.start_results(cold, warm, "1b", "")
    assert (first.metric, first.value, first.goal) == ("start_1b_warm_s", 9.0, 10.0)
    assert (ratio.metric, ratio.value, ratio.goal) == ("start_1b_warm_vs_cold", 20.0, 10.0)
    assert starts.start_results(cold, warm[:2], "1b", "") == []
