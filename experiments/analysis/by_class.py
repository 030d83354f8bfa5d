"""What each class of requests got: attainment of its targets, goodput, waits, and how evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from schedlab.experiments.results.saved_results import read_points
from schedlab.experiments.statistics import Estimate, estimate
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.fairness import jain_fairness, longest_wait_of, measured_requests
from schedlab.sim.result import RunResult

METRICS = {
    "num_requests": "requests",
    "slo_attainment": "SLO met",
    "ttft_slo_attainment": "TTFT met",
    "tpot_slo_attainment": "TPOT met",
    "e2el_slo_attainment": "E2EL met",
    "request_goodput": "good req/s",
    "mean_ttft_ms": "mean TTFT ms",
    "p99_ttft_ms": "P99 TTFT ms",
    "p99_tpot_ms": "P99 TPOT ms",
    "prefix_hit_share": "cached",
    "longest_wait_s": "longest wait s",
    "jain_fairness": "Jain index",
}
"""What is measured of a class, and its header in a table; the last of all classes together."""


class ClassRow(NamedTuple):
    """One class at one setting.

    Attributes
    ----------
    setting : str
        The swept keys, in a line.
    name : str
        Value of the column that tells classes apart; ``all`` for all requests together.
    metrics : mapping of str to Estimate
        `METRICS` over the replications; ``jain_fairness`` only in the row of all.
    """

    setting: str
    name: str
    metrics: Mapping[str, Estimate]


def class_rows(folder: Path, column: str | None = None) -> list[ClassRow]:
    """Measure every class of every setting of a results folder.

    Parameters
    ----------
    folder : Path
        Of one run, or of a run or sweep of several.
    column : str, optional
        Column of requests.parquet that tells classes apart; ``tenant`` if there is one, else
        ``priority``.

    Returns
    -------
    list of ClassRow
        Setting by setting, class by class, then all. Goodput of a class is its good requests over
        the time of the whole run, so that classes add up; requests without a target are in no
        attainment, rejected ones count as misses.

    Raises
    ------
    SpecError
        If there is no such column.
    SchedlabError
        If the folder holds no results.
    """
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for point in read_points(folder):
        setting = ", ".join(f"{key}={value}" for key, value in point.settings.items())
        for name, metrics in _classes(point.load(), column).items():
            found.setdefault((setting, name), []).append(metrics)
    return [
        ClassRow(
            setting,
            name,
            {key: estimate([one[key] for one in runs if key in one]) for key in runs[0]},
        )
        for (setting, name), runs in found.items()
    ]


def class_table(folder: Path, column: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of `class_rows` as a table, without columns that hold nothing.

    The first two columns, setting and class, are text.
    """
    lines = [[row.setting or "-", row.name, *_cells(row)] for row in class_rows(folder, column)]
    header = ["setting", column or "class", *METRICS.values()]
    shown = [i for i in range(len(header)) if i < 2 or any(line[i] != "-" for line in lines)]
    return [header[i] for i in shown], [[line[i] for i in shown] for line in lines]


def _cells(row: ClassRow) -> list[str]:
    """Return a cell for each of `METRICS`, a dash where there is nothing to measure."""
    cells = []
    for name in METRICS:
        mean, half = row.metrics.get(name, Estimate(math.nan, None))
        if math.isnan(mean):
            cells.append("-")
        else:
            cells.append(f"{mean:.4g}" + (f" ± {float(f'{half:.2g}'):g}" if half else ""))
    return cells


def _classes(result: RunResult, column: str | None) -> dict[str, dict[str, float]]:
    if column is None:
        column = "tenant" if "tenant" in result.requests else "priority"
    if column not in result.requests:
        raise SpecError(f"--column: no {column!r}; {nearest(column, result.requests)}")
    whole = result.metrics()
    rows = measured_requests(result)
    found = {}
    for value, metrics in result.metrics_by(column).items():
        good = metrics["num_slo_met"] / whole["duration_s"] if whole["duration_s"] else math.nan
        of_class = {name: data[rows[column] == value] for name, data in rows.items()}
        found[value if isinstance(value, str) else f"{value:g}"] = {
            **{name: metrics[name] for name in METRICS if name in metrics},
            "prefix_hit_share": metrics["prefix_hit_share"] or math.nan,
            "request_goodput": good if metrics["num_with_slo"] else math.nan,
            "longest_wait_s": longest_wait_of(of_class),
        }
    found["all"] = {
        **{name: whole[name] for name in METRICS if name in whole},
        "prefix_hit_share": whole["prefix_hit_share"] or math.nan,
        "longest_wait_s": longest_wait_of(rows),
        "jain_fairness": jain_fairness(result, column),
    }
    return found
