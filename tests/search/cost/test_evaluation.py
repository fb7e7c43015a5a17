"""Evaluation on tables: figures are right, workloads are really left out, replays repeat."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from polyjax.core.errors import ConfigError
from search.agents import AGENTS
from search.cost import Prediction
from search.cost.evaluation import leave_one_out, quality, spearman, taught, usable
from search.cost.learned import CostModel
from search.table_search import fraction_measured, landscapes, make_agent, replay
from search.tables import Table, TableRow, path_of, write
from tests.search.cost.synthetic import H200, STREAM, matmul, microseconds, points_of, workloads

ROOT = Path(__file__).resolve().parents[3]


def table(workload, points=40, failed=0):
    rows = [
        TableRow(STREAM.name, p, "passed", (microseconds(workload, p),) * 3)
        for p in points_of(workload, points)
    ]
    rows[:failed] = [TableRow(r.kernel, r.schedule, "compile_error") for r in rows[:failed]]
    return Table(workload, "synthetic", {}, tuple(rows))


@pytest.fixture(scope="module")
def tables():
    return [table(workload) for workload in workloads()[:4]]


def test_rank_correlation_is_scipys_ties_included():
    rng = np.random.default_rng(0)
    for _ in range(5):
        a, b = rng.integers(0, 6, 30).astype(float), rng.random(30)
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert spearman(np.ones(4), np.arange(4.0)) == 0.0


def test_regret_and_coverage_of_a_prediction():
    us = np.array([10.0, 11.0, 20.0, 30.0])
    guess = Prediction(
        np.array([12.0, 10.0, 21.0, 29.0]),
        np.array([9.0, 9.0, 20.5, 25.0]),
        np.array([13.0, 12.0, 22.0, 35.0]),
        np.ones(4, bool),
    )
    found = quality(guess, us)
    assert found.top1_regret == pytest.approx(0.1) and found.coverage == 0.75
    assert found.spearman == pytest.approx(0.8)
    assert found.coverage_error == pytest.approx(0.15)


def test_a_workload_is_scored_by_what_the_others_taught(tables, monkeypatch):
    seen = []
    learn = CostModel.learn

    def spy(self, kernel, workload, *args, **kwargs):
        seen.append((self, workload.key))  # kept, so that none takes its place
        return learn(self, kernel, workload, *args, **kwargs)

    monkeypatch.setattr(CostModel, "learn", spy)
    scores = leave_one_out(tables, H200)
    assert [s.workload for s in scores] == [t.workload for t in tables]
    models = list(dict.fromkeys(model for model, _ in seen))
    for model, score in zip(models, scores, strict=True):
        taught_by = {key for owner, key in seen if owner == model}
        assert taught_by == {t.workload.key for t in tables} - {score.workload.key}
    assert np.median([s.learned.spearman for s in scores]) > 0.8
    assert all(s.rows == 40 for s in scores)


def test_too_little_is_left_out_and_said(tables):
    said = []
    few = table(matmul(32, 2048, 2048), points=40, failed=20)
    assert list(usable([*tables, few], said.append)) == ["matmul"]
    assert "20 measured schedules" in said[0]
    assert usable(tables[:2], said.append) == {} and "2 workloads" in said[-1]


def test_a_replay_is_the_same_every_time_and_counts_failures_as_measured(tables):
    (landscape,) = landscapes(table(tables[0].workload, failed=5))
    assert len(landscape.us) == 40
    prior = lambda kernel, points: None  # noqa: E731
    first, second = (replay(landscape, ["model_led", "local"], 3, prior) for _ in range(2))
    assert first.fractions == second.fractions
    assert set(first.fractions) == {"random", "model_led", "local"}
    assert all(0 < f <= 1 for fractions in first.fractions.values() for f in fractions)
    worst = max(us for us in landscape.us.values() if us is not None)
    assert landscape.target_us < worst


def test_agents_with_what_other_tables_taught_measure_less_than_random(tables):
    model = taught(tables[1:], H200)
    (landscape,) = landscapes(tables[0])
    prior = model.prior(STREAM, tables[0].workload, landscape.space.points)
    found = replay(landscape, ["model_led"], 8, lambda *_: prior)
    assert found.median("model_led") < found.median("random")


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_every_agent_finds_the_best_of_a_table(tables, name):
    (landscape,) = landscapes(tables[1])
    assert fraction_measured(make_agent(name, landscape.space, 0, None), landscape) <= 1.0


def test_unknown_agents_are_named(tables):
    (landscape,) = landscapes(tables[0])
    with pytest.raises(ConfigError, match="unknown agent 'best'"):
        make_agent("best", landscape.space, 0, None)


def test_optuna_asks_for_every_point_of_a_table_once(tables):
    (landscape,) = landscapes(tables[0])
    agent, asked = make_agent("tpe", landscape.space, 3, None), []
    while (point := agent.ask()) is not None:
        asked.append(point)
        agent.tell(point, None if len(asked) % 5 == 0 else landscape.us[point])
    assert sorted(asked) == sorted(landscape.space.points)


def test_optuna_is_asked_for_only_where_it_is_used(tables, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    (landscape,) = landscapes(tables[0])
    with pytest.raises(ConfigError, match="pip install"):
        make_agent("tpe", landscape.space, 0, None)


def run_script(name, *flags):
    command = [sys.executable, str(ROOT / "scripts" / name), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_without_tables_no_metric_is_published(tmp_path):
    flags = (f"--tables={tmp_path}", f"--output={tmp_path / 'out'}")
    for name in ("eval_cost_model", "eval_search"):
        done = run_script(name, *flags)
        assert done.returncode == 0, done.stderr
        assert "no metric" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_search_script_replays_tables_and_writes_its_metric(tables, tmp_path):
    for one in tables[:2]:
        named = Table(one.workload, "NVIDIA H200", {}, one.rows)
        write(path_of(tmp_path, named.device, named.workload), named)
    flags = ("--agents=local", "--agent=local", "--seeds=3", "--prior=analytical")
    done = run_script("eval_search", f"--tables={tmp_path}", f"--output={tmp_path}", *flags)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "search.jsonl").exists()
    assert written == ("no metric" not in done.stdout)
    assert "random" in done.stdout and "2 tables" in done.stdout
