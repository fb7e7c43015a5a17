"""What `vllm bench serve` sends and relies on, sent and checked.

vllm itself wants a GPU build; this is its wire contract (vllm/benchmarks/lib): the bodies and
headers of its two OpenAI back ends, events split on blank lines, lines that start with a colon
skipped, the first event with choices taken for the first token and every later one for one more,
usage read from the event whose choices are empty. Standard library only. See report.py.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

from report import Checks, arguments

TOKENS = 24
SOURCE = "wire contract at 02cfb534df56"  # commit of vllm/benchmarks/lib/endpoint_request_func.py


class Streamed:
    """One request as the bench tool sees it. `arrivals_s` are of events with choices."""

    def __init__(self, url: str, path: str, body: dict[str, Any], request_id: str):
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=300)
        headers = {
            "Content-Type": "application/json",
            "Authorization": "Bearer none",
            "x-request-id": request_id,
        }
        self.started_s = time.perf_counter()
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        self.arrivals_s: list[float] = []
        self.texts: list[str] = []
        self.usage: dict[str, int] | None = None
        self.is_done = False
        buffer = ""
        while piece := response.read1(65536):
            buffer += piece.decode()
            while "\n\n" in buffer:
                event, buffer = buffer.split("\n\n", 1)
                self._take(event.strip())
        assert not buffer.strip(), f"the stream ended inside an event: {buffer!r}"
        connection.close()

    def _take(self, event: str) -> None:
        if not event or event.startswith(":"):
            return
        assert event.startswith("data: "), event
        content = event.removeprefix("data: ")
        if content == "[DONE]":
            self.is_done = True
            return
        told = json.loads(content)
        assert "error" not in told, told
        if choices := told.get("choices"):
            self.arrivals_s.append(time.perf_counter())
            choice = choices[0]
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            self.texts.append(text or "")
        elif told.get("usage"):
            self.usage = told["usage"]


def check_stream(stream: Streamed, num_prompt_tokens: int | None) -> None:
    """What the tool derives its figures from."""
    assert stream.is_done
    assert stream.usage is not None, "no event with empty choices brought the usage"
    assert stream.usage["completion_tokens"] == TOKENS
    if num_prompt_tokens is not None:
        assert stream.usage["prompt_tokens"] == num_prompt_tokens
    events = len(stream.arrivals_s)
    assert events == TOKENS, (
        f"{events} events with choices for {TOKENS} tokens: ITL is not per token"
    )
    assert stream.arrivals_s == sorted(stream.arrivals_s)
    # Had the answer come in one piece, there would be nothing between the first and the last.
    assert stream.arrivals_s[-1] > stream.arrivals_s[0] > stream.started_s


def main() -> None:
    given = arguments()
    url, model = given.url, given.model
    checks = Checks("vllm-bench", SOURCE)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    completion = {
        "model": model,
        "repetition_penalty": 1.0,
        "max_tokens": TOKENS,
        "logprobs": None,
        "ignore_eos": True,
        "temperature": 0.0,
        **options,
    }
    chat = {
        "model": model,
        "max_completion_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        **options,
    }
    text = "It was a bright cold day in April, and the clocks were striking"

    @checks.run("--backend openai, prompts as text")
    def _text() -> None:
        check_stream(Streamed(url, "/v1/completions", {**completion, "prompt": text}, "a"), None)

    @checks.run("--backend openai, prompts as token ids")
    def _ids() -> None:
        ids = list(range(100, 140))
        check_stream(Streamed(url, "/v1/completions", {**completion, "prompt": ids}, "b"), 40)

    @checks.run("--backend openai-chat, content as parts")
    def _chat() -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        body = {**chat, "messages": messages}
        check_stream(Streamed(url, "/v1/chat/completions", body, "c"), None)

    @checks.run("GET /v1/models names the model; GET /metrics has vllm's names")
    def _routes() -> None:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["data"][0]["id"] == model
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        for name in ("num_requests_running", "generation_tokens_total", "prompt_tokens_total"):
            assert f"vllm:{name}" in metrics, name

    checks.finish()


if __name__ == "__main__":
    main()
