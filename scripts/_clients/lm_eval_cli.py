"""lm-eval's `local-completions` with the server's tokenizer, on tasks of our own; see report.py.

The tasks are written here: a few lines each, so that nothing is fetched. They ask for what the
three kinds of lm-eval's requests ask for: likelihoods of choices, of a running text, and answers.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import Any

from report import Arguments, Checks, arguments, run_command

CHOICES = (
    ("The capital of France is", ("Paris", "banana", "seven", "running"), 0),
    ("Water freezes at zero degrees", ("purple", "Celsius", "sandwich", "kilometres"), 1),
    ("The opposite of hot is", ("table", "blue", "cold", "music"), 2),
    ("A week has seven", ("moons", "oceans", "hours", "days"), 3),
    ("The sun rises in the", ("east", "spoon", "keyboard", "cheese"), 0),
    ("Two plus two equals", ("elephant", "four", "Tuesday", "green"), 1),
)
ANSWERS = (("1, 2, 3, 4,", "5"), ("10, 20, 30, 40,", "50"))
PROSE = (
    "It was a bright cold day in April, and the clocks were striking thirteen. The quick brown fox "
    "jumps over the lazy dog, and everybody in the village came out to see what had happened."
)
# A model that knows nothing of English spends log2(V) bits a token, about 4 a byte.
MOST_BITS_PER_BYTE = 2.0


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
    """Writes a task and its data; YAML takes JSON for values."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **settings,
    }
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in task.items()]
    (folder / f"{name}.yaml").write_text("".join(lines))


def write_tasks(folder: Path) -> None:
    write_task(
        folder,
        "choices",
        [{"question": q, "choices": c, "answer": a} for q, c, a in CHOICES],
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="answer",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "answers",
        [{"question": question, "answer": answer} for question, answer in ANSWERS],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [",", "\n"], "max_gen_toks": 8, "temperature": 0},
        filter_list=[
            {
                "name": "stripped",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "prose",
        [{"text": PROSE}],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )


def evaluate(given: Arguments) -> dict[str, dict[str, Any]]:
    """Runs lm-eval; returns its results by task."""
    tasks, output = given.work / "tasks", given.work / "results"
    tasks.mkdir()
    write_tasks(tasks)
    settings = {
        "model": given.model,
        "base_url": f"{given.url}/v1/completions",
        "tokenizer_backend": "remote",
        "num_concurrent": 4,
        "max_length": 1024,
    }
    run_command(
        [
            *("lm_eval", "run", "--model", "local-completions", "--model_args"),
            ",".join(f"{key}={value}" for key, value in settings.items()),
            *("--tasks", "choices,answers,prose", "--include_path", str(tasks)),
            *("--output_path", str(output)),
        ],
        {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    [file] = output.rglob("results_*.json")
    results: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return results


def main() -> None:
    checks = Checks("lm-eval", importlib.metadata.version("lm-eval"))
    results: dict[str, dict[str, Any]] = {}

    @checks.run("local-completions with the remote tokenizer, without a network")
    def _run() -> None:
        results.update(evaluate(arguments()))

    @checks.run("loglikelihood: multiple choice")
    def _choices() -> None:
        assert results["choices"]["acc,none"] >= 5 / 6, results["choices"]

    @checks.run("loglikelihood_rolling: bits per byte of prose")
    def _prose() -> None:
        bits = results["prose"]["bits_per_byte,none"]
        assert math.isfinite(bits) and 0 < bits < MOST_BITS_PER_BYTE, bits

    @checks.run("generate_until with stop strings")
    def _answers() -> None:
        assert results["answers"]["exact_match,stripped"] == 1.0, results["answers"]

    checks.finish()


if __name__ == "__main__":
    main()
