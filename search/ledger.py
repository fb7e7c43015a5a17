"""The ledger: one SQLite file that remembers every trial, and why each decision was taken.

A trial is keyed by what was run (program text, edits, compiler flags, state-ABI) and by the
environment it ran in (jaxlib, driver, device kind, CPU features). An entry from another environment
is a miss that says why. A trial is in the file as soon as it ends; a process killed at any moment
loses the trial in flight and nothing else. Two writers are safe (WAL, immediate transactions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS environments (
  digest TEXT PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
  id INTEGER PRIMARY KEY,
  key TEXT NOT NULL,
  environment TEXT NOT NULL REFERENCES environments(digest),
  target TEXT NOT NULL,
  candidate TEXT NOT NULL,
  parent INTEGER REFERENCES trials(id),
  agent TEXT NOT NULL,
  status TEXT NOT NULL,
  reason TEXT NOT NULL,
  samples_us TEXT NOT NULL,
  predicted_us REAL,
  verdicts TEXT NOT NULL,
  spent TEXT NOT NULL,
  ended_s REAL NOT NULL,
  UNIQUE (key, environment));
CREATE INDEX IF NOT EXISTS trials_by_target ON trials (target, environment, status);
CREATE TABLE IF NOT EXISTS promotions (
  id INTEGER PRIMARY KEY,
  trial INTEGER NOT NULL REFERENCES trials(id),
  incumbent INTEGER REFERENCES trials(id),
  rule TEXT NOT NULL,
  promoted INTEGER NOT NULL,
  evidence TEXT NOT NULL,
  decided_s REAL NOT NULL);
"""

