"""What result.json says of a run beside the keys of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import read_json_object

SCHEMA = 1


def read_head(path: Path) -> dict[str, Any]:
    """Return metrics and provenance of a result.json, as plain data.

    Raises
    ------
    SchedlabError
        If it cannot be read, is not ours, or of a version that wrote something else.
    """
    head = read_json_object(path).get("schedlab")
    if not isinstance(head, dict):
        raise SchedlabError(f"{path}: not a schedlab result")
    if head.get("schema") != SCHEMA:
        raise SchedlabError(
            f"{path}: result schema {head.get('schema')!r}, this version reads {SCHEMA}"
        )
    return head
