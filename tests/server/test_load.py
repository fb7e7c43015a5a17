"""scripts/bench_serve measures what happens: with a server of known pace, and on made-up times."""

import dataclasses
import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polyjax.load import (
    LoadError,
    LoadSpec,
    OutOfTime,
    RequestRecord,
    make_requests,
    run_load,
)
from tests.server.serving import ROOT, Server, wait_for

VOCABULARY = 250  # leaves out the tokens that the scripted engine stumbles over


def spec(server: Server) -> LoadSpec:
    return LoadSpec(
        url=server.url,
        model=server.http.get("/v1/models").json()["data"][0]["id"],
        num_prompts=12,
        concurrency=4,
        isl=20,
        osl=30,
        range_ratio=0.5,
        vocab_size=VOCABULARY,
    )


@pytest.mark.parametrize("num_processes", [1, 3])
def test_every_stream_is_recorded(server: Server, num_processes: int) -> None:
    records = run_load(spec(server), num_processes)
    assert len(records) == 12
    for record in records:
        assert 10 <= record.prompt_tokens <= 20
        assert 15 <= record.output_tokens <= 30
        assert len(record.event_s) == record.output_tokens  # one token an event
        assert record.start_s < record.event_s[0] <= record.event_s[-1] <= record.end_s
    assert len({record.output_tokens for record in records}) > 1


def test_no_more_streams_than_asked_for(server: Server) -> None:
    records = run_load(dataclasses.replace(spec(server), concurrency=2), 1)
    for record in records:
        moment = record.event_s[0]
        assert sum(r.start_s <= moment < r.event_s[-1] for r in records) <= 2


def test_equal_seeds_make_equal_requests(server: Server) -> None:
    assert make_requests(spec(server)) == make_requests(spec(server))
    assert make_requests(spec(server)) != make_requests(dataclasses.replace(spec(server), seed=1))


def test_failures_are_not_averaged_away(server: Server) -> None:
    unknown = dataclasses.replace(spec(server), model="another")
    with pytest.raises(LoadError, match=r"12 of 12 requests failed.*another"):
        run_load(unknown, 1)
    nobody = dataclasses.replace(spec(server), url="http://127.0.0.1:9")
    with pytest.raises(LoadError, match="requests failed"):
        run_load(nobody, 1)


def test_times_of_a_record() -> None:
    record = RequestRecord(10.0, [10.5, 10.6, 10.9], 11.0, prompt_tokens=4, output_tokens=5)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.1)  # 0.4 s for the four tokens after the first
    assert record.itl_s == pytest.approx([0.1, 0.3])
    assert record.e2e_s == pytest.approx(0.9)


def test_a_load_ends_when_its_time_is_over(server: Server) -> None:
    endless = dataclasses.replace(spec(server), osl=2000, range_ratio=1.0)
    with pytest.raises(OutOfTime):
        run_load(endless, 2, deadline_s=time.monotonic() + 1.0)
    wait_for(
        lambda: server.metric("vllm:num_requests_running") == 0, "the server to see clients leave"
    )