STATUSES = (
    "passed",  # compiled, gated, timed
    "rejected",  # a gate refused it
    "illegal",  # the static verdict refused it
    "compile_error",
    "duplicate",  # the same compiled program was measured before
    "slow",  # stopped early, far behind the incumbent
    "crashed",
    "timeout",
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The record of one candidate.

    `key` names what was run, `target` what it competes for (a workload key, "plan" or "mesh").
    `candidate` is JSON data that replays it. `samples_us` are raw. `verdicts` maps gate names to
    their evidence. `spent` maps phases (lower, compile, gate, time) to seconds. The ledger sets
    `id`.
    """

    key: str
    target: str
    candidate: Mapping[str, Any]
    agent: str
    status: str
    reason: str = ""
    samples_us: tuple[float, ...] = ()
    predicted_us: float | None = None
    verdicts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parent: int | None = None
    id: int | None = None
    ended_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Promotion:
    """A decision between a trial and the incumbent, with all that is needed to take it again."""

    trial: int
    incumbent: int | None
    rule: str
    promoted: bool
    evidence: Mapping[str, Any]


def digest(facts: Mapping[str, Any]) -> str:
    """Returns 16 hex digits over JSON facts; order does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """An open ledger file, bound to one environment (a flat mapping of facts to strings).

    Without an environment it is for reading: the trials and decisions of all of them.
    """

    def __init__(self, path: str | Path, environment: Mapping[str, str] | None):
        """Opens or starts the ledger. Raises ConfigError if the file is none of this version."""
        self.path = Path(path)
        self.environment = dict(environment or {})
        self.environment_digest = "" if environment is None else digest(self.environment)
        if environment is None and not self.path.exists():
            raise ConfigError(f"there is no ledger {self.path}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._check_version()
                if self.environment_digest:
                    self._db.execute(
                        "INSERT OR IGNORE INTO environments VALUES (?, ?)",
                        (self.environment_digest, json.dumps(self.environment, sort_keys=True)),
                    )
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self.path} is no ledger: {error}; choose another --ledger"
            ) from error

    def _check_version(self) -> None:
        row = self._db.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
        if row is None:
            self._db.execute("INSERT INTO meta VALUES ('version', ?)", (str(SCHEMA_VERSION),))
        elif row[0] != str(SCHEMA_VERSION):
            raise ConfigError(
                f"{self.path} has ledger version {row[0]}, this polyjax writes {SCHEMA_VERSION}"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()

    def record(self, trial: Trial, decision: Promotion | None = None) -> int:
        """Writes a finished trial and returns its id; of one key the first record stands.

        `decision` is the one about this trial (its `trial` is set here). Both are written or none:
        a killed process cannot leave a winner that nobody decided about.
        """
        if trial.status not in STATUSES:
            raise ValueError(f"unknown trial status {trial.status!r}")
        assert self.environment_digest, "a ledger without an environment is for reading"
        with self._transaction():
            trial_id, is_new = self._insert(trial)
            if decision is not None and is_new:
                self._decide(dataclasses.replace(decision, trial=trial_id))
        return trial_id

    def _insert(self, trial: Trial) -> tuple[int, bool]:
        """Returns the id of the trial with this key, and whether it was written just now."""
        values = (
            trial.key,
            self.environment_digest,
            trial.target,
            json.dumps(trial.candidate, sort_keys=True),
            trial.parent,
            trial.agent,
            trial.status,
            trial.reason,
            json.dumps(list(trial.samples_us)),
            trial.predicted_us,
            json.dumps(trial.verdicts, sort_keys=True),
            json.dumps(trial.spent, sort_keys=True),
            trial.ended_s or time.time(),
        )
        cursor = self._db.execute(
            "INSERT OR IGNORE INTO trials (key, environment, target, candidate, parent, agent, "
            "status, reason, samples_us, predicted_us, verdicts, spent, ended_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        if cursor.rowcount:
            assert cursor.lastrowid is not None
            return cursor.lastrowid, True
        row = self._db.execute(
            "SELECT id FROM trials WHERE key = ? AND environment = ?", values[:2]
        ).fetchone()
        return int(row[0]), False

    def find(self, key: str) -> Trial | None:
        """Returns the trial of this key in this environment, or None (see `why_missing`)."""
        return next(
            self._select("key = ? AND environment = ?", (key, self.environment_digest)), None
        )

    def why_missing(self, key: str) -> str:
        """Returns why `find` gave None: never run, or which facts of the environment differ."""
        rows = self._db.execute(
            "SELECT facts FROM environments JOIN trials ON environment = digest WHERE key = ?",
            (key,),
        ).fetchall()
        if not rows:
            return "never run"
        for facts in (json.loads(row[0]) for row in rows):
            if facts == self.environment:
                return "present"
        differing = [
            f"{name}: {facts.get(name)} there, {self.environment.get(name)} here"
            for name in sorted(set(facts) | set(self.environment))
            if facts.get(name) != self.environment.get(name)
        ]
        return "run in another environment (" + "; ".join(differing) + ")"

    def trials(self, target: str | None = None, status: str | None = None) -> Iterator[Trial]:
        """Yields this environment's trials (without one: all), oldest first."""
        where, values = "1", []
        if self.environment_digest:
            where, values = "environment = ?", [self.environment_digest]
        for column, value in (("target", target), ("status", status)):
            if value is not None:
                where, values = f"{where} AND {column} = ?", [*values, value]
        return self._select(where, tuple(values))

    def environments(self) -> dict[int, dict[str, str]]:
        """Returns trial id -> the facts of the environment it ran in."""
        facts = {
            name: json.loads(text)
            for name, text in self._db.execute("SELECT digest, facts FROM environments").fetchall()
        }
        rows = self._db.execute("SELECT id, environment FROM trials").fetchall()
        return {int(trial_id): facts[name] for trial_id, name in rows}

    def get(self, trial_id: int) -> Trial:
        """Returns a trial by id. Raises KeyError."""
        for trial in self._select("id = ?", (trial_id,)):
            return trial
        raise KeyError(trial_id)

    def _select(self, where: str, values: tuple[Any, ...]) -> Iterator[Trial]:
        rows = self._db.execute(
            "SELECT key, target, candidate, agent, status, reason, samples_us, predicted_us, "
            f"verdicts, spent, parent, id, ended_s FROM trials WHERE {where} ORDER BY id",
            values,
        ).fetchall()
        for row in rows:
            key, target, candidate, agent, status, reason, samples, predicted, *rest = row
            verdicts, spent, parent, trial_id, ended_s = rest
            yield Trial(
                key=key,
                target=target,
                candidate=json.loads(candidate),
                agent=agent,
                status=status,
                reason=reason,
                samples_us=tuple(json.loads(samples)),
                predicted_us=predicted,
                verdicts=json.loads(verdicts),
                spent=json.loads(spent),
                parent=parent,
                id=trial_id,
                ended_s=ended_s,
            )

    def promote(self, promotion: Promotion) -> None:
        """Writes a decision, whichever way it went."""
        with self._transaction():
            self._decide(promotion)

    def _decide(self, promotion: Promotion) -> None:
        self._db.execute(
            "INSERT INTO promotions (trial, incumbent, rule, promoted, evidence, decided_s) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                promotion.trial,
                promotion.incumbent,
                promotion.rule,
                int(promotion.promoted),
                json.dumps(promotion.evidence, sort_keys=True),
                time.time(),
            ),
        )

    def promotions(self) -> Iterator[Promotion]:
        """Yields the decisions about this environment's trials (without one: all), oldest first."""
        bound = bool(self.environment_digest)
        where = "WHERE trial IN (SELECT id FROM trials WHERE environment = ?) " if bound else ""
        rows: Sequence[Any] = self._db.execute(
            f"SELECT trial, incumbent, rule, promoted, evidence FROM promotions {where}ORDER BY id",
            (self.environment_digest,) if bound else (),
        ).fetchall()
        for trial, incumbent, rule, promoted, evidence in rows:
            yield Promotion(trial, incumbent, rule, bool(promoted), json.loads(evidence))
