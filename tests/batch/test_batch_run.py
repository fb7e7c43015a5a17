"""`python -m polyjax.batch` with a scripted engine: nothing is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "goldens" / "llama" / "gqa"  # for its tokenizer and chat template
SCRIPT = {"step_s": 0.01, "vocab_size": 264, "fail_token": 7}
END = 257  # the token <|end|>


def request(number, url="/v1/completions", **body):
    body = {"prompt": [20 + number % 100, 30], "max_tokens": 4, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})


@pytest.fixture
def batch(tmp_path):
    def start(*flags, script=SCRIPT):
        command = [sys.executable, "-m", "polyjax.batch", f"--scripted_engine={json.dumps(script)}"]
        command += [f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
        return subprocess.Popen(
            [*command, f"--model={MODEL}", *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    start.input = tmp_path / "in.jsonl"
    start.output = tmp_path / "out.jsonl"
    return start


def finish(child, code=0):
    _, said = child.communicate(timeout=60)
    assert child.returncode == code, said
    return said


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_gets_its_own_answer_and_bad_ones_fail_alone(batch):
    lines = [
        request(0),
        "not json",
        request(2, max_tokens=10**9),
        request(3, url="/v1/embeddings"),
        request(4, stream=True),
        request(5, prompt=[7, 8]),
        request(
            6, url="/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "hi"}]
        ),
        request(7, model="some-other-name"),
        request(8, n=2),
    ]
    batch.input.write_text("\n".join(lines))
    said = finish(batch())
    by_id = {r["id"]: r for r in results(batch.output)}
    assert len(by_id) == 9 and "9/9 requests" in said
    status = [by_id[f"batch_req_{i}"]["response"]["status_code"] for i in range(9)]
    assert status == [200, 400, 400, 404, 400, 500, 200, 404, 200]
    good = by_id["batch_req_0"]
    assert good["custom_id"] == "r0" and good["error"] is None
    assert good["response"]["body"]["usage"]["completion_tokens"] == 4
    assert "context" in by_id["batch_req_2"]["error"]["message"]
    assert len(by_id["batch_req_8"]["response"]["body"]["choices"]) == 2


def test_killed_at_any_moment_and_started_again_it_loses_and_repeats_nothing(batch):
    count = 300
    batch.input.write_text("\n".join(request(i) for i in range(count)))
    flags = ("--max_num_seqs=4", "--concurrency=8")
    for _ in range(2):
        child = batch(*flags)
        seen = len(results(batch.output)) if batch.output.exists() else 0
        while not batch.output.exists() or len(batch.output.read_text().splitlines()) < seen + 40:
            time.sleep(0.02)
            assert child.poll() is None
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    torn = batch.output.read_bytes()
    batch.output.write_bytes(torn[:-5])
    finish(batch(*flags))
    ids = [r["custom_id"] for r in results(batch.output)]
    assert len(ids) == count and len(set(ids)) == count


def test_interrupted_it_says_how_to_go_on_and_leaves_whole_lines(batch):
    batch.input.write_text("\n".join(request(i) for i in range(500)))
    child = batch("--max_num_seqs=2")
    while not batch.output.exists() or len(batch.output.read_text().splitlines()) < 5:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    assert "goes on from here" in finish(child, 130)
    assert 5 <= len(results(batch.output)) < 500


def test_shards_and_merge_give_the_whole_in_order(batch, tmp_path):
    batch.input.write_text("\n".join(request(i) for i in range(9)))
    for index in range(2):
        finish(batch(f"--shard={index}/2", f"--output={tmp_path / f'part{index}'}"))
    finish(batch(f"--merge={tmp_path / 'part0'},{tmp_path / 'part1'}"))
    assert [r["custom_id"] for r in results(batch.output)] == [f"r{i}" for i in range(9)]


def test_missing_flags_are_named(batch, tmp_path):
    batch.input.write_text("")
    assert "--output" in finish(batch("--output="), 1)
    assert "--input" in finish(batch(f"--input={tmp_path / 'nowhere'}"), 1)
    assert "--shard" in finish(batch("--shard=2/2"), 1)


def test_an_engine_that_dies_ends_the_run_with_what_was_answered(batch):
    batch.input.write_text("\n".join([*(request(i) for i in range(6)), request(6, prompt=[9, 1])]))
    child = batch("--concurrency=1", script={**SCRIPT, "crash_token": 9})
    assert "engine" in finish(child, 1)
    assert len(results(batch.output)) == 6


def test_tool_calls(batch, tmp_path):
    """The engine repeats its prompt: the last message and an end token."""
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools %}{% endif %}{{ messages[-1].content }}<|end|>")
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    chat = {"prompt": None, "messages": [{"role": "user", "content": call}], "max_tokens": None}
    tools = [{"type": "function", "function": {"name": "f"}}]
    url = "/v1/chat/completions"
    lines = [
        request(0, url, **chat, tools=tools, temperature=0),
        request(1, url, **chat, tools=[{"type": "function"}]),
    ]
    batch.input.write_text("\n".join(lines))
    flags = (f"--chat_template={template}", "--tool_call_parser=hermes")
    script = {**SCRIPT, "eos_token_ids": [END]}
    finish(batch(*flags, script=script))
    answer, refusal = (r["response"] for r in sorted(results(batch.output), key=lambda r: r["id"]))
    [choice] = answer["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert refusal["status_code"] == 400
    assert "tool_call_parser" in finish(batch("--tool_call_parser=herms"), 1)
