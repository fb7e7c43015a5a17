"""What /v1/completions and /v1/chat/completions answer, whole. The engine repeats the prompt."""

from typing import Any

import pytest

from tests.server.serving import BLOCK_SIZE, EOS, MAX_MODEL_LEN, Server, wait_for


def ids(text: str, server: Server) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


def chat(server: Server, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_chat_shape(server: Server) -> None:
    answer = chat(server, "hello ", max_tokens=8)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello he", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 14
    assert answer["system_fingerprint"] == "epoch-0-bounded"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(server: Server, field: str) -> None:
    assert chat(server, "abc", **{field: 4})["choices"][0]["message"]["content"] == "abca"


def test_chat_without_max_tokens_fills_the_context(server: Server) -> None:
    prompt = "a" * (MAX_MODEL_LEN - 40)
    assert chat(server, prompt)["usage"]["completion_tokens"] == 40


def test_text_parts_of_a_message(server: Server) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 5, "temperature": 0}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "ab\ncd"


def test_template_variables_and_continuation(server: Server) -> None:
    answer = chat(server, "ab", max_tokens=6, chat_template_kwargs={"suffix": "!?"})
    assert answer["choices"][0]["message"]["content"] == "ab!?ab"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "max_tokens": 7,
        "temperature": 0,
        "chat_template_kwargs": {"suffix": "!?"},
    }
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "qso far"


def test_all_prompt_forms(server: Server) -> None:
    def texts(prompt: Any) -> list[str]:
        return [c["text"] for c in server.complete(prompt, max_tokens=3)["choices"]]

    assert texts("xy") == ["xyx"]
    assert texts(["xy", "z"]) == ["xyx", "zzz"]
    assert texts(ids("xy", server)) == ["xyx"]
    assert texts([ids("xy", server), ids("z", server)]) == ["xyx", "zzz"]


