"""Starting, draining, dying: no request is dropped in order, no process is left in disorder."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.serving import CRASH, HANG, ROOT, Server, running, start, stop, wait_for

ENGINE, WORKER = "polyjax.engine.process", "polyjax.server.process"
SLOW = {"prompt": "abc", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


class InBackground:
    """A request made by another thread, which ends by itself or with the server."""

    def __init__(self, server: Server, body: dict[str, Any]):
        self.response: httpx.Response | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._post, args=(server, body))
        self._thread.start()

    def _post(self, server: Server, body: dict[str, Any]) -> None:
        try:
            with server.new_client() as http:
                self.response = http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.error = error

    def finished(self) -> httpx.Response:
        self._thread.join(30)
        assert self.response is not None, self.error
        return self.response


def is_running(server: Server) -> bool:
    return server.metric("vllm:num_requests_running") > 0


def assert_all_end(server: Server, processes: list[psutil.Process], exit_code: int | None) -> None:
    code = server.process.wait(15)
    if exit_code is not None:
        assert code == exit_code, server.log
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def folders_of(server: Server) -> list[Path]:
    return [*Path("/tmp").glob(f"polyjax-{server.process.pid}-*")]


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_lets_running_requests_finish(
    model_dir: Path, to_group: bool, processes: int
) -> None:
    with running(model_dir, [f"--api_server_count={processes}"], {"step_s": 0.01}) as server:
        children = server.children()
        assert len(children) == processes
        requests = [InBackground(server, SLOW) for _ in range(4)]
        wait_for(lambda: is_running(server), "the requests to run")
        if to_group:
            os.killpg(server.process.pid, signal.SIGTERM)
        else:
            server.process.terminate()
        for request in requests:
            body = request.finished().json()
            assert body["choices"][0]["text"] == ("abc" * 34)[:100]
        assert_all_end(server, children, exit_code=0)
        assert not folders_of(server)


def test_new_work_is_refused_while_draining(model_dir: Path) -> None:
    with running(model_dir, [], {"step_s": 0.01}) as server:
        request = InBackground(server, SLOW)
        wait_for(lambda: is_running(server), "the request to run")
        server.process.terminate()

        def refused() -> bool:
            return server.post("/v1/completions", SLOW | {"max_tokens": 1}).status_code == 503

        wait_for(refused, "the server to refuse")
        response = server.post("/v1/completions", SLOW)
        assert response.headers["retry-after"] == "1"
        assert "shutting down" in response.json()["error"]["message"]
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        assert request.finished().status_code == 200


def test_what_does_not_finish_in_time_is_cut(model_dir: Path) -> None:
    with running(model_dir, ["--shutdown-timeout-s=0.5"], {"step_s": 0.05}) as server:
        children = server.children()
        InBackground(server, SLOW | {"max_tokens": 2000})
        wait_for(lambda: is_running(server), "the request to run")
        server.process.terminate()
        assert_all_end(server, children, exit_code=0)


def test_a_second_interrupt_quits_at_once(model_dir: Path) -> None:
    with running(model_dir, [], {"step_s": 0.05}) as server:
        children = server.children()
        InBackground(server, SLOW | {"max_tokens": 2000})
        wait_for(lambda: is_running(server), "the request to run")
        os.killpg(server.process.pid, signal.SIGINT)
        wait_for(lambda: "shutting down" in server.log, "the drain to begin")
        os.killpg(server.process.pid, signal.SIGINT)
        assert_all_end(server, children, exit_code=130)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_engine_ends_the_server(model_dir: Path, processes: int) -> None:
    with running(model_dir, [f"--api_server_count={processes}"], {"step_s": 0.05}) as server:
        children = server.children()
        whole = [InBackground(server, SLOW) for _ in range(3)]
        streams = [InBackground(server, SLOW | {"stream": True}) for _ in range(3)]
        wait_for(lambda: server.metric("vllm:num_requests_running") == 6, "all to run")
        server.child(ENGINE).kill()
        for request in whole:
            assert request.finished().status_code == 503
        for request in streams:
            last = request.finished().text.rstrip().rpartition("data: ")[2]
            assert json.loads(last)["error"]["code"] == 503
        assert_all_end(server, children, exit_code=1)
        assert not folders_of(server)


def test_a_killed_http_process_ends_the_server(model_dir: Path) -> None:
    with running(model_dir, ["--api_server_count=2"], {}) as server:
        children = server.children()
        server.child(WORKER).kill()
        assert_all_end(server, children, exit_code=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_main_process_ends_the_others(model_dir: Path, processes: int) -> None:
    with running(model_dir, [f"--api_server_count={processes}"], {"step_s": 0.05}) as server:
        children = server.children()
        InBackground(server, SLOW)
        wait_for(lambda: is_running(server), "the request to run")
        server.process.kill()
        assert_all_end(server, children, exit_code=-signal.SIGKILL)
        assert not folders_of(server)


def test_a_crashing_step_ends_the_server_and_says_why(model_dir: Path) -> None:
    with running(model_dir, [], {}) as server:
        children = server.children()
        other = InBackground(server, SLOW | {"max_tokens": 2000})
        wait_for(lambda: is_running(server), "the request to run")
        response = server.post("/v1/completions", {"prompt": [CRASH]})
        assert response.status_code == 503
        assert "scripted crash" in response.json()["error"]["message"]
        assert other.finished().status_code == 503
        assert_all_end(server, children, exit_code=1)
        assert "Traceback" in server.log and "scripted crash" in server.log


def test_health_notices_a_step_that_hangs(model_dir: Path) -> None:
    with running(model_dir, ["--health_timeout_s=1"], {}) as server:
        assert server.http.get("/health").status_code == 200
        InBackground(server, {"prompt": [HANG], "max_tokens": 2})
        wait_for(lambda: server.http.get("/health").status_code == 503, "health to fail")
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "shutting down" in server.log, "the drain to begin")
        server.process.send_signal(signal.SIGINT)
        assert_all_end(server, [], exit_code=130)


def test_not_ready_while_loading(model_dir: Path) -> None:
    server = start(model_dir, ["--admin_key=k"], {"load_s": 1.5})
    try:
        requests: dict[str, Callable[[], httpx.Response]] = {
            "models": lambda: server.http.get("/v1/models"),
            "ready": lambda: server.http.get("/ready"),
            "work": lambda: server.post("/v1/completions", SLOW),
            "admin": lambda: server.http.get("/admin/plan", headers={"Authorization": "Bearer k"}),
        }
        for name, request in requests.items():
            response = request()
            assert response.status_code == 503, name
            assert response.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200
        wait_for(lambda: server.http.get("/v1/models").status_code == 200, "readiness")
        assert "ready at http://127.0.0.1:" in server.log
    finally:
        stop(server)


def test_sigterm_while_loading(model_dir: Path) -> None:
    server = start(model_dir, [], {"load_s": 30})
    wait_for(lambda: len(server.children()) == 1, "the engine process")
    children = server.children()
    server.process.terminate()
    assert_all_end(server, children, exit_code=0)
    stop(server)


def test_the_queue_has_a_limit(model_dir: Path) -> None:
    with running(model_dir, ["--max_queued_requests=2", "--max_num_seqs=1"], {}) as server:
        body = SLOW | {"max_tokens": 600}
        requests = [InBackground(server, body)]
        wait_for(lambda: is_running(server), "the first to run")
        requests += [InBackground(server, body) for _ in range(2)]
        wait_for(lambda: server.metric("vllm:num_requests_waiting") == 2, "two to wait")
        for stream in (False, True):
            response = server.post("/v1/completions", body | {"stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["type"] == "service_unavailable_error"
        assert [request.finished().status_code for request in requests] == [200] * 3


def test_statistics_are_printed_under_load_only(model_dir: Path) -> None:
    with running(model_dir, ["--log_interval_s=0.2"], {}) as server:
        time.sleep(0.5)
        assert "tokens/s" not in server.log
        server.complete("abc", max_tokens=500)
        wait_for(lambda: "generation" in server.log, "a line of statistics")
        [line, *_] = [line for line in server.log.splitlines() if "generation" in line]
        for part in ("tokens/s", "running", "waiting", "KV use", "prefix hits"):
            assert part in line


def test_several_http_processes_share_port_and_metrics(model_dir: Path) -> None:
    with running(model_dir, ["--api_server_count=3"], {}) as server:
        for _ in range(40):  # connections of their own, so that the kernel spreads them
            with server.new_client() as http:
                answer = http.post("/v1/completions", json=SLOW | {"max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == "ab"
        workers = [c for c in server.children() if WORKER in c.cmdline()]
        assert all(any(c.laddr.port for c in worker.net_connections()) for worker in workers)
        for _ in range(10):
            server.http.close()
            server.http = server.new_client()
            assert server.metric("vllm:request_generation_tokens_count") == 40


@pytest.mark.parametrize("processes", [1, 2])
def test_random_weights_need_no_tokenizer(tmp_path: Path, processes: int) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Scripted"], "vocab_size": 300}')
    flags = ["--load_format=dummy", f"--api_server_count={processes}"]
    with running(tmp_path, flags, {}) as server:
        assert server.complete([260, 270], max_tokens=3)["choices"][0]["text"] == " 260 270 260"
        assert server.complete("hé", max_tokens=3)["choices"][0]["text"] == "hé"


def fail_to_start(*flags: str) -> str:
    command = [sys.executable, "-P", "-m", "polyjax.serve", *flags]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_port_in_use(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = fail_to_start(f"--model={model_dir}", "--host=127.0.0.1", f"--port={port}")
        assert str(port) in said and "in use" in said


def test_a_model_that_is_none(tmp_path: Path) -> None:
    said = fail_to_start(f"--model={tmp_path}", "--port=0", "--scripted_engine={}")
    assert "config.json is missing" in said


def test_unusable_settings(model_dir: Path) -> None:
    assert "max_model_len" in fail_to_start("--max-modle-len=5")
    assert "--gpu_memory_utilization" in fail_to_start("--gpu-memory-utilization=7")
    assert "more than one model" in fail_to_start("one", "two")
    assert "--scripted_engine" in fail_to_start("--scripted_engine={")
