"""The gate score: what CI asks of the gates, and that the score itself cannot be fooled."""

import json
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.core.results import read
from polyjax.gates import corpus
from polyjax.gates.__main__ import main
from polyjax.gates.score import score

TESTS = Path(__file__).resolve().parents[1]
MUTANTS, LEGAL = TESTS / "mutants", TESTS / "legal"
HONEST = """
\"\"\"Nothing is wrong with it.\"\"\"
from polyjax.core import ops, reference

OP = ops.RMS_NORM


def build(workload, schedule):
    return lambda x, weight: reference.rms_norm(None, x, weight, eps=workload.option("eps"))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one.py").write_text(HONEST)
    return tmp_path


def test_the_subset_is_caught_and_nothing_legal_rejected():
    found = score(MUTANTS, LEGAL, range(3), range(1), subset=True)
    assert [o.name for o in found.missed] == []
    assert [(o.name, o.failures) for o in found.rejected] == []
    assert [o.name for o in found.mutants if o.only_raised] == []
    assert len(found.mutants) >= 20 and len(found.legal) >= 20
    assert len({gate for o in found.mutants for gate in o.by_gate}) >= 6, "gates share the work"


@pytest.mark.slow
def test_every_mutant_is_caught_on_twenty_seeds_and_nothing_legal_rejected():
    found = score(MUTANTS, LEGAL, range(20), range(2), jobs=2)
    assert [o.name for o in found.missed] == []
    assert [(o.name, o.failures) for o in found.rejected] == []
    assert [o.name for o in found.mutants if o.only_raised] == []
    assert len(found.mutants) >= 40 and len(found.legal) >= 100


def test_there_is_a_file_for_each_kind_and_each_says_what_it_is():
    found = list(corpus.entries(MUTANTS))
    assert len(found) >= 40
    assert len({entry.kind for entry in found}) == len(found)


def test_a_good_kernel_among_mutants_is_reported_as_missed(folder, capsys, tmp_path):
    results = tmp_path / "out" / "score.jsonl"
    arguments = ["score", f"--mutants={folder}", "--legal=none", "--seeds=1"]
    assert main([*arguments, f"--results={results}"]) == 1
    assert "MISSED one" in capsys.readouterr().out
    figures = {figure.metric: figure.value for figure in read(results.parent)}
    assert figures == {"gates_mutants_caught_fraction": 0.0, "gates_false_rejections": 0.0}


def test_a_broken_kernel_among_legal_ones_is_reported_as_rejected(folder):
    broken = HONEST.replace("weight, eps", "weight * 1.05, eps")
    (folder / "one.py").write_text(broken)
    found = score(None, folder, range(1), range(1), subset=True)
    assert [o.name for o in found.rejected] == ["one"]
    assert not found.perfect


def test_a_mutant_that_only_raises_is_marked(folder, capsys):
    (folder / "one.py").write_text(HONEST.replace("reference.rms_norm", "reference.no_such"))
    assert main(["score", f"--mutants={folder}", "--legal=none", "--seeds=1", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)["mutant_outcomes"][0]
    assert outcome["only_raised"] and outcome["by_gate"] == {"declaration": 1}


def test_a_file_that_is_no_mutant_is_refused(folder, capsys):
    (folder / "two.py").write_text('"""Neither."""\n')
    with pytest.raises(ConfigError, match=r"two\.py has neither"):
        list(corpus.entries(folder))
    assert main(["score", f"--mutants={folder}", "--legal=none"]) == 2
    assert "two.py" in capsys.readouterr().err


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no Python files"):
        list(corpus.entries(tmp_path))
