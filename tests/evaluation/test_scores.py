"""Arms are asked the same questions and compared item by item."""

import http.server
import json
import math
import threading

import pytest

from polyjax.core.errors import ConfigError
from polyjax.evaluation.arms import BatchArm, ServerArm, parse_arm
from polyjax.evaluation.perplexity import Windows
from polyjax.evaluation.scores import compare, score_arm


class Parity:
    """Item i is right if the answer is i modulo 2."""

    name = "parity"

    def requests(self):
        for i in range(60):
            yield f"parity/{i}", {"prompt": str(i), "max_tokens": 1}

    def grade(self, item_id, text):
        return float(text == str(int(item_id.split("/")[1]) % 2))


class Answering:
    """Answers right except for every `wrong`-th item; gives every token the same probability."""

    def __init__(self, name, wrong, probability=0.5):
        self.name, self._wrong, self._logprob = name, wrong, math.log(probability)
        self.asked = []

    def answer(self, requests):
        self.asked.append(dict(requests))
        return {item: self._one(body) for item, body in requests.items()}

    def _one(self, body):
        if body.get("echo"):
            scores = [None] + [self._logprob] * len(body["prompt"])
            return {"text": "", "logprobs": {"token_logprobs": scores}}
        number = int(body["prompt"])
        return {"text": str(number % 2 if number % self._wrong else 9)}


def test_a_worse_arm_differs_and_an_equal_one_does_not():
    arms = [Answering("good", 30), Answering("same", 30), Answering("bad", 2, probability=0.25)]
    windows = Windows(list(range(100)), 10)
    scores = [s for arm in arms for s in score_arm(arm, [Parity()], windows)]
    assert arms[0].asked == arms[1].asked == arms[2].asked and len(arms[0].asked) == 1
    values = {(s.arm, s.task): s.interval.value for s in scores}
    assert values["good", "parity"] == pytest.approx(58 / 60)
    assert values["bad", "parity"] == pytest.approx(0.5)
    assert values["good", "perplexity"] == pytest.approx(2.0)
    assert values["bad", "perplexity"] == pytest.approx(4.0)
    beyond = {(d.second, d.task): d.beyond_noise for d in compare(scores)}
    assert beyond == {
        ("same", "parity"): False,
        ("same", "perplexity"): False,
        ("bad", "parity"): True,
        ("bad", "perplexity"): True,
    }


def test_arms_are_spelled_as_name_and_flags_or_url(tmp_path):
    assert parse_arm("a http://localhost:1/v1") == ServerArm("a", "http://localhost:1/v1")
    assert parse_arm("b --dtype=float32", tmp_path) == BatchArm("b", ("--dtype=float32",), tmp_path)
    for wrong in ("../x --dtype=float32", "a localhost:1", "a http://x --dtype=float32"):
        with pytest.raises(ConfigError, match="--arm"):
            parse_arm(wrong, tmp_path)


def test_a_server_arm_asks_any_openai_compatible_url():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"data": [{"id": "m"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bad = body["prompt"] == "bad"
            self._send(400 if bad else 200, {"choices": [{"text": body["model"] + body["prompt"]}]})

        def _send(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 64  # the arm opens all its connections at once

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        arm = ServerArm("a", f"http://127.0.0.1:{server.server_port}/v1")
        choices = arm.answer({f"i{n}": {"prompt": str(n)} for n in range(40)})
        assert choices["i7"]["text"] == "m7" and len(choices) == 40
        with pytest.raises(ConfigError, match="/v1/completions"):
            arm.answer({"x": {"prompt": "bad"}})
        server.shutdown()
    with pytest.raises(ConfigError, match="/v1/models"):
        arm.answer({})
