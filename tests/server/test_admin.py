"""Keys and the admin routes."""

import json
from pathlib import Path

import httpx
import pytest

from tests.server.serving import Server, running, wait_for

ADMIN = {"Authorization": "Bearer admin-secret"}


def test_admin_wants_its_key(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "admin-secret"}):
        response = server.http.get("/admin/plan", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert server.http.get("/admin/plan", headers=ADMIN).json()["digest"] == "default"


def test_install_and_roll_back(server: Server) -> None:
    def post(path: str, **body: str) -> httpx.Response:
        return server.post(path, body, headers=ADMIN)

    refusal = post("/admin/plan/rollback")
    assert refusal.status_code == 409
    assert "no earlier plan" in refusal.json()["error"]["message"]
    assert post("/admin/plan", digest="other").json()["digest"] == "other"
    assert server.complete("a", max_tokens=1)["system_fingerprint"] == "epoch-1-bounded"
    wait_for(lambda: server.metric("polyjax_plan_epoch") == 1, "the heartbeat to tell")
    assert server.metric("polyjax_swaps_total") == 1
    assert server.metric("polyjax_plan_info", digest="other") == 1
    assert post("/admin/plan/rollback").json()["digest"] == "default"
    wait_for(lambda: server.metric("polyjax_rollbacks_total") == 1, "the heartbeat to tell")


def test_events_as_json_and_as_a_stream(server: Server) -> None:
    before = server.http.get("/admin/events", headers=ADMIN).json()["next"]
    for digest in ("a", "b"):
        assert server.post("/admin/plan", {"digest": digest}, headers=ADMIN).status_code == 200
    told = server.http.get(f"/admin/events?after={before}", headers=ADMIN).json()
    assert [event["plan"] for event in told["events"]] == ["a", "b"]
    assert told["next"] == before + 2
    headers = {**ADMIN, "Accept": "text/event-stream"}
    url = f"/admin/events?after={before}"
    with server.http.stream("GET", url, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        first = [next(lines) for _ in range(8)]
        assert first[:2] == [f"id: {before + 1}", "event: swap"]
        assert json.loads(first[2].removeprefix("data: "))["plan"] == "a"
        # It goes on with what happens while it is open.
        with server.new_client() as other:
            path = "/admin/plan/rollback"
            assert other.post(path, json={}, headers=ADMIN).status_code == 200
        assert [next(lines) for _ in range(2)] == [f"id: {before + 3}", "event: rollback"]
    assert server.post("/admin/plan/rollback", {}, headers=ADMIN).status_code == 200
    for query in ("after=x", "after=-1", "since=3"):
        answer = server.http.get(f"/admin/events?{query}", headers=ADMIN)
        assert answer.status_code == 400, query


def test_bad_admin_bodies(server: Server) -> None:
    for raw in (b"{", b"[]", b"\xff", b"[" * 100_000):
        response = server.http.post("/admin/plan", content=raw, headers=ADMIN)
        assert response.status_code == 400
    response = server.post("/admin/plan", {"digest": 7}, headers=ADMIN)
    assert response.json()["error"]["param"] == "digest"


def test_statistics(server: Server) -> None:
    answer = server.http.get("/admin/stats", headers=ADMIN).json()
    assert answer["info"]["device"] == "scripted"
    assert answer["stats"]["running"] == 0
    assert answer["heartbeat_age_s"] < 5


@pytest.fixture(scope="module")
def guarded(model_dir: Path) -> Server:  # type: ignore[misc]  # a generator
    flags = ("--api_key=one,two", "--allowed_origins=https://app.example", "--max-body-bytes=2048")
    with running(model_dir, flags, {}) as ready:
        yield ready


def test_api_keys(guarded: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for path in ("/v1/completions", "/tokenize"):
        assert guarded.post(path, body).status_code == 401
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert guarded.post("/v1/completions", body, headers=headers).status_code == 200
    assert guarded.http.get("/health").status_code == 200
    assert guarded.http.get("/metrics").status_code == 200


def test_admin_routes_are_off_without_a_key(guarded: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer one"}):
        assert guarded.http.get("/admin/plan", headers=headers).status_code == 404


def test_allowed_origins(guarded: Server) -> None:
    mine = guarded.http.get("/health", headers={"Origin": "https://app.example"})
    assert mine.headers["access-control-allow-origin"] == "https://app.example"
    other = guarded.http.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    preflight = guarded.http.options(
        "/v1/completions",
        headers={
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200


def test_the_limit_of_bodies(guarded: Server) -> None:
    headers = {"Authorization": "Bearer one"}
    response = guarded.http.post("/v1/completions", content=b" " * 4096, headers=headers)
    assert response.status_code == 413
    assert "2048" in response.json()["error"]["message"]
