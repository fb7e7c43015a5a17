"""The ledger keeps what it was told, through kills, second writers and changed environments."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from search.ledger import Ledger, Promotion, Trial

ROOT = Path(__file__).resolve().parents[2]
HERE = {"jaxlib": "0.11.2", "device": "toy"}


def trial(key="a", **changes):
    values = {"target": "matmul[M=1]", "candidate": {"edits": []}, "agent": "random"}
    return Trial(key, **{**values, "status": "passed", "samples_us": (1.0, 2.0), **changes})


def test_a_trial_comes_back_as_it_was_written(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", HERE)
    written = trial(verdicts={"equivalence": {"error": 1e-3}}, spent={"compile": 0.4}, ended_s=5.0)
    number = ledger.record(written)
    found = ledger.find("a")
    assert found.id == number
    assert (found.samples_us, found.verdicts, found.spent) == (
        (1.0, 2.0),
        written.verdicts,
        written.spent,
    )
    assert ledger.get(number) == found


def test_the_first_record_of_a_key_stands(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", HERE)
    first = ledger.record(trial(reason="first"))
    assert ledger.record(trial(reason="second")) == first
    assert [t.reason for t in ledger.trials()] == ["first"]


def test_another_environment_is_a_miss_that_says_why(tmp_path):
    Ledger(tmp_path / "ledger.sqlite", HERE).record(trial())
    there = Ledger(tmp_path / "ledger.sqlite", {**HERE, "jaxlib": "0.12.0"})
    assert there.find("a") is None
    assert "jaxlib: 0.11.2 there, 0.12.0 here" in there.why_missing("a")
    assert there.why_missing("b") == "never run"
    assert list(there.trials()) == []


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path, HERE).close()

    def write(writer):
        ledger = Ledger(path, HERE)
        for number in range(25):
            ledger.record(trial(key=f"{writer}-{number}"))

    threads = [threading.Thread(target=write, args=(w,)) for w in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(Ledger(path, HERE).trials())) == 50


def test_a_killed_writer_leaves_every_finished_trial(tmp_path):
    path = tmp_path / "ledger.sqlite"
    program = f"""
from search.ledger import Ledger, Trial
ledger = Ledger({str(path)!r}, {HERE!r})
for n in range(10**6):
    ledger.record(Trial(str(n), "t", {{}}, "random", "passed"))
    print(n, flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    said = [child.stdout.readline() for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    finished = int(rest[-1]) if rest else int(said[-1])
    keys = [int(t.key) for t in Ledger(path, HERE).trials()]
    assert keys == list(range(len(keys)))
    assert finished + 1 <= len(keys) <= finished + 2


def test_a_file_that_is_no_ledger_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("no database " * 100)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        Ledger(tmp_path / "notes.txt", HERE)


def test_decisions_keep_their_evidence(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite", HERE)
    number = ledger.record(trial(ended_s=time.time()))
    made = Promotion(number, None, "paired", True, {"floor_us": 0.1})
    ledger.promote(made)
    assert list(ledger.promotions()) == [made]
