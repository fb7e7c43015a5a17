"""Cost models: how long a candidate will take, before it runs, and how sure that is.

    model = CostModel(chip)                            # analytical until it has learned
    model = CostModel.load(path, chip)                 # silent where the file does not fit
    model.update(trials, workloads)                    # ledger trials; {workload key: Workload}
    guess = model.predict(kernel, workload, points)    # Prediction: us, low_us, high_us [points]
    prior = model.prior(kernel, workload, points)      # an agent's Predictor: point -> us
    model.save(path)

A trial is learned from if its status is "passed", its `target` is a workload key and its
`candidate` holds {"kernel": name, "schedule": {field: value}} (other keys are ignored). Points are
those of `search.space.legal_schedules(kernel, workload, chip)`.

`search.cost.policy.SearchPolicy` says which points are worth measuring and when to end:

    policy = SearchPolicy(noise_floor=0.01)            # relative, from an A/A run
    keep = policy.keep(guess, best_us)                 # mask: the interval reaches below the best
    gain = best_possible_gain(guess, best_us)          # 0.03: at most 3 % less than the best
    policy.done(guess, best_us)                        # of the unmeasured points: stop?

`low_us` and `high_us` bound a 90 % interval. Where nothing was learned (too few trials, another
feature version, far from what was seen) `us` is the analytical prediction and the interval is wide.
"""

from __future__ import annotations

import dataclasses

import numpy as np

COVERAGE = 0.9


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Microseconds a point: the expected value and the ends of a 90 % interval, each [points].

    `learned` marks the points that the learned part spoke on.
    """

    us: np.ndarray
    low_us: np.ndarray
    high_us: np.ndarray
    learned: np.ndarray

    def __len__(self) -> int:
        return len(self.us)

    def __getitem__(self, index: np.ndarray) -> Prediction:
        return Prediction(
            self.us[index], self.low_us[index], self.high_us[index], self.learned[index]
        )
