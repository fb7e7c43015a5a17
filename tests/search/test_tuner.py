"""The search's loop ends when nothing is left to gain; other tests run it on real measurements."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from search import tuner as loop
from search.agents.random import Random
from search.cost import Prediction
from search.cost.learned import CostModel
from search.job_process import Answer
from search.ledger import Ledger
from search.measure import Measurement
from search.op_bench import OpenedOp
from search.paired import Effort
from search.space import Space
from search.targets import Job, OpTarget
from search.tuner import Budget, Tuner
from tests.search.cost.synthetic import H200, STREAM, matmul, microseconds, points_of

SPACE = Space([(("n", n),) for n in range(12)])


@dataclasses.dataclass
class ToyTarget:
    """Every point costs 100 us; `low_us` is what the model says may still be there."""

    low_us: float | None
    name = "toy"
    space = SPACE
    start = SPACE.points[0]
    asked: list = dataclasses.field(default_factory=list)

    def key(self, point):
        return f"toy {point}"

    def candidate(self, point):
        return dict(point)

    def point(self, candidate):
        return (("n", candidate["n"]),)

    def jobs(self, point):
        return [Job(str(point), print, ())]

    def prerequisites(self):
        return []

    def final_jobs(self, point):
        return []

    def measured(self, point, incumbent):
        return (point,)

    def samples_us(self, arms, arm):
        return arms["op"][arm]

    def predicted_us(self, point):
        return None

    def winner(self, point):
        return {}

    def forecast(self, costs_us):
        self.asked.append(len(costs_us))
        if self.low_us is None:
            return None
        us = np.full(len(SPACE) - len(costs_us), 120.0)
        return Prediction(us, np.full_like(us, self.low_us), us, us > 0)


class ToyPool:
    """Compiles at once; each candidate is another program."""

    size = 1

    def __init__(self):
        self.done = []

    @property
    def pending(self):
        return len(self.done)

    def submit(self, tag, function, *arguments):
        self.done.append((tag, Answer("ok", {"digest": str(tag), "lower_s": 0, "compile_s": 0})))

    def poll(self, wait_s=0.0):
        done, self.done = self.done, []
        return done

    def pause(self): ...

    def resume(self): ...


class ToyMeasurer:
    """An A/A run shows 0.6 %."""

    def measure(self, point):
        jitter = [1.0 + 0.01 * (n % 3) for n in range(20)]
        arms = {"candidate_us": [100.0 * j for j in jitter], "incumbent_us": [100.0] * 20}
        return Measurement(
            "passed",
            arms={"op": arms},
            noise={"op": {"first_us": jitter, "second_us": [1.01] * 20}},
        )


@pytest.mark.parametrize(
    ("low_us", "trials"),
    [
        (100.5, 4),  # half a percent below the best, within the noise
        (102.0, 4),
        (80.0, 12),  # a fifth may be there
        (None, 12),  # no model
    ],
)
def test_a_search_ends_when_what_may_be_left_is_noise(low_us, trials, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "FIRST_FORECAST", 4)
    monkeypatch.setattr(loop, "SearchPolicy", functools.partial(loop.SearchPolicy, min_trials=4))
    target = ToyTarget(low_us)
    tuner = Tuner(
        Ledger(tmp_path / "ledger.sqlite", {"machine": "toy"}),
        target,
        ToyMeasurer(),
        ToyPool(),
        Random(SPACE, 0),
        Budget(),
        Effort(max_pairs=20),
    )
    tuner.run()
    assert tuner.new_trials == trials and tuner.is_settled == (trials < len(SPACE))
    assert target.asked == ([4] if trials == 4 else [4, 6, 9])


def test_a_forecast_learns_of_the_schedules_that_were_tried(tmp_path):
    workload = matmul(8, 3072, 2048)
    opened = OpenedOp(H200.kind if H200.platform == "tpu" else H200.name, "gpu", {}, None, None)
    target = OpTarget(workload, opened, tmp_path, STREAM.name, cost_model=CostModel(H200))
    tried = points_of(workload, 96)
    costs = {point: microseconds(workload, point) for point in tried} | {tried[0]: None}
    few = target.forecast({point: costs[point] for point in tried[:8]})
    assert len(few) == len(target.space) - 8 and not few.learned.any()
    left = target.forecast(costs)
    assert len(left) == len(target.space) - 96 and left.learned.mean() > 0.5
    forms = OpTarget(workload, opened, tmp_path, cost_model=CostModel(H200))
    assert forms.forecast({}) is None
