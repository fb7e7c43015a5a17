"""Keys and the admin routes."""

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
