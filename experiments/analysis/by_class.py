"""What each class of requests got: attainment of its targets, goodput, waits, and how evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from schedlab.experiments.results.saved_results import read_points
from schedlab.experiments.statistics import Estimate, estimate, with_interval
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.registry import Metric, metric_named
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
    "longest_wait": "longest wait s",
    "jain_fairness": "Jain index",
}
"""What is measured of a class unless told, and its header in a table."""

_BETWEEN_CLASSES = "jain_fairness"


class ClassRow(NamedTuple):
    """One class at one setting.

    Attributes
    ----------
    setting : str
        The swept keys, in a line.
    name : str
        Value of the column that tells classes apart; ``all`` for all requests together.
    metrics : mapping of str to Estimate
        By name, over the replications; ``jain_fairness`` between classes, so only in the row of
        all.
    """

    setting: str
    name: str
    metrics: Mapping[str, Estimate]


def class_rows(
    folder: Path, column: str | None = None, metrics: Sequence[str] = tuple(METRICS)
) -> list[ClassRow]:
    """Measure every class of every setting of a results folder.

    Parameters
    ----------
    folder : Path
        Of one run, or of a run or sweep of several.
    column : str, optional
        Column of requests.parquet that tells classes apart; ``tenant`` if there is one, else
        ``priority``.
    metrics : sequence of str
        What to measure: any metric of requests.

    Returns
    -------
    list of ClassRow
        Setting by setting, class by class, then all. Goodput of a class is its good requests over
        the time of the whole run, so that classes add up; requests without a target are in no
        attainment, rejected ones count as misses.

    Raises
    ------
    SpecError
        If there is no such column or metric, or it is not one of requests.
    SchedlabError
        If the folder holds no results.
    """
    asked = [metric_named(name) for name in metrics]
    for one in asked:
        if one.about != "requests":
            raise SpecError(f"{one.name} is of the engine, which serves all classes together")
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for point in read_points(folder):
        setting = ", ".join(f"{key}={value}" for key, value in point.settings.items())
        for name, measured in _classes(point.load(), column, asked).items():
            found.setdefault((setting, name), []).append(measured)
    return [
        ClassRow(
            setting,
            name,
            {key: estimate([one[key] for one in runs if key in one]) for key in runs[0]},
        )
        for (setting, name), runs in found.items()
    ]


def class_table(
    folder: Path, column: str | None = None, metrics: Sequence[str] = tuple(METRICS)
) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of `class_rows` as a table, without columns that hold nothing.

    The first two columns, setting and class, are text.
    """
    names = [metric_named(name).name for name in metrics]
    lines = [
        [row.setting or "-", row.name, *_cells(row, names)]
        for row in class_rows(folder, column, metrics)
    ]
    header = ["setting", column or "class", *(METRICS.get(name, name) for name in names)]
    shown = [i for i in range(len(header)) if i < 2 or any(line[i] != "-" for line in lines)]
    return [header[i] for i in shown], [[line[i] for i in shown] for line in lines]


def _cells(row: ClassRow, names: Sequence[str]) -> list[str]:
    """Return a cell for each metric, a dash where there is nothing to measure."""
    return [with_interval(*row.metrics.get(name, Estimate(math.nan, None))) for name in names]


def _classes(
    result: RunResult, column: str | None, metrics: Sequence[Metric]
) -> dict[str, dict[str, float]]:
    if column is None:
        column = "tenant" if "tenant" in result.requests else "priority"
    if column not in result.requests:
        raise SpecError(f"--column: no {column!r}; {nearest(column, result.requests)}")
    whole = result.observation()
    values = whole.column(column)
    found = {}
    for value in np.unique(whole.requests[column]):
        part = whole.only(values == value)
        found[value if isinstance(value, str) else f"{value:g}"] = {
            one.name: one.of(part) for one in metrics if one.name != _BETWEEN_CLASSES
        }
    between = metric_named(_BETWEEN_CLASSES, column=column)
    found["all"] = {
        one.name: (between if one.name == _BETWEEN_CLASSES else one).of(whole) for one in metrics
    }
    for measured in found.values():
        if measured.get("prefix_hit_share") == 0.0:
            measured["prefix_hit_share"] = math.nan  # no column for what nobody has
    return found
