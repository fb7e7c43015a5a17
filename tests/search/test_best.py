"""A server starts with the plan that its ledger promoted last, if it was measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyjax.engine.types import EngineConfig
from polyjax.serve import with_ledger_plan
from search.best import best_choices, best_plan, best_plan_here
from search.environment import why_not_here
from search.ledger import Ledger, Promotion, Trial

ROOT = Path(__file__).resolve().parents[2]


def here():
    import jax

    from search.environment import facts

    return facts(jax.devices()[0])


def promote(ledger, key, promoted=True, **evidence):
    trial = Trial(key, "plan", {}, "random", "passed")
    return ledger.record(trial, Promotion(0, None, "paired", promoted, evidence))


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite", here())


def test_the_last_promoted_plan_of_the_model_counts(ledger, tmp_path):
    promote(ledger, "a", plan={"numerics": "bounded"}, model="m")
    last = promote(ledger, "b", plan={"compiler_options": {"x": "1"}}, model="m")
    promote(ledger, "c", plan={"compiler_options": {"x": "2"}}, model="other")
    promote(ledger, "d", promoted=False, plan={"compiler_options": {"x": "3"}}, model="m")
    found, reason = best_plan_here(tmp_path / "ledger.sqlite", "m")
    assert (found.trial, reason) == (last, "")
    assert found.plan == {"compiler_options": {"x": "1"}}
    assert best_plan(ledger, None) is None
    assert "the demo model" in best_plan_here(tmp_path / "ledger.sqlite", None)[1]
    assert "no ledger" in best_plan_here(tmp_path / "nowhere", "m")[1]


def test_what_was_measured_on_another_machine_is_not_taken(tmp_path):
    there = here() | {"jaxlib": "0.1", "cpu": "another"}
    promote(Ledger(tmp_path / "ledger.sqlite", there), "a", plan={}, model="m")
    found, reason = best_plan_here(tmp_path / "ledger.sqlite", "m")
    assert found is None and "jaxlib 0.1 there" in reason and "cpu another there" in reason
    assert why_not_here(here()) == ""


def test_serve_takes_the_plan_unless_another_is_named(ledger, tmp_path, capsys):
    promote(ledger, "a", plan={"compiler_options": {"x": "1"}}, model="m")
    path = str(tmp_path / "ledger.sqlite")
    config = with_ledger_plan(EngineConfig(model="m"), path, tmp_path)
    assert json.loads(Path(config.plan).read_text()) == {"compiler_options": {"x": "1"}}
    assert "trial 1" in capsys.readouterr().err
    named = EngineConfig(model="m", plan="reference")
    assert with_ledger_plan(named, path, tmp_path) is named
    other = EngineConfig(model="other")
    assert with_ledger_plan(other, path, tmp_path) is other
    assert "default plan" in capsys.readouterr().err
    assert with_ledger_plan(other, None, tmp_path) is other


def test_choices_are_those_promoted_last_for_each_workload(ledger):
    old, new = ({"kernel": "k", "schedule": {"tile": tile}} for tile in (64, 128))
    for number, choice in enumerate((old, new)):
        trial = Trial(str(number), "matmul[M=1|x:float32]", {}, "random", "passed")
        evidence = {"choice": choice, "device_kind": "cpu"}
        ledger.record(trial, Promotion(0, None, "paired", True, evidence))
    form = Trial("form", "rope[M=1|x:float32]", {}, "random", "passed")
    evidence = {"choice": {"form": "reference", "options": {}}, "device_kind": "cpu"}
    ledger.record(form, Promotion(0, None, "paired", True, evidence))
    assert best_choices(ledger) == {"cpu": {"matmul[M=1|x:float32]": new}}


def test_asking_a_ledger_imports_no_jax():
    program = "import sys, search.best; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
