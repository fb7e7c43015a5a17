"""Events are numbered and bounded in memory; the audit log has all of them, line by line."""

import json
from pathlib import Path

import pytest

from polyjax.core.errors import ConfigError
from polyjax.engine.events import AuditLog, EventLog


def test_events_are_numbered_and_the_oldest_go() -> None:
    where = (7, 2)
    events = EventLog(lambda: where, capacity=3)
    assert events.answer(0) == {"events": [], "next": 0, "oldest": 1}
    for index in range(5):
        events.add("swap", plan=f"p{index}")
    told = events.answer(0)
    assert [event["number"] for event in told["events"]] == [3, 4, 5]
    assert (told["next"], told["oldest"]) == (5, 3)
    assert told["events"][0] | {"time": ""} == {
        "number": 3,
        "time": "",
        "step": 7,
        "epoch": 2,
        "kind": "swap",
        "plan": "p2",
    }
    assert [e["number"] for e in events.answer(0, limit=1)["events"]] == [3]
    assert events.answer(5) == {"events": [], "next": 5, "oldest": 3}


def test_the_audit_log_keeps_every_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "audit.jsonl"
    for run in range(2):  # a restart appends
        events = EventLog(lambda: (0, 0), AuditLog(path), capacity=2)
        for index in range(50):
            events.add("swap", run=run, index=index)
        events.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["run"], e["index"]) for e in lines] == [(r, i) for r in range(2) for i in range(50)]


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"number": 1}\n{"numb')  # a killed process
    events = EventLog(lambda: (0, 0), AuditLog(path))
    events.add("swap")
    events.close()
    first, torn, last = path.read_text().splitlines()
    assert json.loads(first) == {"number": 1}
    assert torn == '{"numb'
    assert json.loads(last)["kind"] == "swap"


def test_a_disk_that_refuses_costs_no_step(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    events = EventLog(lambda: (0, 0), audit)
    audit._file.close()
    events.add("swap")
    events.close()
    assert audit.failures == 1
    assert events.last == 1
    with pytest.raises(ConfigError, match="--audit_log="):
        AuditLog(tmp_path)  # a directory
