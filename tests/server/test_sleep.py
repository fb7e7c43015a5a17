"""Sleeping over HTTP: probes, refusals, streams that go on after waking, kill -9 while asleep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.goldens import golden
from tests.server.golden_server import ADMIN, PROMPTS, Streams, admin, answer, golden_server
from tests.server.serving import Server, wait_for

BASE = golden("llama", "gqa")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with golden_server(BASE.path, tmp_path_factory.mktemp("plan")) as ready:
        yield ready


def falls_asleep_with_streams(server: Server, level: int) -> bool:
    """Puts it to sleep; wakes it again if no stream was under way just then."""
    admin(server, "/admin/sleep", {"level": level})
    if server.metric("vllm:num_requests_waiting") > 0:
        return True
    admin(server, "/admin/wake")
    return False


@pytest.mark.parametrize("level", [1, 2])
def test_streams_go_on_after_a_nap(server: Server, level: int) -> None:
    before = [answer(server, prompt) for prompt in PROMPTS]
    streams = Streams(server)
    try:
        wait_for(lambda: streams.finished, "streams before the nap")
        wait_for(lambda: falls_asleep_with_streams(server, level), "a nap with streams under way")
        told = server.http.get("/admin/is_sleeping", headers=ADMIN).json()
        assert (told["state"], told["level"]) == ("asleep", level)
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200  # it is alive
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503 and "asleep" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        assert server.metric("polyjax_sleep_level") == level
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert admin(server, "/admin/wake")["state"] == "awake"
        assert server.http.get("/ready").status_code == 200  # from the answer on
        done = len(streams.finished)
        wait_for(lambda: len(streams.finished) > done + 2, "streams after the nap")
    finally:
        streams.stop()
    assert [error["code"] for error in streams.failed] == [503] * len(streams.failed)
    for index, stream in streams.finished:
        assert [token for token, _ in stream] == before[index]
    assert {name for _, stream in streams.finished for _, name in stream} == {"epoch-0-bounded"}
    assert server.metric("polyjax_compiles_after_ready_total") == 0
    assert server.metric("polyjax_retraces_after_ready_total") == 0


def test_under_the_names_of_vllm(server: Server) -> None:
    assert server.post("/sleep?level=1", None).status_code == 401
    for _ in range(2):
        assert server.post("/sleep?level=2", None, headers=ADMIN).status_code == 200
    told = server.http.get("/is_sleeping", headers=ADMIN).json()
    assert (told["is_sleeping"], told["level"]) == (True, 2)
    for _ in range(2):
        assert server.post("/wake_up", None, headers=ADMIN).status_code == 200
    assert not server.http.get("/is_sleeping", headers=ADMIN).json()["is_sleeping"]
    for path, param in (("/sleep?level=x", "level"), ("/wake_up?tags=weights", "tags")):
        response = server.post(path, None, headers=ADMIN)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_nothing_is_left_of_a_server_killed_asleep(server: Server) -> None:
    """The last test: the server is gone after it."""
    admin(server, "/admin/sleep")
    children = server.children()
    assert children
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(Path(tempfile.gettempdir()).glob(f"polyjax-{server.process.pid}-*"))
