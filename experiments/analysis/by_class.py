"""What each class of requests got: attainment of its targets, goodput, waits, and how evenly."""

from __future__ import annotations

import math
from collections import Counter
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
_ALL = "all"


class ClassRow(NamedTuple):
    """One class at one setting.

    Attributes
    ----------
    setting : str
        The swept keys, in a line.
    name : str
        Value of the column that tells classes apart; ``all`` for all requests together, or
        ``all requests`` where a class is called that.
    metrics : mapping of str to Estimate
        By name, over the replications that have requests of the class; ``jain_fairness`` between
        classes, so only in the row of all.
    num_runs : int
        How many replications those are.
    num_without : int
        How many others of the setting there are.
    """

    setting: str
    name: str
    metrics: Mapping[str, Estimate]
    num_runs: int = 1
    num_without: int = 0


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
    found: dict[tuple[str, str | None], list[dict[str, float]]] = {}
    num_points: Counter[str] = Counter()
    for point in read_points(folder):
        setting = ", ".join(f"{key}={value}" for key, value in point.settings.items())
        num_points[setting] += 1
        for name, measured in _classes(point.load(), column, asked).items():
            found.setdefault((setting, name), []).append(measured)
    whole = _ALL if all(name != _ALL for _, name in found) else f"{_ALL} requests"
    return [
        ClassRow(
            setting,
            whole if name is None else name,
            {key: _estimate(key, [one[key] for one in runs if key in one]) for key in runs[0]},
            len(runs),
            num_points[setting] - len(runs),
        )
        for (setting, name), runs in found.items()
    ]


def _estimate(name: str, values: Sequence[float]) -> Estimate:
    if name == "prefix_hit_share" and not any(values):
        return Estimate(math.nan, None)  # no column for what nobody has
    return estimate(values)


def class_table(
    folder: Path, column: str | None = None, metrics: Sequence[str] = tuple(METRICS)
) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of `class_rows` as a table, without columns that hold nothing.

    The first two columns, setting and class, are text; a class that some replications have no
    request of says how many have.
    """
    names = [metric_named(name).name for name in metrics]
    lines = [
        [row.setting or "-", _told(row), *_cells(row, names)]
        for row in class_rows(folder, column, metrics)
    ]
    header = ["setting", column or "class", *(METRICS.get(name, name) for name in names)]
    shown = [i for i in range(len(header)) if i < 2 or any(line[i] != "-" for line in lines)]
    return [header[i] for i in shown], [[line[i] for i in shown] for line in lines]


def _told(row: ClassRow) -> str:
    num = row.num_runs + row.num_without
    return f"{row.name} ({row.num_runs} of {num} runs)" if row.num_without else row.name


def _cells(row: ClassRow, names: Sequence[str]) -> list[str]:
    """Return a cell for each metric, a dash where there is nothing to measure."""
    return [with_interval(*row.metrics.get(name, Estimate(math.nan, None))) for name in names]


def _name(value: object) -> str:
    """Return how a class is called that has a value in its column."""
    if value != value:
        return "none"
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _classes(
    result: RunResult, column: str | None, metrics: Sequence[Metric]
) -> dict[str | None, dict[str, float]]:
    """Measure each class by its name, then all requests by none."""
    if column is None:
        column = "tenant" if "tenant" in result.requests else "priority"
    if column not in result.requests:
        raise SpecError(f"--column: no {column!r}; {nearest(column, result.requests)}")
    whole = result.observation()
    found: dict[str | None, dict[str, float]] = {}
    for value in np.unique(whole.requests[column]).tolist():
        part = whole.only_where(column, value)
        found[_name(value)] = {
            one.name: one.of(part) for one in metrics if one.name != _BETWEEN_CLASSES
        }
    between = metric_named(_BETWEEN_CLASSES, column=column)
    found[None] = {
        one.name: (between if one.name == _BETWEEN_CLASSES else one).of(whole) for one in metrics
    }
    return found