def test_default_of_16_completion_tokens_yields_to_the_context(server: Server) -> None:
    assert server.complete("a")["usage"]["completion_tokens"] == 16
    near_the_end = server.complete([1] * (MAX_MODEL_LEN - 5))
    assert near_the_end["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("prompt_length", [3, BLOCK_SIZE + 1])
def test_n_choices_with_seeds_of_their_own(server: Server, prompt_length: int) -> None:
    prompt = "abcdefghijklmnopqrstuvwxyz"[:prompt_length]
    fields = {"n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 1}
    answer = server.complete([prompt, prompt.upper()], **fields)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]
    shifted = (prompt * 2)[1:4]  # the scripted engine starts where the seed says
    assert texts == [*shifted, *shifted.upper()]
    assert answer["usage"]["prompt_tokens"] == 2 * prompt_length  # each prompt counts once
    assert answer["usage"]["completion_tokens"] == 6


def test_stop_strings_and_tokens(server: Server) -> None:
    stopped = server.complete("one two three ", max_tokens=50, stop=["wo t", "zzz"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("one t", "stop")
    assert stopped["stop_reason"] == "wo t"
    kept = server.complete("one two ", max_tokens=50, stop="wo", include_stop_str_in_output=True)[
        "choices"
    ][0]
    assert kept["text"] == "one two"
    [letter] = ids("w", server)
    by_token = server.complete("one two ", max_tokens=50, stop_token_ids=[letter])["choices"][0]
    assert (by_token["text"], by_token["stop_reason"]) == ("one t", letter)


def test_stop_strings_wait_for_min_tokens(server: Server) -> None:
    choice = server.complete("abc", max_tokens=9, min_tokens=4, stop="c")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcab", "stop")


def test_a_stop_string_frees_the_engine_at_once(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    server.complete("abc", max_tokens=2000, stop="ca", ignore_eos=True)
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "the request to leave")
    assert server.metric("vllm:generation_tokens_total") - before < 1000


def test_text_held_back_for_a_stop_string_is_not_lost(server: Server) -> None:
    choice = server.complete("abcd", max_tokens=3, stop="bcx")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")


def test_eos_min_tokens_and_ignore_eos(server: Server) -> None:
    prompt = [*ids("ab", server), EOS]
    ended = server.complete(prompt, max_tokens=8)["choices"][0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("ab", "stop", None)
    assert server.complete(prompt, max_tokens=8, min_tokens=4)["usage"]["completion_tokens"] == 6
    ignored = server.complete(prompt, max_tokens=8, ignore_eos=True)["choices"][0]
    assert (ignored["text"], ignored["finish_reason"]) == ("ababab", "length")
    shown = server.complete(prompt, max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "ab<|end|>a"


def test_characters_of_several_tokens(server: Server) -> None:
    text = "naïve 日本 🙂"
    tokens = len(ids(text, server))
    assert tokens > len(text)
    assert server.complete(text, max_tokens=tokens)["choices"][0]["text"] == text
    # Cut within the last character, what is there of it shows as the replacement character.
    cut = server.complete(text, max_tokens=tokens - 1)["choices"][0]["text"]
    assert cut == text[:-1] + "\ufffd"


def test_chat_logprobs(server: Server) -> None:
    answer = chat(server, "ab", max_tokens=2, logprobs=True, top_logprobs=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -0.25)
    assert [top["token"] for top in first["top_logprobs"]] == ["a", "b"]
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.25, -0.5]
    assert second["token"] == "b"
    plain = chat(server, "ab", max_tokens=2, logprobs=True)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_echo_and_logprobs_as_evaluation_harnesses_ask(server: Server) -> None:
    """A harness scores ids[ctxlen:] by reading token_logprobs[ctxlen:-1] of max_tokens 1."""
    prompts = [ids("abcd", server), ids("xyz", server)]
    answer = server.complete(prompts, max_tokens=1, echo=True, logprobs=1)
    first, second = sorted(answer["choices"], key=lambda c: c["index"])
    assert (first["text"], second["text"]) == ("abcda", "xyzx")
    scores = first["logprobs"]
    assert scores["tokens"] == ["a", "b", "c", "d", "a"]
    assert scores["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert scores["top_logprobs"] == [None, {"b": -0.25}, {"c": -0.25}, {"d": -0.25}, {"a": -0.25}]
    assert scores["text_offset"] == [0, 1, 2, 3, 4]


def test_echo_with_max_tokens_0_only_scores_the_prompt(server: Server) -> None:
    answer = server.complete("abc", max_tokens=0, echo=True, logprobs=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_with_n_scores_every_choice(server: Server) -> None:
    answer = server.complete("abc", n=2, max_tokens=1, echo=True, logprobs=1)
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25]


def test_prompt_logprobs(server: Server) -> None:
    [choice] = server.complete("ab", max_tokens=1, prompt_logprobs=1)["choices"]
    [letter] = ids("b", server)
    expected = {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert choice["prompt_logprobs"] == [None, {str(letter): expected}]
    assert choice["logprobs"] is None


def test_token_ids_in_answers(server: Server) -> None:
    prompt = ids("abc", server)
    [choice] = server.complete("abc", max_tokens=4, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == [*prompt, prompt[0]]
    [choice] = server.complete("abc", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{prompt[0]}"]


def test_truncated_prompts(server: Server) -> None:
    assert (
        server.complete("abcdef", max_tokens=2, truncate_prompt_tokens=2, echo=True)["choices"][0][
            "text"
        ]
        == "efef"
    )
    long = "x" * (MAX_MODEL_LEN * 2)
    answer = server.complete(long, max_tokens=10, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 10


def test_request_ids(server: Server) -> None:
    assert server.complete("a", max_tokens=1, request_id="mine")["id"] == "cmpl-mine"
    response = server.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "theirs"}
    )
    assert response.json()["id"] == "cmpl-theirs"


def test_equal_request_ids_do_not_meet(server: Server) -> None:
    body = {"prompt": "ab", "max_tokens": 200, "request_id": "same", "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        assert (
            server.complete("xyz", max_tokens=3, request_id="same")["choices"][0]["text"] == "xyz"
        )
        assert sum(1 for line in lines if line.startswith("data: {")) == 199


def test_unknown_fields_are_ignored_and_logged_once(server: Server) -> None:
    for _ in range(2):
        server.complete("a", max_tokens=1, a_field_of_the_future=1)
    assert server.log.count("a_field_of_the_future") == 1


def test_tokenizer_routes(server: Server) -> None:
    tokens = server.post("/tokenize", {"prompt": "hé!"}).json()
    assert tokens["count"] == 4 == len(tokens["tokens"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    back = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "hé!"}
    messages = [{"role": "user", "content": "ab"}]
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == ids("ab", server)
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>"
    assert "message.content" in info["chat_template"]


def test_models(server: Server) -> None:
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["max_model_len"] == MAX_MODEL_LEN
    assert server.http.get(f"/v1/models/{card['id']}").json() == card
    assert server.complete("a", max_tokens=1, model=card["id"])["model"] == card["id"]


def test_probes(server: Server) -> None:
    for path in ("/health", "/ping", "/ready", "/version"):
        assert server.http.get(path).status_code == 200
