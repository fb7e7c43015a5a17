"""`--tune=background` beside running streams: trials are recorded, better plans come into force."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.goldens import Golden, golden
from tests.server.golden_streams import ADMIN, LIMIT_S, Streams, child, plan
from tests.server.serving import Server, running, wait_for

# Contexts are one page, so that a better ladder has few rungs: each is compiled three times, by the
# tuner, for its first run and for the server.
PAGES, PAGE_TOKENS = 1, 128
FITTING = 4
# Decode steps compute so many sequences, where there are two at most: a gain that shows on a
# machine busy with other tests, too.
OVERSIZED = 256
TUNER = "polyjax.tuner"
PROMOTION_LIMIT_S = 1800.0


@pytest.fixture(scope="module")
def truth() -> Golden:
    return golden("llama", "gqa")


@contextmanager
def tuned(truth: Golden, folder: Path, sequences: int, *flags: str) -> Iterator[Server]:
    """A server with a tuner and one decode bucket of `sequences`; its files are in `folder`."""
    ladder = {
        "decode": [{"tokens": 1, "sequences": sequences, "pages": PAGES}],
        "prefill": [{"tokens": 32, "sequences": 1, "pages": PAGES}],
        "sampler_sequences": [1, sequences],
    }
    (folder / "plan.json").write_text(json.dumps({"ladder": ladder}))
    every = (
        *(f"--block_size={PAGE_TOKENS}", "--num_kv_pages=8", f"--max_num_seqs={sequences}"),
        *(f"--max_model_len={PAGES * PAGE_TOKENS}", f"--max_num_batched_tokens={OVERSIZED}"),
        *("--dtype=float32", "--admin_key=admin-secret", f"--plan={folder / 'plan.json'}"),
        *(f"--compile_cache_dir={folder / 'programs'}", f"--ledger={folder / 'ledger.sqlite'}"),
        *("--tune=background", "--tune_duty=60%", "--watch_steps=40", *flags),
    )
    with running(truth.path, every, ready_limit_s=LIMIT_S) as server:
        yield server


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    """What the ledger holds; nothing before there is one."""
    path = folder / "ledger.sqlite"
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=30)) as ledger:
        tables = ledger.execute("SELECT name FROM sqlite_master WHERE name = 'promotions'")
        return ledger.execute(query).fetchall() if tables.fetchall() else []


def trials(folder: Path) -> list[tuple[Any, ...]]:
    return rows(folder, "SELECT id, key, status FROM trials ORDER BY id")


def tuner_of(server: Server) -> psutil.Process:
    wait_for(lambda: child(server, TUNER) is not None, "the tuner", LIMIT_S)
    found = child(server, TUNER)
    assert found is not None
    return found


def measurer_of(server: Server) -> psutil.Process | None:
    return next((c for c in server.children() if "measurer" in c.cmdline()), None)


def killed(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)


def kill_tuner_then_measurer(server: Server) -> psutil.Process:
    """Returns the second tuner, which lives on."""
    tuner, measurer = tuner_of(server), measurer_of(server)
    assert measurer is not None
    killed(tuner)
    wait_for(lambda: not measurer.is_running(), "the tuner's children to end with it")
    wait_for(lambda: measurer_of(server) is not None, "another measuring process", LIMIT_S)
    again, other = tuner_of(server), measurer_of(server)
    assert again.pid != tuner.pid and other is not None
    killed(other)
    return again


def test_a_trial_is_recorded_in_leases_and_kills_harm_nobody(truth: Golden, tmp_path: Path) -> None:
    with tuned(truth, tmp_path, FITTING) as server, Streams(server, truth) as streams:
        wait_for(lambda: len(trials(tmp_path)) >= 1, "a trial", LIMIT_S)
        [(_, _, status), *_] = before = trials(tmp_path)
        assert status == "passed"
        tuner, done = kill_tuner_then_measurer(server), streams.finished
        wait_for(lambda: streams.finished > done + 2, "streams after the kills", LIMIT_S)
        assert trials(tmp_path)[: len(before)] == before
        assert tuner.is_running()
        stats = server.http.get("/admin/stats", headers=ADMIN).json()["stats"]
        assert stats["tune"]["granted"] > 0
        assert stats["compiles_after_ready"] == stats["retraces_after_ready"] == 0


@pytest.mark.slow
def test_trials_go_on_after_kills_and_none_is_measured_twice(truth: Golden, tmp_path: Path) -> None:
    with tuned(truth, tmp_path, FITTING) as server, Streams(server, truth):
        wait_for(lambda: len(trials(tmp_path)) >= 2, "trials", PROMOTION_LIMIT_S)
        before = trials(tmp_path)
        kill_tuner_then_measurer(server)
        wait_for(lambda: len(trials(tmp_path)) > len(before), "another", PROMOTION_LIMIT_S)
        after = trials(tmp_path)
        assert after[: len(before)] == before
        assert len({key for _, key, _ in after}) == len(after)


@pytest.mark.slow
def test_a_better_plan_comes_into_force(truth: Golden, tmp_path: Path) -> None:
    with tuned(truth, tmp_path, OVERSIZED, f"--state_dir={tmp_path / 'state'}") as server:
        first = plan(server)
        with Streams(server, truth) as streams:
            wait_for(lambda: plan(server)["epoch"] > 0, "a promotion", PROMOTION_LIMIT_S)
            done = streams.finished
            wait_for(lambda: streams.finished > done + 2, "streams under the new plan", LIMIT_S)
            wait_for(
                lambda: rows(tmp_path, "SELECT trial FROM promotions WHERE promoted = 1"),
                "the decision in the ledger",
                LIMIT_S,
            )
        told = server.http.get("/admin/plan", headers=ADMIN).json()
        assert told["digest"] != first["digest"]
        assert told["installation"]["agent"] == "background"
        assert "after trial" in told["installation"]["lineage"]
        promoted = rows(tmp_path, "SELECT trial, evidence FROM promotions WHERE promoted = 1")
        evidence = json.loads(promoted[0][1])
        assert evidence["server"]["accepted"], evidence
        assert server.metric("polyjax_compiles_after_ready_total") == 0
