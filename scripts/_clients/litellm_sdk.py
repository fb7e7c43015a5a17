"""The `litellm` client against a server: See report.py."""

from __future__ import annotations

import asyncio
import importlib.metadata

import litellm
from report import Checks, arguments

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    given = arguments()
    url, model = given.url, given.model
    checks = Checks("litellm", importlib.metadata.version("litellm"))
    settings = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 16}

    @checks.run("chat completion as an OpenAI-compatible server")
    def _chat() -> None:
        answer = litellm.completion(model=f"openai/{model}", messages=QUESTION, **settings)
        assert "Paris" in answer.choices[0].message.content, answer

    @checks.run("chat completion as a hosted vLLM")
    def _hosted() -> None:
        answer = litellm.completion(model=f"hosted_vllm/{model}", messages=QUESTION, **settings)
        assert "Paris" in answer.choices[0].message.content, answer

    @checks.run("streamed, asynchronous")
    def _streamed() -> None:
        async def collect() -> str:
            stream = await litellm.acompletion(
                model=f"hosted_vllm/{model}", messages=QUESTION, stream=True, **settings
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert "Paris" in asyncio.run(collect())

    @checks.run("text completion")
    def _text() -> None:
        answer = litellm.text_completion(
            model=f"text-completion-openai/{model}", prompt="1, 2, 3, 4,", **settings
        )
        assert "5" in answer.choices[0].text, answer

    @checks.run("typed errors")
    def _errors() -> None:
        try:
            litellm.completion(model="openai/no-such-model", messages=QUESTION, **settings)
        except litellm.NotFoundError:
            return
        raise AssertionError("no NotFoundError")

    checks.finish()


if __name__ == "__main__":
    main()
