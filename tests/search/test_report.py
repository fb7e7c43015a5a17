"""The report says what the ledger holds: plots, tables, and lessons that are true."""

from __future__ import annotations

import math
import re
import time
import xml.etree.ElementTree as ElementTree

import pytest

from pallas_kernels.matmul.workloads import workloads
from search.decisions import replay
from search.findings import (
    best_so_far,
    by_agent,
    counts_by_status,
    lessons,
    predictions,
    rank_correlation,
    searches,
    workload_of,
    worth_of_fields,
)
from search.ledger import Ledger
from search.report import render
from tests.search.seeded_ledger import TARGETS, fill

SECTIONS = (
    "Best so far",
    "Predicted against measured",
    "Where the time went",
    "Verdicts",
    "What each field is worth",
    "Who found what",
    "Workloads",
    "Bitter lessons",
)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "ledger.sqlite"
    fill(path, 400).close()
    return Ledger(path, None)


def test_the_page_has_its_sections_and_well_formed_plots(ledger):
    page = render(ledger)
    assert re.findall(r"<h2>(.*?)</h2>", page) == list(SECTIONS)
    plots = re.findall(r"<svg.*?</svg>", page)
    assert len(plots) == 5
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert "nan" not in plot and "inf" not in plot
        assert len(root) > 3
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", page)  # nothing is fetched
    assert "400 trials in 3 searches" in page and "NVIDIA H200" in page


def test_an_empty_ledger_has_a_page_too(tmp_path):
    fill(tmp_path / "ledger.sqlite", 0).close()
    page = render(Ledger(tmp_path / "ledger.sqlite", None))
    assert "Nothing was tried yet" in page and "0 trials" in page


@pytest.mark.slow
def test_ten_thousand_trials_make_a_page_of_bounded_size(tmp_path):
    fill(tmp_path / "ledger.sqlite", 10_000).close()
    begun = time.process_time()
    page = render(Ledger(tmp_path / "ledger.sqlite", None))
    print(f"{time.process_time() - begun:.1f} s, {len(page):,} bytes")
    assert "10,000 trials" in page
    assert len(page) < 2_000_000  # points are thinned


def test_curves_never_fall_and_end_at_the_winner(ledger):
    for search in searches(ledger):
        gains = [gain for _, gain in best_so_far(search)]
        assert gains == sorted(gains) and len(gains) == len(search.trials)
        assert gains[-1] == pytest.approx(search.start_us / search.best_us)


def test_counts_add_up(ledger):
    found = searches(ledger)
    trials = [trial for search in found for trial in search.trials]
    assert sum(counts_by_status(trials).values()) == 400
    records = by_agent(found)
    assert sum(r.trials for r in records.values()) == 400 - len(found)
    promoted = sum(d.promoted for search in found for d in search.decisions)
    assert sum(r.promoted for r in records.values()) == promoted > 0


def test_a_field_that_matters_is_told_from_one_that_does_not(ledger):
    worth = worth_of_fields(searches(ledger))
    assert worth["tile"] > 1.2 and worth["stages"] > 1.1
    assert worth["swizzle"] < 1.2 < worth["tile"]


def test_predictions_correlate_and_a_constant_does_not():
    pairs = [(float(n), float(n) ** 2) for n in range(1, 20)]
    assert rank_correlation(pairs) == pytest.approx(1.0)
    assert rank_correlation([(b, -a) for a, b in pairs]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation([(1.0, a) for a, _ in pairs]))


def test_lessons_name_every_kind_of_failure_with_its_count(ledger):
    found = searches(ledger)
    said = " ".join(lessons(found))
    counts = counts_by_status(t for s in found for t in s.trials if t.agent != "baseline")
    for status in ("compile_error", "rejected", "timeout", "crashed", "duplicate", "slow"):
        assert f"{counts[status]:,} " in said
    assert "232448 bytes of shared memory" in said
    assert "freshness: results do not follow w" in said
    assert "cost model's favourite" in said
    assert len(predictions(found[0])) > 20


def test_a_workload_is_read_back_from_its_key():
    for workload in list(workloads())[:10]:
        assert workload_of(workload.key) == workload
    attention = workload_of(TARGETS[1])
    assert attention["B"] == 64 and attention.option("scale") == pytest.approx(128**-0.5)
    assert workload_of("plan") is None and workload_of("no_op[M=1|x:float32]") is None


def test_every_seeded_decision_is_reproduced(ledger):
    made = replay(ledger)
    assert any(decision.promoted for decision, _, _ in made)
    assert all(decision.promoted == again for decision, again, _ in made)
