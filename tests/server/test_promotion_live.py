"""A real engine behind the HTTP server: promotions over HTTP, and kill -9 in the middle of one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil

from tests.goldens import Golden, golden
from tests.server.serving import Server, running, start, stop, wait_for
from tests.server.test_families import READY_LIMIT_S

ADMIN = {"Authorization": "Bearer admin-secret"}


def flags(folder: Path) -> tuple[str, ...]:
    return (
        *("--block_size=4", "--num_kv_pages=96", "--max_model_len=112", "--max_num_seqs=3"),
        *("--max_num_batched_tokens=32", "--max_programs=2", "--dtype=float32"),
        *(f"--compile_cache_dir={folder / 'programs'}", f"--state_dir={folder / 'state'}"),
        *(f"--audit_log={folder / 'audit.jsonl'}", "--watch_steps=10", "--admin_key=admin-secret"),
    )


def ask(server: Server, path: str) -> dict[str, Any]:
    response = server.http.get(path, headers=ADMIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tell(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body, headers=ADMIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(server: Server, truth: Golden) -> str:
    """A golden answer; returns its fingerprint."""
    body = {
        "prompt": truth.prompt(0),
        "max_tokens": len(truth.continuation(0)),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["token_ids"] == truth.continuation(0)
    fingerprint: str = answer["system_fingerprint"]
    return fingerprint


def renamed(server: Server, name: str) -> dict[str, Any]:
    """The plan in force with a choice for an op that no program calls."""
    plan: dict[str, Any] = ask(server, "/admin/plan")["plan"]
    plan["choices"][f"nothing[N={name}]"] = {"kernel": "none", "schedule": {}}
    return plan


def test_a_killed_server_comes_back_on_the_last_good_plan(tmp_path: Path) -> None:
    truth = golden("llama", "gqa")
    server = start(truth.path, flags(tmp_path))
    try:
        wait_for(lambda: server.http.get("/ready").status_code == 200, "ready", READY_LIMIT_S)
        assert complete(server, truth) == "epoch-0-bounded"
        good = tell(server, "/admin/plan", {"plan": renamed(server, "1"), "lineage": "by hand"})
        wait_for(lambda: complete(server, truth) == "epoch-1-bounded", "the swap")

        def kinds() -> list[str]:
            return [event["kind"] for event in ask(server, "/admin/events?after=0")["events"]]

        def survived() -> bool:
            complete(server, truth)
            return "watch_ended" in kinds()

        wait_for(survived, "the watch to end")
        wait_for(lambda: (tmp_path / "state" / "last_good_plan.json").exists(), "it on disk")
        digest = ask(server, "/admin/plan")["digest"]
        assert digest == good["installation"]["digest"]
        proposal = {"plan": renamed(server, "2"), "lineage": "1 > 2", "agent": "tuner"}
        number = tell(server, "/admin/plan/proposals", proposal)["proposal_id"]
        wait_for(
            lambda: ask(server, f"/admin/plan/proposals/{number}")["stage"] == "shadow", "shadow"
        )
        complete(server, truth)  # some of it is shadowed
        children = server.children()
        server.process.send_signal(signal.SIGKILL)
        psutil.wait_procs(children, timeout=20)
        assert not any(child.is_running() for child in children)
        lines = (tmp_path / "audit.jsonl").read_text().splitlines()
        told = [json.loads(line)["kind"] for line in lines]
        assert told[:4] == ["promotion_started", "promotion_stage", "verdict", "promotion_stage"]
        assert "promotion_stage" in told[told.index("proposed") :]
    finally:
        stop(server)
    with running(truth.path, flags(tmp_path), ready_limit_s=READY_LIMIT_S) as again:
        assert ask(again, "/admin/plan")["digest"] == digest
        assert complete(again, truth) == "epoch-0-bounded"
        assert again.metric("polyjax_compiles_after_ready_total") == 0
        assert ask(again, "/admin/limits")["slots"] == 3
        limits = tell(again, "/admin/limits", {"max_num_seqs": 1, "tune_duty": 0.25})
        assert (limits["max_num_seqs"], limits["tune_duty"]) == (1, 0.25)
        assert ask(again, "/admin/ladder")["launches"]["decode_sequences"]
        lease = tell(again, "/admin/tune/lease", {"ms": 5, "agent": "tuner"})
        assert lease["granted"], lease
        assert tell(again, "/admin/tune/release", {"lease_id": lease["lease_id"]})
        missing = again.http.get("/admin/plan/proposals/7", headers=ADMIN)
        assert missing.status_code == 404
