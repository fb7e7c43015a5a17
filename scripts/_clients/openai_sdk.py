"""The `openai` client against a server.

Runs in an environment of its own. Prints a line a check, "pass WHAT" or "FAIL WHAT: WHY", and the
client's version first; exits with 1 if a check failed.
"""

from __future__ import annotations

import json

import openai
from report import Checks, arguments

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    given = arguments()
    url, model = given.url, given.model
    checks = Checks("openai", openai.__version__)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    chat = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 16}

    @checks.run("models")
    def _models() -> None:
        assert client.models.retrieve(model).id == model
        assert [card.id for card in client.models.list().data] == [model]

    @checks.run("chat completion")
    def _chat() -> None:
        answer = client.chat.completions.create(**chat)
        assert "Paris" in answer.choices[0].message.content, answer
        usage = answer.usage
        assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens

    @checks.run("streamed chat completion equals the whole one, with usage")
    def _streamed() -> None:
        whole = client.chat.completions.create(**chat)
        *chunks, last = client.chat.completions.create(
            **chat, stream=True, stream_options={"include_usage": True}
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == whole.choices[0].message.content, text
        assert last.choices == [] and last.usage == whole.usage

    @checks.run("text completion with log-probabilities")
    def _completion() -> None:
        answer = client.completions.create(
            model=model, prompt="1, 2, 3, 4,", temperature=0, max_tokens=4, logprobs=2
        )
        choice = answer.choices[0]
        assert "5" in choice.text and len(choice.logprobs.token_logprobs) == 4, choice

    @checks.run("JSON schema")
    def _schema() -> None:
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = client.chat.completions.create(**{**chat, "max_tokens": 64}, response_format=form)
        assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")

    @checks.run("a required tool call")
    def _tool() -> None:
        answer = client.chat.completions.create(
            **{**chat, "max_tokens": 64},
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    @checks.run("typed errors")
    def _errors() -> None:
        for error, fields in (
            (openai.NotFoundError, {"model": "no-such-model"}),
            (openai.BadRequestError, {"temperature": -1}),
        ):
            try:
                client.chat.completions.create(**{**chat, **fields})
            except error:
                continue
            raise AssertionError(f"no {error.__name__}")

    checks.finish()


if __name__ == "__main__":
    main()
