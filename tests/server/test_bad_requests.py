"""Whatever a client sends, it gets an answer that names the fault, and nobody else notices."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyjax.server.protocol import UNSUPPORTED, ChatBody, CompletionBody
from tests.server.serving import MAX_MODEL_LEN, VOCAB_SIZE, Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """After each test the server answers as ever, and nothing is left in the engine."""
    yield
    assert server.complete("abc", max_tokens=4)["choices"][0]["text"] == "abca"
    assert server.process.poll() is None


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    """Checks an OpenAI error body; returns its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    message: str = error["message"]
    assert message
    return message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**6),
        ("n", 10**30),
        ("n", "two"),
        ("seed", 2**70),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("min_tokens", 100),
        ("frequency_penalty", 3),
        ("presence_penalty", -3),
        ("repetition_penalty", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 1000),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["x"] * 65),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop_token_ids", 3),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("logit_bias", {"7": 1000}),
        ("logit_bias", {"seven": 1}),
        ("logit_bias", {str(VOCAB_SIZE): 1}),
        ("logit_bias", [1]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 10**6),
        ("stream", "yes"),
        ("priority", 2**63),
        ("cache_salt", ""),
        ("request_id", "x" * 300),
        ("numerics", 3),
    ],
)
def test_values_out_of_range_and_of_wrong_types(server: Server, field: str, value: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 2, field: value}
    message = refused(server.post(TEXT, body), 400, field)
    assert field in message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
def test_numbers_that_are_none(server: Server, field: str, literal: str) -> None:
    raw = f'{{"prompt": "hi", "{field}": {literal}}}'
    refused(server.http.post(TEXT, content=raw), 400, field)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        ["fine", ""],
        [VOCAB_SIZE],
        [-1],
        [2**62],
        [10**40],
        [1.5],
        [1, "a"],
        [[1], "a"],
        [True],
        {"a": 1},
        7,
        None,
    ],
)
def test_prompts_that_are_none(server: Server, prompt: Any) -> None:
    assert "prompt" in refused(server.post(TEXT, {"prompt": prompt}), 400, "prompt")


def test_a_missing_prompt(server: Server) -> None:
    refused(server.post(TEXT, {}), 400, "prompt")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ""}], "messages"),  # a template that renders to nothing
        (["hi"], "messages[0]"),
    ],
)
def test_messages_that_are_none(server: Server, messages: Any, param: str) -> None:
    refused(server.post(CHAT, {"messages": messages}), 400, param)


def test_tools_that_the_chat_template_does_not_take(server: Server) -> None:
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for path in (CHAT, "/tokenize"):
        message = refused(server.post(path, body), 400, "tools")
        assert "takes no tools" in message and "--chat_template" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("guided_whitespace_pattern", " ?"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("best_of", 3),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("chat_template", "{{ evil }}"),
        ("echo", True),
    ],
)
def test_fields_not_supported_are_refused(server: Server, field: str, value: Any) -> None:
    body = {"messages": USER, "max_tokens": 2, field: value}
    assert "not supported" in refused(server.post(CHAT, body), 400, field) or (
        field == "chat_template"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("best_of", 1),
        ("echo", False),
        ("guided_json", None),
        ("parallel_tool_calls", True),
        ("user", "me"),
        ("metadata", {"a": "b"}),
    ],
)
def test_fields_that_ask_for_nothing_pass(server: Server, field: str, value: Any) -> None:
    body = {"messages": USER, "max_tokens": 2, field: value}
    assert server.post(CHAT, body).status_code == 200


def test_suffix_is_refused(server: Server) -> None:
    refused(server.post(TEXT, {"prompt": "a", "suffix": "b"}), 400, "suffix")


@pytest.mark.parametrize("value", [["a"], [-1], [2**40], [None]])
def test_a_wrong_element_is_pointed_at(server: Server, value: Any) -> None:
    body = {"prompt": "hi", "stop_token_ids": value}
    refused(server.post(TEXT, body), 400, "stop_token_ids[0]")


