"""The folder of a search as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from schedlab.experiments.figures.chosen import SEARCHES, search_drawings
from schedlab.experiments.report.page import PageTable, images, render
from schedlab.experiments.statistics import with_interval
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.text import json_number, number


def is_search(folder: Path) -> bool:
    """Say whether a folder holds what `find`, `tune` or `recommend` came to."""
    return any((folder / kind.file).is_file() for kind in SEARCHES.values())


def write_search_page(folder: Path, output: Path | None = None) -> Path:
    """Write the report of a search.

    Parameters
    ----------
    folder : Path
        What `schedlab find`, `tune` or `recommend` wrote.
    output : Path, optional
        The file; report.html in the folder if absent.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    SchedlabError
        If the folder is of no search, or of one by an earlier version.
    """
    files = dict.fromkeys(kind.file for kind in SEARCHES.values())
    found = [folder / name for name in files if (folder / name).is_file()]
    if not found:
        raise SchedlabError(f"{folder} is of no search")
    data: dict[str, Any] = read_json_object(found[0])
    if "table" not in data:
        raise SchedlabError(f"{found[0]}: an earlier version wrote it: search again")
    table = PageTable(data["table"]["header"], data["table"]["rows"], data["table"]["num_text"])
    path = output or folder / "report.html"
    text = render(
        name=str(data["name"]),
        lead=f"{found[0].stem}: {data['num_runs']:,} runs",
        notes=data["lines"],
        results=table,
        command=str(data.get("serve", "")),
        expected=_expected(data) if "expected" in data else None,
        figures=images(search_drawings(folder)),
    )
    write_text(path, text)
    return path


def _expected(data: dict[str, Any]) -> PageTable:
    """Return what `recommend` expects of its choice."""
    rows = []
    for name, found in data["expected"].items():
        metric = metric_named(name)
        mean, half_width = json_number(found["mean"]), json_number(found["ci95"])
        rows.append((metric.axis, with_interval(mean, half_width, metric.scale)))
    return PageTable(("metric", "mean"), rows, note=f"At {number(data['at_rate'])} requests/s.")
