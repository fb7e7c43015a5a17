"""Scores of arms on tasks, and whether two arms differ beyond noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polyjax.evaluation.arms import Arm
from polyjax.evaluation.intervals import Interval, differs, paired_difference, proportion
from polyjax.evaluation.perplexity import Windows, perplexity
from polyjax.evaluation.tasks import Task


@dataclasses.dataclass(frozen=True)
class Score:
    """One arm on one task. `items` are per-item values in the order of the task's requests.

    `better` is "higher" for graded tasks and "lower" for perplexity, whose items are mean
    log-probabilities of windows.
    """

    arm: str
    task: str
    interval: Interval
    items: tuple[float, ...]
    better: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """First arm minus second on one task, paired by item (perplexity: in mean log-probability)."""

    task: str
    first: str
    second: str
    interval: Interval

    @property
    def beyond_noise(self) -> bool:
        return differs(self.interval)


def score_arm(arm: Arm, tasks: Sequence[Task], text: Windows | None) -> list[Score]:
    """Asks everything in one go and grades it. Raises ConfigError if a request failed."""
    requests = dict(item for task in tasks for item in task.requests())
    if text is not None:
        requests |= dict(text.requests())
    choices = arm.answer(requests)
    scores = [_graded(arm.name, task, choices) for task in tasks]
    if text is not None:
        windows = [text.scores(choices[item]) for item, _ in text.requests()]
        means = tuple(sum(window) / len(window) for window in windows)
        scores.append(Score(arm.name, text.name, perplexity(windows), means, "lower"))
    return scores


def _graded(arm: str, task: Task, choices: Mapping[str, dict[str, object]]) -> Score:
    grades = tuple(task.grade(item, str(choices[item]["text"])) for item, _ in task.requests())
    return Score(arm, task.name, proportion(sum(grades), len(grades)), grades, "higher")


def compare(scores: Sequence[Score]) -> list[Difference]:
    """Returns the difference between the first arm and every other one, task by task."""
    arms = list(dict.fromkeys(score.arm for score in scores))
    by_key = {(score.arm, score.task): score for score in scores}
    tasks = list(dict.fromkeys(score.task for score in scores))
    return [
        Difference(
            task,
            arms[0],
            other,
            paired_difference(by_key[arms[0], task].items, by_key[other, task].items),
        )
        for other in arms[1:]
        for task in tasks
    ]
