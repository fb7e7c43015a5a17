"""The learned cost model: the analytical one, corrected by what was measured, with intervals.

One ensemble a kernel (network.py). Its intervals are conformal: residuals of models that had not
seen a row, over the ensemble's own deviation, and their 90 % quantile; by rows for workloads that
were measured, by whole workloads for those that were not (Vovk, Gammerman and Shafer 2005;
cross-conformal: Barber et al. 2021). It is silent, and the prediction analytical, where it has too
few rows, where another feature version wrote it, and far from what it was trained on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from polyjax.core.chips import ChipSpec
from polyjax.core.errors import ConfigError, ScheduleError
from polyjax.core.op import Kernel, Workload
from search.cost import COVERAGE, Prediction, features, network
from search.cost.features import Schema
from search.cost.observations import Observations, Scaling, measured
from search.kernels import kernel_named
from search.ledger import Trial
from search.space import Point

log = logging.getLogger("polyjax.search")

MIN_TRIALS = 32  # rows below which a kernel has no learned model
KNOWN_ROWS = 16  # of a workload, for the interval of known workloads
GROWTH = 1.1  # rows over those of the last training at which it is trained again
FOLDS = 4
WIDE = 2.0  # the analytical model's factor: all 50 measured schedules lie within 1.7
WIDEST = math.log(2 * WIDE)  # half width of a log interval where too few workloads were seen
LEAST_DEVIATION = 0.02  # of a log ratio: members that agree are not certain
FLOOR_SLACK = 0.9  # reads were measured 6 % above the bandwidth that the roofline takes
REACH, LEAST_REACH = 0.25, 1.0  # see Scaling.within


@dataclasses.dataclass(frozen=True)
class Fitted:
    """One kernel's trained ensemble. Quantiles of |log residual| over deviation, by row and by
    whole workload (infinite where there were too few workloads to tell).
    """

    params: nnx.State
    scaling: Scaling
    row_quantile: float
    workload_quantile: float
    rows: int


class CostModel:
    """Predicts microseconds of schedules on one chip; learns from trials. See search.cost."""

    def __init__(self, chip: ChipSpec, seed: int = 0):
        self.chip = chip
        self.seed = seed
        self._observed: dict[str, Observations] = {}
        self._fitted: dict[str, Fitted] = {}

    # -- predicting --------------------------------------------------------------------------

    def predict(self, kernel: Kernel, workload: Workload, points: Sequence[Point]) -> Prediction:
        """Returns the microseconds of legal points. Raises ScheduleError for malformed ones."""
        rows = features.rows(kernel, workload, points, self.chip)
        us, learned = rows.analytical_us.copy(), np.zeros(len(points), bool)
        low, high = us / WIDE, us * WIDE
        fitted = self._fitted.get(Schema.of(kernel, workload).digest)
        if fitted is not None and points:
            learned = fitted.scaling.within(rows.x, REACH, LEAST_REACH)
            ratio, half = self._corrected(fitted, kernel, workload, rows.x)
            us = np.where(learned, us * np.exp(ratio), us)
            low = np.where(learned, us * np.exp(-half), low)
            high = np.where(learned, us * np.exp(half), high)
        low = np.maximum(low, FLOOR_SLACK * rows.floor_us)
        us = np.maximum(us, low)
        return Prediction(us, low, np.maximum(high, us), learned)

    def _corrected(
        self, fitted: Fitted, kernel: Kernel, workload: Workload, x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns log ratio and half width of its interval, [points]."""
        ratio, deviation = network.predict(fitted.params, fitted.scaling.standardised(x))
        observed = self._observed[Schema.of(kernel, workload).digest]
        known = observed.workloads.count(workload.key) >= KNOWN_ROWS
        quantile = fitted.row_quantile if known else fitted.workload_quantile
        half = np.minimum(quantile * _scale(deviation), WIDEST)
        return ratio, half

    def prior(
        self, kernel: Kernel, workload: Workload, points: Sequence[Point] = ()
    ) -> Callable[[Point], float]:
        """Returns an agent's Predictor: the expected microseconds of one point, as of now.

        Those of `points` are found at once, which is much faster than one by one.
        """
        guess = self.predict(kernel, workload, points)
        known = dict(zip(points, guess.us.tolist(), strict=True))

        def us(point: Point) -> float:
            if point not in known:
                known[point] = float(self.predict(kernel, workload, [point]).us[0])
            return known[point]

        return us

    def why_silent(self, kernel: Kernel, workload: Workload) -> str | None:
        """Returns None where the learned part speaks on a workload's usual points, or why not."""
        digest = Schema.of(kernel, workload).digest
        if digest in self._fitted:
            return None
        rows = len(self._observed.get(digest, ()))
        return f"{rows} measured schedules of {kernel.name}; it needs {MIN_TRIALS}"

    # -- learning ----------------------------------------------------------------------------

    def update(self, trials: Sequence[Trial], workloads: Mapping[str, Workload]) -> int:
        """Learns from ledger trials; trains again where enough is new. Returns the new rows.

        Trials of unknown kernels, workloads or fields are passed over: a ledger outlives them.
        """
        new = 0
        for row in filter(None, (measured(trial, workloads) for trial in trials)):
            try:
                kernel = kernel_named(row.kernel)
                new += self.learn(kernel, row.workload, [row.point], np.array([row.us]), fit=False)
            except (ConfigError, ScheduleError, TypeError) as error:
                log.info("cost model: trial of %s passed over: %s", row.kernel, error)
        self.fit()
        return new

    def learn(
        self,
        kernel: Kernel,
        workload: Workload,
        points: Sequence[Point],
        us: np.ndarray,
        *,
        fit: bool = True,
    ) -> int:
        """Adds measured points of one workload; returns how many were new."""
        schema = Schema.of(kernel, workload)
        observed = self._observed.setdefault(schema.digest, Observations(schema))
        new = observed.add(workload.key, features.rows(kernel, workload, points, self.chip), us)
        if fit:
            self.fit()
        return new

    def fit(self) -> None:
        """Trains every kernel that has enough rows, and enough that its last training lacked."""
        for digest, observed in self._observed.items():
            last = self._fitted.get(digest)
            wanted = MIN_TRIALS if last is None else math.ceil(GROWTH * last.rows)
            if len(observed) >= wanted:
                self._fitted[digest] = _fit(observed, self.seed)

    # -- keeping -----------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes rows and networks; the version before stays until the new one is whole."""
        arrays: dict[str, Any] = {}
        meta: dict[str, Any] = {"version": features.VERSION, "chip": self.chip.name, "kernels": {}}
        for digest, observed in self._observed.items():
            arrays[digest] = {"rows": observed.to_arrays()}
            entry: dict[str, Any] = dataclasses.asdict(observed.schema)
            entry["workloads"] = observed.workloads
            fitted = self._fitted.get(digest)
            if fitted is not None:
                arrays[digest]["params"] = nnx.to_pure_dict(fitted.params)
                arrays[digest]["scaling"] = dataclasses.asdict(fitted.scaling)
                entry["quantiles"] = [fitted.row_quantile, fitted.workload_quantile]
                entry["rows"] = fitted.rows
            meta["kernels"][digest] = entry
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        with ocp.CheckpointManager(Path(path).absolute(), options=options) as manager:
            step = (manager.latest_step() or 0) + 1
            args = ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), meta=ocp.args.JsonSave(meta)
            )
            manager.save(step, args=args)

    @classmethod
    def load(cls, path: str | Path, chip: ChipSpec, seed: int = 0) -> Self:
        """Returns the model in `path`. What does not fit is left out, with a warning in the log."""
        model = cls(chip, seed)
        directory = Path(path).absolute()
        if not directory.exists():
            return model
        try:
            meta, arrays = _read(directory)
            reason = _misfit(meta, chip)
        except Exception as error:  # whatever is wrong with it, predictions can do without
            reason = f"unreadable: {error!r}"
        if reason is not None:
            log.warning("cost model %s is not used: %s", path, reason)
            return model
        for digest, entry in meta["kernels"].items():
            schema = Schema(entry["kernel"], tuple(entry["knobs"]), tuple(entry["axes"]))
            if schema.digest == digest:
                model._adopt(schema, entry, arrays[digest])
        return model

    def _adopt(self, schema: Schema, entry: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        workloads = entry["workloads"]
        observed = Observations.from_arrays(schema, arrays["rows"], workloads)
        self._observed[schema.digest] = observed
        if "quantiles" not in entry:
            return
        width = len(schema.names)
        params = nnx.state(nnx.eval_shape(lambda: network.Residual(width, nnx.Rngs(0))))
        nnx.replace_by_pure_dict(params, arrays["params"])
        by_row, by_workload = entry["quantiles"]
        self._fitted[schema.digest] = Fitted(
            params, Scaling(**arrays["scaling"]), by_row, by_workload, entry["rows"]
        )


def _read(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns metadata and arrays of the newest whole version."""
    with ocp.CheckpointManager(directory) as manager:
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(), meta=ocp.args.JsonRestore())
        restored = manager.restore(manager.latest_step(), args=args)
    return restored["meta"], restored["arrays"]


def _misfit(meta: Mapping[str, Any], chip: ChipSpec) -> str | None:
    if meta["version"] != features.VERSION:
        return f"feature version {meta['version']}, this polyjax has {features.VERSION}"
    return None if meta["chip"] == chip.name else f"learned on {meta['chip']}, not {chip.name}"


def _scale(deviation: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(deviation) + LEAST_DEVIATION**2)


def _fit(observed: Observations, seed: int) -> Fitted:
    scaling = Scaling.of(np.asarray(observed.x))
    everything = observed.training_rows(scaling, np.ones(len(observed), bool))
    params = network.train(everything, seed)
    by_row = np.random.default_rng(seed).permutation(len(observed)) % FOLDS
    by_workload = observed.groups % FOLDS
    return Fitted(
        params,
        scaling,
        _quantile(observed, scaling, by_row, seed),
        _quantile(observed, scaling, by_workload, seed)
        if len(set(by_workload.tolist())) == FOLDS
        else math.inf,
        len(observed),
    )


def _quantile(observed: Observations, scaling: Scaling, folds: np.ndarray, seed: int) -> float:
    """Returns the conformal quantile of the scores of rows by models that did not see their fold.

    ceil((n + 1) * coverage) of n scores: the finite-sample correction.
    """
    scores = np.empty(len(observed))
    x = scaling.standardised(np.asarray(observed.x))
    residual = np.asarray(observed.log_measured) - np.asarray(observed.log_base)
    for fold in range(FOLDS):
        out = folds == fold
        params = network.train(observed.training_rows(scaling, ~out), seed + 1 + fold)
        ratio, deviation = network.predict(params, x[out])
        scores[out] = np.abs(residual[out] - ratio) / _scale(deviation)
    rank = min(len(scores), math.ceil((len(scores) + 1) * COVERAGE))
    return float(np.sort(scores)[rank - 1])
