"""The real `openai` client, against the scripted engine."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.serving import FAIL, Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    [card] = client.models.list().data
    return card.id


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello "}],
        max_completion_tokens=9,
        temperature=0,
    )
    assert answer.choices[0].message.content == "hello hel"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens_details is not None


def test_streamed_chat(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello "}],
        max_completion_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello hel"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage is not None and last.usage.completion_tokens == 9


def test_completion_with_extras(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=["ab", "cd"],
        max_tokens=3,
        temperature=0,
        n=2,
        stop="dc",
        logprobs=1,
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "return_token_ids": True},
    )
    assert [choice.text for choice in answer.choices] == ["aba", "aba", "c", "c"]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2 + ["stop"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b", "a"]


def test_streamed_completion(client: openai.OpenAI, model: str) -> None:
    stream = client.completions.create(
        model=model, prompt="abc", max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "abcab"


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "ab"}],
        max_tokens=2,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes) == ("a", [97])
    assert len(entry.top_logprobs) == 2


def test_errors_are_typed(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt="a", temperature=-1)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=model, prompt=[FAIL], max_tokens=5)
    stream = client.completions.create(model=model, prompt=[FAIL], max_tokens=5, stream=True)
    with pytest.raises(openai.APIError, match="scripted failure"):
        list(stream)
