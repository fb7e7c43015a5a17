"""The learned part ranks better than the analytical, and knows how sure it is."""

import json
import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from pallas_kernels import CATALOGUE
from polyjax.core.chips import chip
from search.cost import COVERAGE, features
from search.cost.learned import MIN_TRIALS, WIDE, CostModel
from search.ledger import Trial
from tests.search.cost.synthetic import H200, STREAM, matmul, microseconds, points_of, workloads
from tests.search.cost.test_analytical import is_legal

POINTS = 64
HELD_OUT = (2, 7)  # of workloads()


@pytest.fixture(scope="module")
def tables():
    """(workload, points, microseconds) of every workload."""
    made = []
    for workload in workloads():
        points = points_of(workload, POINTS)
        made.append((workload, points, np.array([microseconds(workload, p) for p in points])))
    return made


def trained(tables):
    model = CostModel(H200)
    for number, table in enumerate(tables):
        if number not in HELD_OUT:
            model.learn(STREAM, *table, fit=False)
    model.fit()
    return model


@pytest.fixture(scope="module")
def model(tables):
    return trained(tables)


@pytest.mark.smoke
def test_it_ranks_workloads_it_has_not_seen_better_than_the_analytical_model(model, tables):
    regrets = []
    for number in HELD_OUT:
        workload, points, us = tables[number]
        guess, plain = (m.predict(STREAM, workload, points) for m in (model, CostModel(H200)))
        assert guess.learned.mean() > 0.9 and not plain.learned.any()
        learned, analytical = (spearmanr(p.us, us).statistic for p in (guess, plain))
        assert learned > 0.9 > analytical
        regrets.append([us[np.argmin(p.us)] / us.min() - 1 for p in (guess, plain)])
    learned, analytical = np.mean(regrets, axis=0)
    assert learned < 0.05 and learned < analytical, (learned, analytical)


def test_its_intervals_hold_on_points_and_workloads_it_has_not_seen(model, tables):
    held = [tables[n] for n in HELD_OUT]
    seen = [
        (w, points, np.array([microseconds(w, p) for p in points]))
        for w in (tables[0][0], tables[5][0])
        for points in [points_of(w, POINTS, seed=1)]
    ]
    for sample in (held, seen):
        inside = []
        for workload, points, us in sample:
            guess = model.predict(STREAM, workload, points)
            inside += list((guess.low_us <= us) & (us <= guess.high_us))
        # Two binomial deviations of 128 points below the nominal 0.9.
        assert np.mean(inside) > COVERAGE - 2 * math.sqrt(COVERAGE * (1 - COVERAGE) / len(inside))


def test_intervals_are_tight_where_it_learned_and_wide_where_it_did_not(model, tables):
    workload, points, _ = tables[0]
    guess, plain = (m.predict(STREAM, workload, points) for m in (model, CostModel(H200)))
    width = lambda p: np.median(p.high_us / p.low_us)  # noqa: E731
    assert width(guess) < 1.5 < width(plain) <= WIDE**2
    for p in (guess, plain):
        assert (p.low_us <= p.us).all() and (p.us <= p.high_us).all()


def test_it_is_silent_far_from_what_it_was_trained_on(model):
    far = matmul(8, 128256, 16384)
    points = points_of(far, 8)
    guess = model.predict(STREAM, far, points)
    assert not guess.learned.any()
    assert np.array_equal(guess.us, CostModel(H200).predict(STREAM, far, points).us)


def test_it_is_silent_about_kernels_with_too_few_trials(tables):
    workload, points, us = tables[0]
    few = CostModel(H200)
    few.learn(STREAM, workload, points[: MIN_TRIALS - 1], us[: MIN_TRIALS - 1])
    assert not few.predict(STREAM, workload, points).learned.any()
    assert str(MIN_TRIALS) in few.why_silent(STREAM, workload)
    # The interval of a silent model still never reaches under the roofline by more than noise.
    guess = few.predict(STREAM, workload, points)
    assert (guess.low_us >= 0.9 * features.rows(STREAM, workload, points, H200).floor_us).all()


def trial(workload, point, us, **changes):
    candidate = {"kernel": STREAM.name, "schedule": dict(point), "more": 1}
    fields = {"key": str(point), "target": workload.key, "candidate": candidate}
    fields |= {"agent": "random", "status": "passed", "samples_us": (us, us * 1.01, us * 0.99)}
    return Trial(**(fields | changes))