class ShortAnswers(BaseHTTPRequestHandler):
    """Answers two tokens, whatever was asked for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, usage]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_that_is_too_short_is_a_failure() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ShortAnswers) as short:
        threading.Thread(target=short.serve_forever, daemon=True).start()
        load = LoadSpec(f"http://127.0.0.1:{short.server_port}", "m", 2, 1, 4, 2, 1.0, VOCABULARY)
        assert [record.output_tokens for record in run_load(load, 1)] == [2, 2]
        with pytest.raises(LoadError, match=r"2 of 2 requests failed.*2 tokens .* where 3 were"):
            run_load(dataclasses.replace(load, osl=3), 1)
        short.shutdown()


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench_serve", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_compares_arms(server: Server, model_dir: Path, tmp_path: Path) -> None:
    lines_file = tmp_path / "lines.jsonl"
    command = (
        f"{sys.executable} -P -m polyjax.serve {model_dir} --port={{port}} --host=127.0.0.1 "
        f"--scripted_engine='{json.dumps({'vocab_size': 300})}'"
    )
    result = run_script(
        *(f"--arm=polyjax={server.url}", f"--arm=other={command}", "--label=tiny"),
        *("--concurrency=2", "--prompts_per_stream=2", "--isl=8", "--osl=6"),
        *(f"--vocab_size={VOCABULARY}", f"--output={lines_file}", f"--server_logs={tmp_path}"),
    )
    assert result.returncode == 0, result.stderr
    for word in ("output_tokens/s", "events_per_token", "ttft_p50_ms", "detokenise"):
        assert word in result.stdout
    lines = [json.loads(line) for line in lines_file.read_text().splitlines()]
    runs = [line["run"] for line in lines if "run" in line]
    order = [(run["arm"], run["repeat"]) for run in runs]
    arms = ("polyjax", "other", "other", "polyjax", "polyjax", "other")
    assert order == list(zip(arms, (0, 0, 1, 1, 2, 2), strict=True))
    assert all(run["spent_s"]["http"] > 0 and run["spent_s"]["send"] > 0 for run in runs)
    metrics = {line["metric"]: line for line in lines if "metric" in line}
    assert metrics["serve_tiny_c2_polyjax_events_per_token"]["samples"] == [1.0, 1.0, 1.0]
    ratio = metrics["serve_tiny_c2_vs_other"]
    assert ratio["device"] == "scripted" and "unofficial" in ratio["note"]
    assert len(ratio["samples"]) == len(ratio["baseline"]["samples"]) == 3
    assert metrics["serve_tiny_vs_other"]["value"] == ratio["value"]
    (url,) = re.findall(r"listening at (\S+)", (tmp_path / "other.log").read_text())
    with pytest.raises(LoadError, match="refused"):  # it was ended
        run_load(dataclasses.replace(spec(server), url=url), 1)

    drawn = run_script(f"--plot={lines_file}", f"--plot_dir={tmp_path}")
    assert drawn.returncode == 0, drawn.stderr
    for name in ("pareto", "time"):
        assert "<svg" in (tmp_path / f"serve_tiny_{name}.svg").read_text()


def test_the_script_ends_in_time_and_says_what_is_missing(server: Server) -> None:
    result = run_script(
        *(f"--url={server.url}", "--concurrency=1,2", "--isl=8", "--osl=1800", "--limit_s=4"),
        *("--prompts_per_stream=4", "--warm_ups_per_stream=0", f"--vocab_size={VOCABULARY}"),
    )
    assert result.returncode == 0, result.stderr
    assert "missing, as the time was over: polyjax at concurrency 2: 3 runs" in result.stdout


def test_the_script_measures_starts(model_dir: Path, tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -P -m polyjax.serve {model_dir} --port={{port}} --host=127.0.0.1 "
        "--scripted_engine='{}' --compile_cache_dir={cache}"
    )
    result = run_script(
        *(f"--arm=polyjax={command}", "--cold_starts=0", "--warm_starts=1"),
        *(f"--cache_dir={tmp_path}", f"--server_logs={tmp_path}"),
    )
    assert result.returncode == 0, result.stderr
    assert "warm start 1: first token after" in result.stdout
    refused = run_script("--arm=polyjax=server --port={port}", "--warm_starts=1")
    assert refused.returncode == 1 and "{cache}" in refused.stderr


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    broken = f"{sys.executable} -c 'print(7 * 6); raise SystemExit({{port}} and 3)'"
    result = run_script(f"--arm=a={broken}", f"--server_logs={tmp_path}")
    assert result.returncode == 1
    assert "a ended with code 3" in result.stderr and "42" in result.stderr
    for arm in ("nameless", "a=python without a port", "a=https://host"):
        refused = run_script(f"--arm={arm}")
        assert refused.returncode == 1 and arm in refused.stderr
