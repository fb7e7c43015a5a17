"""Other weights over HTTP while streams run; what does not fit is refused with every reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_variants import other_numbers, read_tensors, truncate, write_variant
from tests.goldens import golden
from tests.server.golden_server import (
    ADMIN,
    MAX_TOKENS,
    PROMPTS,
    Streams,
    admin,
    answer,
    golden_server,
)
from tests.server.serving import Server, wait_for

BASE = golden("llama", "gqa")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with golden_server(BASE.path, tmp_path_factory.mktemp("plan")) as ready:
        yield ready


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_numbers(BASE.path, tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(autouse=True)
def nothing_is_compiled_while_serving(server: Server) -> Iterator[None]:
    yield
    assert server.metric("polyjax_compiles_after_ready_total") == 0
    assert server.metric("polyjax_retraces_after_ready_total") == 0


def load(server: Server, path: Path, running: str = "keep") -> dict[str, object]:
    told: dict[str, object] = admin(
        server, "/admin/weights", {"path": str(path), "running": running, "wait": True}
    )
    return told


def epoch(server: Server) -> int:
    told = server.http.get("/admin/plan", headers=ADMIN).json()
    return int(told["weights"]["epoch"])


def test_streams_cross_over_to_other_weights_and_back(server: Server, other: Path) -> None:
    before = [answer(server, prompt) for prompt in PROMPTS]
    first = epoch(server)
    streams = Streams(server)
    try:
        wait_for(lambda: streams.finished, "streams under the old weights")
        load(server, other)
        done = len(streams.finished)
        wait_for(lambda: len(streams.finished) >= done + 4, "streams under the new weights")
    finally:
        streams.stop()
    assert not streams.failed
    after = [answer(server, prompt) for prompt in PROMPTS]
    assert after != before
    old_name, new_name = f"epoch-{first}-bounded", f"epoch-{first + 1}-bounded"
    for index, stream in streams.finished:
        tokens = [token for token, _ in stream]
        names = [name for _, name in stream]
        old = names.count(old_name)
        assert names == [old_name] * old + [new_name] * (MAX_TOKENS - old)
        assert tokens[:old] == before[index][:old]
        if old < MAX_TOKENS:
            rest = answer(server, PROMPTS[index] + tokens[:old], MAX_TOKENS - old)
            assert tokens[old:] == rest
    assert {len({name for _, name in stream}) for _, stream in streams.finished} == {1, 2}

    [card] = server.http.get("/v1/models").json()["data"]
    assert card["root"] == str(other)
    told = server.http.get("/admin/weights", headers=ADMIN).json()
    assert [w["path"] for w in told["history"]][-2:] == [str(BASE.path), str(other)]
    assert server.metric("polyjax_weights_info", digest=card["weights_digest"]) == 1
    load(server, BASE.path)
    assert [answer(server, prompt) for prompt in PROMPTS] == before


def test_dropped_streams_are_told_why(server: Server, other: Path) -> None:
    streams = Streams(server)
    try:
        wait_for(lambda: server.metric("vllm:num_requests_running") > 0, "a stream to run")
        load(server, other, "drop")
        wait_for(lambda: streams.failed, "a stream to fail")
    finally:
        streams.stop()
    for error in streams.failed:
        assert error["code"] == 503 and "other weights" in error["message"]
    load(server, BASE.path)


def test_every_reason_of_a_refusal_is_told(server: Server, tmp_path: Path) -> None:
    tensors = read_tensors(BASE.path)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["model.norm.weight"] = np.ones(5, np.float32)
    wrong = write_variant(BASE.path, tmp_path / "wrong", tensors, num_hidden_layers=3)
    before = server.http.get("/admin/weights", headers=ADMIN).json()["current"]
    response = server.post("/admin/weights", {"path": str(wrong)}, headers=ADMIN)
    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("conflict_error", "path")
    for reason in ("num_layers: the engine runs 2", "self_attn.q_proj.weight is missing", "[5]"):
        assert reason in error["message"]
    cut = truncate(write_variant(BASE.path, tmp_path / "cut"), 0.4)
    response = server.post("/admin/weights", {"path": str(cut), "wait": True}, headers=ADMIN)
    assert response.status_code == 409 and "cut off" in response.json()["error"]["message"]
    told = server.http.get("/admin/weights", headers=ADMIN).json()
    assert told["current"] == before
    assert [load["state"] for load in told["loads"][-2:]] == ["refused", "refused"]
    assert answer(server, BASE.prompt(), len(BASE.continuation())) == BASE.continuation()


def test_without_waiting_progress_is_told(server: Server, other: Path) -> None:
    response = server.post("/admin/weights", {"path": str(other)}, headers=ADMIN)
    assert response.status_code in (200, 202)
    number = response.json()["load"]["number"]

    def is_current() -> bool:
        loads = server.http.get("/admin/weights", headers=ADMIN).json()["loads"]
        [found] = [load for load in loads if load["number"] == number]
        return bool(found["state"] == "current")

    wait_for(is_current, "the weights to be in force")
    load(server, BASE.path)


def test_keys_and_malformed_bodies(server: Server) -> None:
    assert server.post("/admin/weights", {"path": "x"}).status_code == 401
    for body, param in (
        ({}, "path"),
        ({"path": "x", "wait": 1}, "wait"),
        ({"path": "x", "running": "on"}, "running"),
    ):
        response = server.post("/admin/weights", body, headers=ADMIN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    response = server.post("/admin/weights", {"path": "/no/such/model"}, headers=ADMIN)
    assert response.status_code == 409 and "no such file" in response.json()["error"]["message"]
