"""Tuning tables: what was measured to be best, by kind of device and workload.

One place holds them, `search/tables/<device kind>/<op>.json`, each a map from workload key to
{"kernel": name, "schedule": {field: value}}. Engines choose from them (`--tables`), benches and
`python -m polyjax.tune export` merge into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from polyjax.core.errors import ConfigError
from polyjax.core.op import Choice
from polyjax.core.whole_file import write_whole

SHIPPED = Path(__file__).resolve().parents[2] / "search" / "tables"


def load_tables(root: str | Path, device_kind: str) -> dict[str, Choice]:
    """Returns the measured choices for one device kind; {} where there are none.

    Raises ConfigError naming a malformed table.
    """
    found: dict[str, Choice] = {}
    for path in sorted((Path(root) / device_kind).glob("*.json")):
        try:
            rows = json.loads(path.read_text())
            found |= {
                key: Choice(row["kernel"], tuple(sorted(row["schedule"].items())))
                for key, row in rows.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no tuning table: {error!r}") from error
    return found


def merge_tables(root: str | Path, device_kind: str, choices: Mapping[str, Choice]) -> list[Path]:
    """Adds choices to a device kind's tables, in place of older ones; returns the files written.

    Each is replaced whole. Raises ConfigError as `load_tables` does.
    """
    merged = load_tables(root, device_kind) | dict(choices)
    written = []
    for op in sorted({key.partition("[")[0] for key in choices}):
        rows = {
            key: {"kernel": choice.kernel, "schedule": dict(choice.schedule)}
            for key, choice in merged.items()
            if key.partition("[")[0] == op
        }
        path = Path(root) / device_kind / f"{op}.json"
        write_whole(path, (json.dumps(rows, indent=1, sort_keys=True) + "\n").encode())
        written.append(path)
    return written