def test_combinations(server: Server) -> None:
    chat = {"messages": USER, "max_tokens": 2}
    refused(server.post(CHAT, {**chat, "top_logprobs": 2}), 400, "top_logprobs")
    over = {**chat, "logprobs": True, "top_logprobs": 21}
    refused(server.post(CHAT, over), 400, "top_logprobs")
    options = {**chat, "stream_options": {"include_usage": True}}
    assert "stream" in refused(server.post(CHAT, options), 400, None)
    refused(server.post(CHAT, {**chat, "max_tokens": 0}), 400, "max_tokens")
    refused(server.post(TEXT, {"prompt": "a", "max_tokens": 0}), 400, "max_tokens")
    both = {**chat, "add_generation_prompt": True, "continue_final_message": True}
    refused(server.post(CHAT, both), 400, "continue_final_message")
    reserved = {**chat, "chat_template_kwargs": {"messages": []}}
    refused(server.post(CHAT, reserved), 400, "chat_template_kwargs")
    crowd = {"prompt": ["a"] * 100, "n": 100, "max_tokens": 1}
    refused(server.post(TEXT, crowd), 400, "n")


def test_a_context_overflow_tells_the_lengths(server: Server) -> None:
    message = refused(server.post(TEXT, {"prompt": [1] * 2000, "max_tokens": 100}), 400, "prompt")
    assert str(MAX_MODEL_LEN) in message and "2100" in message and "2000" in message
    content = "x" * (MAX_MODEL_LEN + 1)
    body = {"messages": [{"role": "user", "content": content}]}
    assert str(MAX_MODEL_LEN) in refused(server.post(CHAT, body), 400, "messages")


def test_an_unknown_model(server: Server) -> None:
    body = {"prompt": "a", "model": "gpt-17"}
    assert "gpt-17" in refused(server.post(TEXT, body), 404, "model")
    refused(server.http.get("/v1/models/gpt-17"), 404, "model")
    refused(server.post("/tokenize", {"prompt": "a", "model": "gpt-17"}), 404, "model")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"prompt"',
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "\xff\xfe"}',
        b"\x00" * 100,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"extra": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json(server: Server, path: str, raw: bytes) -> None:
    response = server.http.post(path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_a_body_over_the_limit(server: Server) -> None:
    size = (32 << 20) + 1
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
        connection.sendall(head.encode())  # the answer does not wait for the body
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    with httpx.Client(base_url=server.url, timeout=30) as http:
        try:
            response = http.post(TEXT, content=pieces())
        except httpx.WriteError:
            return  # refused and closed while still sending
        refused(response, 413, None)


def test_paths_and_methods(server: Server) -> None:
    refused(server.http.get("/v2/nothing"), 404, None)
    refused(server.http.get(TEXT), 405, None)
    refused(server.http.delete("/v1/models"), 405, None)


def test_tokenizer_routes(server: Server) -> None:
    refused(server.post("/tokenize", {}), 400, "prompt")
    refused(server.post("/tokenize", {"prompt": "a", "messages": USER}), 400, "prompt")
    refused(server.post("/tokenize", {"prompt": 3}), 400, "prompt")
    refused(server.post("/detokenize", {"tokens": [VOCAB_SIZE]}), 400, "tokens")
    refused(server.post("/detokenize", {"tokens": "a"}), 400, "tokens")
    refused(server.post("/detokenize", {"tokens": [-1]}), 400, "tokens[0]")


def test_not_even_http(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for raw in (b"\x16\x03\x01\x02\x00\x01" * 50, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 1000, b"x"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx: ", b"GET /"])
def test_a_head_without_an_end(server: Server, start: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(start)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * 10_000)


def test_many_requests_on_one_connection(server: Server) -> None:
    """The limit of a head is not one of a connection."""
    for _ in range(40):
        assert server.http.get("/health", headers={"x": "a" * 4000}).status_code == 200


def test_header_injection(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1, "request_id": "x\r\nset-cookie: a=b"}
    response = server.post(TEXT, body)
    assert response.status_code == 200
    assert "set-cookie" not in response.headers


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["hi", 1, 0.5, -1, 2**31, 2**63, [1, 2], "\udc00"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *UNSUPPORTED, "unknown"})


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize"]),
    base=st.sampled_from([{"prompt": "hi"}, {"messages": USER}, {"tokens": [1]}, {}]),
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4),
)
def test_random_bodies_get_an_answer(
    server: Server, path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    raw = json.dumps({"max_tokens": 3, **base, **fields})
    started_s = time.monotonic()
    response = server.http.post(path, content=raw)
    assert time.monotonic() - started_s < 10
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(path=st.sampled_from([CHAT, TEXT, "/tokenize"]), raw=st.binary(max_size=200))
def test_random_bytes_get_an_answer(server: Server, path: str, raw: bytes) -> None:
    assert server.http.post(path, content=raw).status_code == 400
