"""Tables of measured schedules: every legal schedule of a workload, timed once, kept as data.

One file a workload, `<root>/<device kind>/<op>__<digest>.jsonl.gz`: a header line naming workload,
device and versions, then a line a schedule. While a table is being measured its lines go to a
`.partial` file beside it, synced one by one, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError
from polyjax.core.op import Workload
from polyjax.core.whole_file import write_whole
from search.space import Point

VERSION = 1
SUFFIX, PARTIAL = ".jsonl.gz", ".jsonl.partial"


@dataclasses.dataclass(frozen=True)
class TableRow:
    """One schedule: `samples_us` where `status` is "passed", else the `reason`.

    `incumbent_us` is what a fixed schedule of the table took beside it, where that was timed: the
    device's drift. `digest` names the machine code.
    """

    kernel: str
    schedule: Point
    status: str
    samples_us: tuple[float, ...] = ()
    reason: str = ""
    incumbent_us: float = 0.0
    digest: str = ""

    @property
    def key(self) -> tuple[str, Point]:
        return self.kernel, self.schedule

    @property
    def us(self) -> float:
        return statistics.median(self.samples_us)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"kernel": self.kernel, "schedule": dict(self.schedule)}
        data["status"] = self.status
        if self.samples_us:
            data["samples_us"] = [round(us, 4) for us in self.samples_us]
        if self.incumbent_us:
            data["incumbent_us"] = round(self.incumbent_us, 4)
        data |= {name: text for name in ("reason", "digest") if (text := getattr(self, name))}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TableRow:
        return cls(
            data["kernel"],
            tuple(sorted(data["schedule"].items())),
            data["status"],
            tuple(data.get("samples_us", ())),
            data.get("reason", ""),
            data.get("incumbent_us", 0.0),
            data.get("digest", ""),
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """The measured schedules of one workload on one device kind, each at most once.

    `noise_floor` is the relative difference that an A/A run showed; 0 where none was made.
    """

    workload: Workload
    device: str
    versions: Mapping[str, str]
    rows: tuple[TableRow, ...] = ()
    noise_floor: float = 0.0

    def passed(self) -> list[TableRow]:
        return [row for row in self.rows if row.status == "passed" and row.samples_us]

    def merged(self, rows: Iterable[TableRow]) -> Table:
        """Returns the table with more rows; a newer one replaces an older unless only that passed.

        The order is that of first appearance.
        """
        kept = {row.key: row for row in self.rows}
        for row in rows:
            old = kept.get(row.key)
            if old is None or row.status == "passed" or old.status != "passed":
                kept[row.key] = row
        return dataclasses.replace(self, rows=tuple(kept.values()))

    def header(self) -> dict[str, Any]:
        return {
            "table": VERSION,
            "device": self.device,
            "workload": workload_to_json(self.workload),
            "versions": dict(self.versions),
            "noise_floor": self.noise_floor,
        }


def workload_to_json(workload: Workload) -> dict[str, Any]:
    return {
        "op": workload.op,
        "dims": [list(pair) for pair in workload.dims],  # their order is part of the key
        "dtypes": [list(pair) for pair in workload.dtypes],
        "static": dict(workload.static),
    }


def workload_from_json(data: Mapping[str, Any]) -> Workload:
    return Workload(
        data["op"],
        tuple((axis, size) for axis, size in data["dims"]),
        tuple((name, dtype) for name, dtype in data["dtypes"]),
        tuple(sorted((name, _thawed(value)) for name, value in data["static"].items())),
    )


def _thawed(value: Any) -> Any:
    """Lists in static arguments were tuples."""
    return tuple(map(_thawed, value)) if isinstance(value, list) else value


def path_of(root: str | Path, device: str, workload: Workload) -> Path:
    digest = hashlib.sha256(workload.key.encode()).hexdigest()[:12]
    return Path(root) / device / f"{workload.op}__{digest}{SUFFIX}"


def read(path: str | Path) -> Table:
    """Returns a table, with what a run not yet finished has added to it.

    `path` is the table's, whether or not it was finished. Raises ConfigError naming a bad line.
    """
    path = Path(path)
    table: Table | None = None
    for file in (path, partial_of(path)):
        if file.exists():
            table = _read_file(file, table)
    if table is None:
        raise ConfigError(f"there is no table {path}")
    return table


def _read_file(file: Path, table: Table | None) -> Table | None:
    whole = file.name.endswith(SUFFIX)
    try:
        text = gzip.decompress(file.read_bytes()).decode() if whole else file.read_text()
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{file} is no table: {error}") from error
    lines = text.split("\n")
    torn = [] if text.endswith("\n") else [len(lines) - 1]  # a killed run's last line
    rows = []
    for number, line in enumerate(lines):
        if not line or number in torn:
            continue
        try:
            data = json.loads(line)
            if "table" in data:
                table = table or _from_header(data)
            else:
                rows.append(TableRow.from_json(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}:{number + 1} is no table line: {error!r}") from error
    if table is None:
        if whole or rows:
            raise ConfigError(f"{file} has no header line")
        return None  # killed before its first line
    return table.merged(rows)


def _from_header(data: Mapping[str, Any]) -> Table:
    if data["table"] != VERSION:
        raise ValueError(f"table version {data['table']}, this polyjax reads {VERSION}")
    workload = workload_from_json(data["workload"])
    floor = data.get("noise_floor", 0.0)
    return Table(workload, data["device"], data.get("versions", {}), noise_floor=floor)


def read_all(root: str | Path, device: str | None = None) -> Iterator[Table]:
    """Yields every table under `root`, of one device kind or of all, in the order of file names."""
    found = set(Path(root).glob(f"{device or '*'}/*{SUFFIX}"))
    found |= {_whole(file) for file in Path(root).glob(f"{device or '*'}/*{PARTIAL}")}
    for path in sorted(found):
        yield read(path)


def partial_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(SUFFIX) + PARTIAL)


def _whole(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(PARTIAL) + SUFFIX)


def write(path: str | Path, table: Table) -> None:
    """Replaces a table file whole; the partial file beside it goes."""
    path = Path(path)
    lines = [table.header(), *(row.to_json() for row in table.rows)]
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    write_whole(path, gzip.compress(text.encode(), mtime=0))  # equal tables give equal files
    partial_of(path).unlink(missing_ok=True)


class TableWriter:
    """Adds rows to a table as they are measured; `known` are those that need no measuring."""

    def __init__(self, root: str | Path, empty: Table):
        self.path = path_of(root, empty.device, empty.workload)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(self.path)
        there = self.path.exists() or (partial.exists() and partial.stat().st_size > 0)
        known = read(self.path) if there else empty
        self.table = dataclasses.replace(empty.merged(known.rows), noise_floor=known.noise_floor)
        # Starts anew from what could be read: a torn line would garble the next.
        lines = [empty.header(), *(row.to_json() for row in self.table.rows)]
        self._file = partial.with_suffix(".aside").open("w")
        self._add(*lines)
        partial.with_suffix(".aside").rename(partial)

    @property
    def known(self) -> frozenset[tuple[str, Point]]:
        return frozenset(row.key for row in self.table.rows)

    def add(self, row: TableRow) -> None:
        """Keeps a row; it is on the disk when this returns."""
        self.table = self.table.merged([row])
        self._add(row.to_json())

    def _add(self, *lines: Mapping[str, Any]) -> None:
        self._file.write("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, finished: bool) -> None:
        """Ends the run: a finished table becomes its compressed file, another stays partial."""
        self._file.close()
        if finished:
            write(self.path, self.table)
