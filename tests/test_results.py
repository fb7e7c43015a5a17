"""The results schema and the page rendered from it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.results import Baseline, append, measured, read

ROOT = Path(__file__).resolve().parent.parent


def result(metric="speed", value=2.0, goal=1.5, better="higher", date="2026-01-01T00:00:00+00:00"):
    made = measured(metric, [value] * 3, "x", better=better, goal=goal, device="toy")
    return dataclasses.replace(made, date=date, baseline=Baseline("other", (1.0, 3.0, 2.0)))


def test_results_survive_a_round_trip(tmp_path):
    written = [result(), result("lag", better="lower")]
    append(tmp_path / "a" / "b.jsonl", written)
    assert list(read(tmp_path)) == written


def test_a_torn_last_line_does_not_swallow_the_next_result(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"raw": 1}))
    append(path, [result()])
    assert [r.metric for r in read(tmp_path)] == ["speed"]


def test_a_malformed_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"metric": "speed"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1"):
        list(read(tmp_path))


def test_report_shows_the_newest_value_and_whether_the_goal_is_met(tmp_path):
    old = result(value=9.0)
    new = result(value=1.0, date="2026-02-01T00:00:00+00:00")
    append(tmp_path / "a.jsonl", [new, old, result("lag", 1.0, 2.0, "lower")])
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "report", f"--results={tmp_path}"],
        check=True,
        env={"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path)},
    )
    page = (tmp_path / "README.md").read_text()
    assert "| `speed` | 1 | x | 1.5 | 67% of it |" in page
    assert "| `lag` | 1 | x | at most 2 | yes |" in page
    assert (tmp_path / "speed.svg").read_text().lstrip().startswith("<?xml")
