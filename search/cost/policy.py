"""When the search may skip a point, and when it may end: decided on a cost model's intervals."""

from __future__ import annotations

import dataclasses

import numpy as np

from search.cost import Prediction


def best_possible_gain(unmeasured: Prediction, best_us: float) -> float:
    """Returns the largest share of `best_us` that an unmeasured point may still save, at least 0.

    It is what the lowest end of the intervals promises; 0 where nothing is left to measure.
    """
    if not len(unmeasured) or best_us <= 0:
        return 0.0
    return max(0.0, 1.0 - float(unmeasured.low_us.min()) / best_us)


@dataclasses.dataclass(frozen=True)
class SearchPolicy:
    """`noise_floor` is the relative difference that an A/A run shows; smaller gains do not exist.

    The search goes on for at least `min_trials` measured points, whatever the model says.
    """

    noise_floor: float = 0.01
    min_trials: int = 8

    def keep(self, unmeasured: Prediction, best_us: float) -> np.ndarray:
        """Returns a mask of the points whose interval reaches below the best by more than noise."""
        return unmeasured.low_us < best_us * (1.0 - self.noise_floor)

    def order(self, unmeasured: Prediction) -> np.ndarray:
        """Returns the indices of the points, most promising first; ties keep their order."""
        return np.argsort(unmeasured.us, kind="stable")

    def done(self, unmeasured: Prediction, best_us: float, trials: int | None = None) -> bool:
        """Whether to end: nothing left could beat the best by more than the noise floor."""
        if trials is not None and trials < self.min_trials and len(unmeasured):
            return False
        return best_possible_gain(unmeasured, best_us) <= self.noise_floor