def test_it_learns_from_ledger_trials_and_passes_over_the_rest(tables):
    workload, points, us = tables[0]
    known = {workload.key: workload}
    trials = [trial(workload, p, u) for p, u in zip(points[:40], us[:40], strict=True)]
    other = {"kernel": "mosaic_gpu.gone", "schedule": {}}
    odd = {"kernel": STREAM.name, "schedule": {"warps": 3}}
    useless = [
        trial(workload, points[0], 1.0, status="rejected"),
        trial(workload, points[0], 1.0, target="plan"),
        trial(workload, points[0], 1.0, candidate={"edits": []}),
        trial(workload, points[0], 1.0, candidate=other),
        trial(workload, points[0], 1.0, candidate=odd),
    ]
    model = CostModel(H200)
    assert model.update([*useless, *trials], known) == 40
    assert model.update(trials, known) == 0  # nothing is counted twice
    assert model.why_silent(STREAM, workload) is None
    assert model.predict(STREAM, workload, points).learned.any()


def test_a_prior_gives_the_prediction_of_one_point(model, tables):
    workload, points, _ = tables[0]
    guess = model.predict(STREAM, workload, points)
    quick, slow = model.prior(STREAM, workload, points), model.prior(STREAM, workload)
    for i in (0, 9, 33):
        assert quick(points[i]) == guess.us[i] == pytest.approx(slow(points[i]), rel=1e-4)
    assert len(model.predict(STREAM, workload, [])) == 0


def test_the_same_rows_give_the_same_model(model, tables):
    workload, points, _ = tables[3]
    again = trained(tables)
    assert np.array_equal(
        again.predict(STREAM, workload, points).us, model.predict(STREAM, workload, points).us
    )


def test_it_is_kept_with_orbax_and_goes_on_learning(model, tables, tmp_path):
    model.save(tmp_path / "cost")
    model.save(tmp_path / "cost")  # over an older version
    loaded = CostModel.load(tmp_path / "cost", H200)
    workload, points, us = tables[HELD_OUT[0]]
    before, after = (m.predict(STREAM, workload, points) for m in (model, loaded))
    for name in ("us", "low_us", "high_us", "learned"):
        assert np.array_equal(getattr(before, name), getattr(after, name))
    assert loaded.learn(STREAM, *tables[0], fit=False) == 0
    assert loaded.learn(STREAM, workload, points, us, fit=False) == POINTS


def test_another_feature_version_or_chip_is_silent_not_wrong(model, tables, tmp_path, monkeypatch):
    workload, points, _ = tables[0]
    model.save(tmp_path / "cost")
    other = CostModel.load(tmp_path / "cost", chip("NVIDIA H100"))
    assert not other.predict(STREAM, workload, points).learned.any()
    monkeypatch.setattr(features, "_SHARES", features._SHARES[:-1])  # a schema with other names
    assert not CostModel.load(tmp_path / "cost", H200)._fitted
    monkeypatch.undo()
    monkeypatch.setattr(features, "VERSION", features.VERSION + 1)
    newer = CostModel.load(tmp_path / "cost", H200)
    assert not newer.predict(STREAM, workload, points).learned.any()


def test_a_missing_or_broken_file_is_silent(model, tables, tmp_path):
    workload, points, _ = tables[0]
    assert not CostModel.load(tmp_path / "none", H200)._observed
    model.save(tmp_path / "cost")
    for file in (tmp_path / "cost").rglob("*"):
        if file.is_file():
            file.write_bytes(b"broken")
    broken = CostModel.load(tmp_path / "cost", H200)
    assert not broken.predict(STREAM, workload, points).learned.any()


def test_every_kernel_has_features_without_holes():
    from pallas_kernels.verdict import workloads as declared

    for name, kernel in CATALOGUE.items():
        target = H200 if kernel.platform == "gpu" else chip("TPU v5e")
        supported = [w for w in declared(kernel.op) if kernel.supports(w) is None]
        workload = next(w for w in supported if is_legal(kernel, w, target))
        point = tuple(sorted(kernel.default(workload, target).to_json().items()))
        rows = features.rows(kernel, workload, [point], target)
        assert np.isfinite(rows.x).all(), name
        assert json.dumps(features.Schema.of(kernel, workload).names)
