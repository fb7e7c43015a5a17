"""The `langchain-openai` client against a server.

See report.py.
"""

from __future__ import annotations

import importlib.metadata
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from report import Checks, arguments

QUESTION = "What is the capital of France?"


class Place(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


def main() -> None:
    given = arguments()
    url, model = given.url, given.model
    checks = Checks("langchain-openai", importlib.metadata.version("langchain-openai"))
    settings = {"base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(model=model, max_completion_tokens=64, **settings)

    @checks.run("invoke, with usage")
    def _invoke() -> None:
        answer = chat.invoke(QUESTION)
        assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 0, answer

    @checks.run("stream")
    def _stream() -> None:
        assert "Paris" in "".join(chunk.content for chunk in chat.stream(QUESTION))

    @checks.run("batch")
    def _batch() -> None:
        assert all("Paris" in answer.content for answer in chat.batch([QUESTION] * 3))

    @checks.run("structured output by JSON schema")
    def _structured() -> None:
        answer = chat.with_structured_output(Place, method="json_schema").invoke(QUESTION)
        assert isinstance(answer, Place), answer

    @checks.run("structured output by a tool call")
    def _tool() -> None:
        answer = chat.with_structured_output(Place, method="function_calling").invoke(QUESTION)
        assert isinstance(answer, Place), answer

    @checks.run("text completion")
    def _text() -> None:
        text = OpenAI(model=model, max_tokens=4, **settings).invoke("1, 2, 3, 4,")
        assert "5" in text, text

    checks.finish()


if __name__ == "__main__":
    main()
