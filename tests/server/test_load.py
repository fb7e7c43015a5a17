"""scripts/bench_serve measures what happens: with a server of known pace, and on made-up times."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyjax.load import LoadError, LoadSpec, RequestRecord, make_requests, run_load
from tests.server.serving import ROOT, Server

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


def test_the_script(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    flags = ["--num_prompts=4", "--concurrency=2", "--isl=8", "--osl=6", "--repeats=3"]
    flags.append(f"--vocab_size={VOCABULARY}")
    result = subprocess.run(
        [
            sys.executable,
            "scripts/bench_serve",
            f"--url={server.url}",
            f"--output={output}",
            *flags,
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for word in ("output_tokens_per_s", "events_per_token", "ttft", "p99"):
        assert word in result.stdout
    lines = {line["metric"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert lines["serve_c2_events_per_token"]["samples"] == [1.0, 1.0, 1.0]
    throughput = lines["serve_c2_output_tokens_per_s"]
    assert throughput["device"] == "scripted" and throughput["better"] == "higher"
    # No upper bound: the scripted engine makes up for late steps, so a short run can be faster.
    assert throughput["value"] > 0
    assert lines["serve_c2_ttft_p50_ms"]["better"] == "lower"
