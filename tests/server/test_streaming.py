"""Streams: one token an event, nothing before the first token, endings, disconnects."""

import json
import socket
import time

import pytest

from tests.server.serving import EOS, FAIL, Server, wait_for

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def messages(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_one_event_per_token_and_the_role_with_the_first(server: Server) -> None:
    body = {"messages": messages("hello "), "max_tokens": 12, "temperature": 0}
    events = server.stream(CHAT, body)
    assert len(events) == 12
    assert len({(e["id"], e["created"], e["object"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "h"}
    assert all(delta.keys() == {"content"} for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "hello hello "
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * 11 + ["length"]
    assert all("usage" not in event for event in events)


def test_usage_comes_in_an_event_of_its_own(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "stream_options": {"include_usage": True}}
    *tokens, last = server.stream(TEXT, body)
    assert [event["usage"] for event in tokens] == [None] * 3
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 2
    assert last["usage"]["completion_tokens"] == 3


def test_usage_with_every_event(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 3, "stream_options": options}
    events = server.stream(TEXT, body)
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]


def test_an_answer_that_ends_at_once_still_has_an_event(server: Server) -> None:
    body = {"prompt": [EOS], "max_tokens": 5, "temperature": 0}
    [event] = server.stream(TEXT, body)
    assert event["choices"][0]["text"] == ""
    assert event["choices"][0]["finish_reason"] == "stop"
    [event] = server.stream(CHAT, {"messages": messages("<|end|>"), "temperature": 0})
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_an_event_for_every_token_even_if_its_text_must_wait(server: Server) -> None:
    events = server.stream(TEXT, {"prompt": "é日", "max_tokens": 5, "temperature": 0})
    assert [event["choices"][0]["text"] for event in events] == ["", "é", "", "", "日"]


def test_stop_strings_never_leak(server: Server) -> None:
    body = {"prompt": "abcdef", "max_tokens": 50, "temperature": 0, "stop": ["cdx", "def"]}
    events = server.stream(TEXT, body)
    texts = [event["choices"][0]["text"] for event in events]
    assert texts == ["a", "b", "", "", "c", ""]  # "cd" waits for the x that does not come
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "def"


def test_n_streams_interleave_by_index(server: Server) -> None:
    body = {"messages": messages("abc"), "n": 2, "max_tokens": 4, "temperature": 0}
    events = server.stream(CHAT, body)
    for index in range(2):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["delta"]["content"] for choice in mine) == "abca"
        assert mine[0]["delta"]["role"] == "assistant"
        assert mine[-1]["finish_reason"] == "length"


def test_logprobs_travel_with_their_tokens(server: Server) -> None:
    body = {"messages": messages("ab"), "max_tokens": 3, "temperature": 0}
    events = server.stream(CHAT, {**body, "logprobs": True, "top_logprobs": 1})
    tokens = [event["choices"][0]["logprobs"]["content"] for event in events]
    assert [[entry["token"] for entry in content] for content in tokens] == [["a"], ["b"], ["a"]]
    events = server.stream(TEXT, {"prompt": "ab", "max_tokens": 3, "temperature": 0, "logprobs": 1})
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in events] == [[0], [1], [2]]


def test_an_echoed_prompt_precedes_the_first_token(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    events = server.stream(TEXT, body)
    assert [event["choices"][0]["text"] for event in events] == ["abc", "a", "b"]
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [3]


def test_token_ids_in_streams(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    events = [event["choices"][0] for event in server.stream(TEXT, body)]
    prompt = events[0]["prompt_token_ids"]
    assert [event["token_ids"] for event in events] == [[prompt[0]], [prompt[1]], [prompt[0]]]
    assert all("prompt_token_ids" not in event for event in events[1:])


def test_whole_and_streamed_answers_agree(server: Server) -> None:
    body = {"prompt": 'quotes " and \\ and \n and \x01 and 🙂', "max_tokens": 90, "temperature": 0}
    streamed = "".join(e["choices"][0]["text"] for e in server.stream(TEXT, body))
    assert streamed == server.complete(**body)["choices"][0]["text"]


def test_a_failure_within_a_stream_is_its_last_event(server: Server) -> None:
    body = {"prompt": [1, 2, FAIL], "max_tokens": 5, "stream": True, "temperature": 0}
    response = server.post(TEXT, body)
    *tokens, last, rest = response.text.split("\n\n")
    assert len(tokens) == 2
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == "scripted failure"
    assert error["code"] == 500
    assert rest == ""  # no end mark: the answer is not complete
    assert server.complete("ok", max_tokens=2)["choices"][0]["text"] == "ok"


def test_a_refusal_before_the_first_token_has_its_status(server: Server) -> None:
    response = server.post(TEXT, {"prompt": [EOS + 10**6], "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages(server: Server, stream: bool) -> None:
    body = json.dumps({"prompt": "a" * 100, "max_tokens": 1900, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, "the request to run")
        assert server.metric("vllm:kv_cache_usage_perc") > 0
        generated = server.metric("vllm:generation_tokens_total")
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "the request to leave")
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:generation_tokens_total") - generated < 1500


def test_a_slow_reader_gets_every_event_and_holds_up_nobody(server: Server) -> None:
    body = {"prompt": "a" * 50, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", TEXT, json=body) as slow:
        lines = slow.iter_lines()
        next(lines)
        time.sleep(0.3)  # does not read: its events pile up in the socket and behind it
        started_s = time.monotonic()
        server.complete("quick", max_tokens=5)
        assert time.monotonic() - started_s < 10
        assert sum(1 for line in lines if line.startswith("data: {")) == 1899
