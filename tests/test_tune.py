"""The tuning command: what is kept when it is killed, interrupted, resumed or told wrong things."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyjax.core.buckets import Bucket, BucketLadder
from polyjax.core.errors import ConfigError
from polyjax.core.plan import Plan
from polyjax.engine.types import EngineConfig
from polyjax.tune import TuneConfig, read_edits, read_traffic, run_config
from polyjax.tune_progress import describe, seconds
from search.best import best_plan
from search.ledger import Ledger, Trial
from search.tuner import Best, Progress
from tests import tiny_llama

ROOT = Path(__file__).resolve().parent.parent
# One prefill and one decode bucket, both far larger than what the traffic needs.
OVERSIZED = BucketLadder((Bucket(1, 16, 64),), (Bucket(512, 1, 64),), (1, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tune")
    config = tiny_llama.HF_CONFIG | {"max_position_embeddings": 512, "num_hidden_layers": 1}
    (made / "model").mkdir()
    (made / "model" / "config.json").write_text(json.dumps(config))
    tiny_llama.write_plan(made / "plan.json", ladder=dataclasses.asdict(OVERSIZED))
    return made


def command(folder, ledger, *more):
    return [
        *(sys.executable, "-P", "-m", "polyjax.tune"),
        f"--model={folder / 'model'}",
        "--load_format=dummy",
        *("--block_size=8", "--max_num_seqs=16", "--max_num_batched_tokens=512"),
        "--num_kv_pages=64",
        f"--plan={folder / 'plan.json'}",
        f"--compile_cache_dir={folder / 'programs'}",
        f"--ledger={ledger}",
        *("--isl=12", "--osl=4", "--concurrency=1", "--budget=30m"),
        *("--sample_ms=1", "--noise_pairs=10", "--max_pairs=20", "--agent=random"),
        *more,
    ]


def start(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command(*arguments), env=environment, stderr=subprocess.PIPE, text=True)


def finish(child):
    _, said = child.communicate(timeout=900)
    return child.returncode, said


def trials_of(ledger):
    return list(Ledger(ledger, None).trials()) if ledger.exists() else []


def wait_for_trials(ledger, count, child):
    deadline_s = time.monotonic() + 900
    while len(trials_of(ledger)) < count:
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def resumed(folder):
    """A run killed halfway and a second one that goes on; the trials of each."""
    ledger = folder / "ledger.sqlite"
    first = start(folder, ledger, "--resume")
    try:
        wait_for_trials(ledger, 2, first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    before = trials_of(ledger)
    code, said = finish(start(folder, ledger, "--resume", "--max_trials=3"))
    assert code == 0, said
    return ledger, before, trials_of(ledger), said


def test_a_killed_run_goes_on_without_a_trial_lost_or_repeated(resumed):
    _, before, after, _ = resumed
    assert len(before) >= 2
    assert [trial.key for trial in after[: len(before)]] == [trial.key for trial in before]
    assert len({trial.key for trial in after}) == len(after) == len(before) + 3
    assert [trial.agent for trial in after].count("baseline") == 1


def test_a_plan_without_the_oversized_bucket_is_promoted_with_its_evidence(resumed):
    path, _, after, said = resumed
    ledger = Ledger(path, None)
    made = [decision for decision in ledger.promotions() if decision.promoted]
    assert made, [(t.status, t.reason, t.candidate["point"]) for t in after]
    winner = ledger.get(made[-1].trial)
    assert any(edit["kind"] == "ladder" for edit in winner.candidate["edits"])
    assert winner.status == "passed"
    assert winner.verdicts["equivalence"]["passed"]
    assert winner.verdicts["all gates"]["equivalence"]["programs"] > 0
    for arm in made[-1].evidence["arms"].values():
        assert len(arm["candidate_us"]) == len(arm["incumbent_us"]) >= 10
    assert "times as fast" in said


def test_the_best_plan_is_a_file_that_a_server_starts_with_and_the_ledger_agrees(resumed):
    path, _, _, _ = resumed
    written = Plan.from_json(json.loads(Path(f"{path}.plan.json").read_text()))
    found = best_plan(Ledger(path, None), str(path.parent / "model"))
    assert written == Plan.from_json(found.plan)
    assert written.ladder is not None and set(OVERSIZED.prefill) <= set(written.ladder.prefill)
    assert best_plan(Ledger(path, None), "another model") is None


def test_decisions_are_replayed_from_the_ledger(resumed):
    path, _, _, _ = resumed
    arguments = [sys.executable, "-P", "-m", "polyjax.tune", "replay", f"--ledger={path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "promoted" in done.stdout and "DIFFERS" not in done.stdout


def test_a_known_search_needs_resume_and_an_interrupted_one_leaves_its_best_plan(resumed, folder):
    path, _, after, _ = resumed
    code, said = finish(start(folder, path))
    assert code == 1 and "--resume" in said
    output = folder / "interrupted.json"
    child = start(folder, path, "--resume", f"--output_plan={output}")
    wait_for_trials(path, len(after) + 1, child)
    child.send_signal(signal.SIGINT)
    code, said = finish(child)
    assert code == 130, said
    assert "interrupted" in said
    kept = Plan.from_json(json.loads(output.read_text()))
    assert kept == Plan.from_json(best_plan(Ledger(path, None), str(folder / "model")).plan)


def test_illegal_edits_end_it_before_anything_is_compiled(folder, tmp_path):
    edits = [{"kind": "ladder", "target": "decode", "value": {"remove": [[1, 99, 64]]}}]
    (tmp_path / "edits.json").write_text(json.dumps(edits))
    ledger = tmp_path / "ledger.sqlite"
    programs = len(list((folder / "programs").glob("*")))
    code, said = finish(start(folder, ledger, f"--edits={tmp_path / 'edits.json'}"))
    assert code == 1 and "the ladder has no" in said and "Traceback" not in said
    assert trials_of(ledger) == []
    assert len(list((folder / "programs").glob("*"))) == programs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": "soon"}, "--budget=soon"),
        ({"target": "speed"}, "--target=speed"),
        ({"agent": "oracle"}, "--agent=oracle"),
        ({"max_pairs": 3}, "--max_pairs"),
        ({"ledger": None}, "--ledger"),
        ({"sample_ms": 0.0}, "--sample_ms"),
        ({"isl": 0}, "prompt_tokens"),
        ({"concurrency": ("two",)}, "--concurrency"),
        ({"traffic": "nowhere.json"}, "nowhere.json"),
        ({"edits": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_a_wrong_flag_is_named(changes, reason):
    config = dataclasses.replace(TuneConfig(ledger="tune.sqlite"), **changes)
    with pytest.raises(ConfigError, match=reason):
        run_config(config, EngineConfig())
        read_traffic(config)
        read_edits(config.edits)


def test_a_budget_is_read_in_the_usual_units():
    assert [seconds(t) for t in ("90s", "30m", "2h", "1h30m", "45")] == [90, 1800, 7200, 5400, 45]
    for text in ("", "m", "5x", "-3m", "0s"):
        with pytest.raises(ConfigError):
            seconds(text)


def test_the_line_of_progress_says_rate_best_gain_and_time_left():
    trial = Trial("k", "plan", {}, "random", "slow")
    progress = Progress(12, 10, 100.0, Best((), 80.0, 3), trial)
    line = describe("plan", progress, 10, 60.0, 600.0, 0)
    assert line == "plan: 10 trials, 10.0/min, best 80 us (1.25x), last slow, 540 s left"
    assert describe("plan", progress, 10, 60.0, 600.0, 20).endswith(" 60 s left")
