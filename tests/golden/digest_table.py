"""A golden table of digests on disk: a line a subject, so that version control names what moved."""

import json
from collections.abc import Mapping
from pathlib import Path

Digests = Mapping[str, Mapping[str, str]]


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return what is kept."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, table: Digests) -> None:
    """Keep a table, in its order."""
    rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    path.write_text("{\n " + ",\n ".join(rows) + "\n}\n", encoding="utf-8")
