"""Kernel files into a running server, over HTTP, under streams whose tokens are known."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine import kernel_texts as texts
from tests.goldens import Golden, golden
from tests.server.golden_streams import ADMIN, LIMIT_S, Streams, child, plan
from tests.server.serving import Server, running, wait_for
from tests.server.test_families import FLAGS, MAX_MODEL_LEN, PAGE_TOKENS, body

PAGES = MAX_MODEL_LEN // PAGE_TOKENS
LADDER = {
    "decode": [{"tokens": 1, "sequences": 3, "pages": PAGES}],
    "prefill": [{"tokens": 32, "sequences": 1, "pages": PAGES}],
    "sampler_sequences": [1, 3],
}
TRIAL, COMPILER = "polyjax.gates.file_trial", "polyjax.compiler.worker"


@pytest.fixture(scope="module")
def truth() -> Golden:
    return golden("llama", "gqa")


@pytest.fixture(scope="module")
def server(truth: Golden, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "plan.json").write_text(json.dumps({"ladder": LADDER}))
    flags = (
        *(*FLAGS, "--admin_key=admin-secret", f"--compile_cache_dir={folder / 'programs'}"),
        f"--plan={folder / 'plan.json'}",
    )
    with running(truth.path, flags, ready_limit_s=LIMIT_S) as ready:
        yield ready


def post(server: Server, path: Path | str, **fields: Any) -> httpx.Response:
    return server.post("/admin/kernels", {"path": str(path), **fields}, headers=ADMIN)


def last(server: Server) -> dict[str, Any]:
    answer = server.http.get("/admin/kernels", headers=ADMIN).json()
    newest: dict[str, Any] = answer["kernels"][-1]
    return newest


def settled(server: Server) -> dict[str, Any]:
    wait_for(lambda: last(server)["state"] in ("current", "refused"), "the kernel file", LIMIT_S)
    return last(server)


def test_a_kernel_file_is_installed_under_running_streams(
    server: Server, truth: Golden, tmp_path: Path
) -> None:
    path = tmp_path / "norm.py"
    path.write_text(texts.HEAD + texts.MARK.format(folder=str(tmp_path)) + texts.RIGHT)
    with Streams(server, truth) as streams:
        answer = post(server, path, op="rms_norm")
        assert answer.status_code == 200, answer.text
        path.write_text("raise RuntimeError('changed after it was taken')")
        again = post(server, path)
        assert again.status_code == 409 and "on its way" in again.text
        file = settled(server)
        assert file["state"] == "current", (file, server.log)
        done = streams.finished
        wait_for(lambda: streams.finished > done + 2, "streams under the new plan", LIMIT_S)
    assert len(streams.fingerprints) == 2
    described = plan(server)
    assert described["digest"] == file["plan"]
    [name] = described["plan"]["sources"]
    assert name == file["kernel"] == f"file:{file['sha256'][:12]}/norm"
    chosen = {key for key, c in described["plan"]["choices"].items() if c["kernel"] == name}
    assert chosen == set(file["workloads"]) and all(k.startswith("rms_norm[") for k in chosen)
    importers = {int(line) for line in (tmp_path / "imported_by").read_text().split()}
    compiler = child(server, COMPILER)
    serving = {server.process.pid, server.child("polyjax.engine.process").pid}
    assert importers and compiler is not None and compiler.pid in importers
    assert not importers & serving
    assert server.metric("polyjax_compiles_after_ready_total") == 0
    assert server.metric("polyjax_retraces_after_ready_total") == 0
    already = server.post(
        "/admin/kernels", {"path": described["plan"]["sources"][name]["path"], "name": "norm"},
        headers=ADMIN,
    )  # fmt: skip
    assert already.status_code == 409 and "already" in already.text


@pytest.mark.slow
def test_a_wrong_kernel_is_refused_and_nothing_is_lost(
    server: Server, truth: Golden, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.py"
    before = plan(server)
    with Streams(server, truth):
        for text, limit_s, reason in (
            (texts.WRONG_PAGE, 200, "op_equivalence: paged_attention["),
            (texts.HEAD + texts.HUGE_COMPILE, 8, "did not finish within 8 s"),
        ):
            path.write_text(text)
            assert post(server, path, timeout_s=limit_s).status_code == 200
            file = settled(server)
            assert file["state"] == "refused" and reason in file["reason"]
    assert (plan(server)["digest"], plan(server)["epoch"]) == (before["digest"], before["epoch"])
    events = server.log
    assert "kernel_refused" in events and "kernel_received" in events


@pytest.mark.slow
def test_killed_processes_cost_the_file_in_work_and_nothing_else(
    server: Server, truth: Golden, tmp_path: Path
) -> None:
    path = tmp_path / "norm.py"
    path.write_text(texts.HEAD + texts.PALLAS)
    before = plan(server)
    with Streams(server, truth):
        assert post(server, path).status_code == 200
        os.kill(post_pid(server, TRIAL), signal.SIGKILL)
        assert "the process ended with code -9" in settled(server)["reason"]
        assert post(server, path).status_code == 200
        wait_for(lambda: last(server)["state"] == "installing", "the compiler", LIMIT_S)
        os.kill(post_pid(server, COMPILER), signal.SIGKILL)
        assert "compiler process ended with code -9" in settled(server)["reason"]
        assert plan(server)["digest"] == before["digest"]
        assert post(server, path).status_code == 200
        file = settled(server)
    assert file["state"] == "current", (file, server.log)


def post_pid(server: Server, module: str) -> int:
    wait_for(lambda: child(server, module) is not None, module, LIMIT_S)
    found = child(server, module)
    assert found is not None
    return found.pid


@pytest.mark.slow
def test_a_plan_file_with_a_kernel_file_is_served(
    server: Server, truth: Golden, tmp_path: Path
) -> None:
    path = tmp_path / "norm.py"
    path.write_text(texts.HEAD + texts.MARK.format(folder=str(tmp_path)) + texts.RIGHT)
    assert post(server, path, name="again").status_code == 200
    file = settled(server)
    assert file["state"] == "current", file
    (tmp_path / "plan.json").write_text(json.dumps({**plan(server)["plan"], "ladder": LADDER}))
    (tmp_path / "imported_by").unlink()
    flags = (f"--plan={tmp_path / 'plan.json'}", f"--compile_cache_dir={tmp_path / 'programs'}")
    with running(truth.path, (*FLAGS, *flags), ready_limit_s=LIMIT_S) as other:
        tokens = other.post("/v1/completions", body(truth, [0])).json()["choices"][0]["token_ids"]
        assert tokens == truth.continuation(0)
        importers = {int(line) for line in (tmp_path / "imported_by").read_text().split()}
        engine = other.child("polyjax.engine.process").pid
        assert importers and not importers & {other.process.pid, engine}


def test_requests_that_name_no_kernel_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(texts.HEAD + texts.RIGHT)
    os.mkfifo(tmp_path / "pipe")
    for fields, param in (
        ({}, "path"),
        ({"path": 3}, "path"),
        ({"path": str(tmp_path / "missing.py")}, "path"),
        ({"path": str(tmp_path / "pipe")}, "path"),
        ({"path": str(tmp_path)}, "path"),
        ({"path": str(path), "op": "rms"}, "op"),
        ({"path": str(path), "name": "a/b"}, "name"),
        ({"path": str(path), "timeout_s": 0}, "timeout_s"),
        ({"path": str(path), "promotion": "soon"}, "promotion"),
        ({"path": str(path), "colour": "red"}, None),
    ):
        answer = server.post("/admin/kernels", fields, headers=ADMIN)
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"] == param
    assert server.post("/admin/kernels", {"path": str(path)}).status_code == 401
