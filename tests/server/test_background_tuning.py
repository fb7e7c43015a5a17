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
from tests.server.serving import Server, running, wait_for
from tests.server.test_kernel_files import ADMIN, LIMIT_S, Streams, child, plan

PAGES, PAGE_TOKENS, MAX_NUM_SEQS = 28, 4, 64
# Every decode step computes 64 sequences of the longest context, and there are never more than two.
OVERSIZED = {
    "decode": [{"tokens": 1, "sequences": MAX_NUM_SEQS, "pages": PAGES}],
    "prefill": [{"tokens": 32, "sequences": 1, "pages": PAGES}],
    "sampler_sequences": [1, MAX_NUM_SEQS],
}
TUNER = "polyjax.tuner"
PROMOTION_LIMIT_S = 900.0


@pytest.fixture(scope="module")
def truth() -> Golden:
    return golden("llama", "gqa")


@contextmanager
def tuned(truth: Golden, folder: Path, *flags: str) -> Iterator[Server]:
    """A server with a tuner and an oversized ladder; its files are in `folder`."""
    (folder / "plan.json").write_text(json.dumps({"ladder": OVERSIZED}))
    every = (
        *(f"--block_size={PAGE_TOKENS}", "--num_kv_pages=128", f"--max_num_seqs={MAX_NUM_SEQS}"),
        *(f"--max_model_len={PAGES * PAGE_TOKENS}", "--max_num_batched_tokens=64"),
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


def test_trials_are_recorded_and_kills_cost_the_one_in_flight(
    truth: Golden, tmp_path: Path
) -> None:
    with tuned(truth, tmp_path) as server, Streams(server, truth):
        engine = server.child("polyjax.engine.process")
        wait_for(lambda: len(trials(tmp_path)) >= 1, "a trial", LIMIT_S)
        before, tuner = trials(tmp_path), tuner_of(server)
        measurer = measurer_of(server)
        assert measurer is not None
        killed(tuner)
        wait_for(lambda: not measurer.is_running(), "the tuner's children to end with it")
        again = tuner_of(server)
        assert again.pid != tuner.pid
        wait_for(lambda: measurer_of(server) is not None, "the measuring process", LIMIT_S)
        other = measurer_of(server)
        assert other is not None
        killed(other)
        wait_for(lambda: len(trials(tmp_path)) > len(before), "another trial", LIMIT_S)
        after = trials(tmp_path)
        assert after[: len(before)] == before  # nothing lost, nothing measured again
        assert len({key for _, key, _ in after}) == len(after)
        assert again.is_running() and engine.is_running()
        stats = server.http.get("/admin/stats", headers=ADMIN).json()["stats"]
        assert stats["tune"]["granted"] > 0  # what was timed was timed in leases
        assert stats["compiles_after_ready"] == stats["retraces_after_ready"] == 0
    assert "kernel" not in server.log or "Traceback" not in server.log


@pytest.mark.slow
def test_a_better_plan_comes_into_force(truth: Golden, tmp_path: Path) -> None:
    with tuned(truth, tmp_path, f"--state_dir={tmp_path / 'state'}") as server:
        first = plan(server)
        with Streams(server, truth) as streams:
            wait_for(lambda: plan(server)["epoch"] > 0, "a promotion", PROMOTION_LIMIT_S)
            done = streams.finished
            wait_for(lambda: streams.finished > done + 2, "streams under the new plan", LIMIT_S)
            promoted = rows(tmp_path, "SELECT trial, evidence FROM promotions WHERE promoted = 1")
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
