"""Results of many runs in one table: on the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schedlab.experiments.statistics import Estimate, estimate, with_interval
from schedlab.sim.text import number

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

Metrics = Mapping[str, float]

_SHOWN_WARNINGS = 8
_SHOWN_PREDICTORS = 8
# What of a trace's report means that the workload is not just the file.
_CHANGED = re.compile(r"^rows dropped|clipped|estimate")


@dataclass(frozen=True)
class Row:
    """One setting of a sweep, over all its replications.

    Attributes
    ----------
    label : str
        The settings in one line.
    policy : str
        Name of the policy.
    settings : dict of str to str
        Swept key to its value, as short text.
    num_replications : int
        Runs behind each estimate.
    metrics : mapping of str to Estimate
        Those that every run has; any other that the runs can tell is estimated when asked for.
    """

    label: str
    policy: str
    settings: dict[str, str]
    num_replications: int
    metrics: Mapping[str, Estimate]

    def estimate(self, metric: str) -> Estimate:
        """Return a metric over the replications; NaN where it does not exist."""
        try:
            return self.metrics[metric]
        except KeyError:
            return Estimate(math.nan, None)

    def mean(self, metric: str) -> float:
        """Return the mean of a metric; NaN where it does not exist."""
        return self.estimate(metric).mean

    def told(self, metric: str) -> Estimate:
        """Return a metric of those that every run has; NaN where it is not among them."""
        return self.metrics.get(metric, Estimate(math.nan, None))


def metrics_told(rows: Sequence[Row]) -> list[str]:
    """Name the metrics that runs of any row have, in order: some have more tiers than others."""
    return list(dict.fromkeys(name for row in rows for name in row.metrics))


class _Estimates(dict[str, Estimate]):
    """Metrics over replications; those that only some ask for are estimated then."""

    def __init__(self, replications: Sequence[Metrics]) -> None:
        super().__init__({
            name: estimate([one[name] for one in replications]) for name in replications[0]
        })  # fmt: skip
        self._replications = replications

    def __missing__(self, name: str) -> Estimate:
        return estimate([one[name] for one in self._replications])


class Setting(Protocol):
    """What tells the points of one setting from those of another."""

    @property
    def label(self) -> str:
        """Return the settings in one line."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Return swept key to value, as short text."""

    @property
    def policy(self) -> str:
        """Return the name of the policy."""


def rows(points: Sequence[Setting], metrics: Sequence[Metrics]) -> list[Row]:
    """Gather the replications of each setting.

    Parameters
    ----------
    points : sequence of Setting
        What was run, replications of a setting next to each other as `sweep.points` gives them.
    metrics : sequence of mapping
        The metrics of each run.

    Returns
    -------
    list of Row
        One a setting, in order.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault((point.label, *point.settings.values()), []).append(i)
    gathered = []
    for members in groups.values():
        first = points[members[0]]
        gathered.append(
            Row(
                label=first.label,
                policy=first.settings.get("policy", first.policy),
                settings=dict(first.settings),
                num_replications=len(members),
                metrics=_Estimates([metrics[i] for i in members]),
            )
        )
    return gathered


class ResultTable(NamedTuple):
    """The table a run prints.

    Attributes
    ----------
    header : list of str
        Names of the columns, with units; those of a pair share their first line.
    rows : list of list of str
        A line a setting.
    num_keys : int
        Columns from the left that tell the settings apart: the policy and the swept keys.
    note : str
        What the signs mean, and what is left out because it never happened.
    """

    header: list[str]
    rows: list[list[str]]
    num_keys: int
    note: str


def result_table(results: Sequence[Row], metrics: Sequence[str] = ()) -> ResultTable:
    """Return the table a run prints.

    Parameters
    ----------
    results : sequence of Row
        The settings.
    metrics : sequence of str
        What else to show, by name.

    Returns
    -------
    ResultTable
        A line a setting: throughput, goodput where there are targets, the share of prompt tokens
        found in the prefix cache where any were, mean and P99 of the latencies, preemptions,
        rejections where there were any.
    """
    swept = list(results[0].settings) if results else []
    others = [key for key in swept if key != "policy"]
    columns = {"req/s": "request_throughput", "tok/s": "output_throughput"}
    if any(row.mean("num_with_slo") > 0 for row in results):
        columns["good\nreq/s"] = "request_goodput"
    if any(row.mean("prefix_hit_share") > 0 for row in results):
        columns["cached\nshare"] = "prefix_hit_share"
    for name in ("ttft", "tpot", "itl", "e2el"):
        columns[f"{name.upper()} ms\nmean"] = f"mean_{name}_ms"
        columns[f"{name.upper()} ms\nP99"] = f"p99_{name}_ms"
    counts = {"preempted": "num_preemptions", "rejected": "rejected"}
    absent = [name for name, count in counts.items() if not any(row.mean(count) for row in results)]
    counts = {name: count for name, count in counts.items() if name not in absent}
    rows = [
        [
            row.policy,
            *(row.settings[key] for key in others),
            *(_cell(row, metric) for metric in columns.values()),
            *(number(row.mean(metric)) for metric in counts.values()),
            *(_cell(row, metric) for metric in metrics),
        ]
        for row in results
    ]
    several = any(row.num_replications > 1 for row in results)
    notes = ["± is the 95 % confidence interval over replications"] if several else []
    notes += [f"no request was {' or '.join(absent)}"] if absent else []
    if any(row.mean("mean_itl_ms") > row.mean("p99_itl_ms") for row in results):
        notes.append("a mean ITL above its P99: fewer than one gap in 100, but long ones")
    keys = ["policy", *(key.rsplit(".", 1)[-1] for key in others)]
    return ResultTable(
        [*keys, *columns, *counts, *metrics],
        rows,
        len(keys),
        "; ".join(notes),
    )


def summary_csv(results: Sequence[Row]) -> str:
    """Return a CSV with a line a setting: settings, replications, each metric and its interval.

    Parameters
    ----------
    results : sequence of Row
        The settings.

    Returns
    -------
    str
        Full precision; columns `<metric>` and, for several replications, `<metric>_ci95`.
    """
    several = any(row.num_replications > 1 for row in results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = metrics_told(results)
    keys = list(results[0].settings)
    header = ["label", "policy", *keys, "num_replications"]
    for name in names:
        header += [name, f"{name}_ci95"] if several else [name]
    # A swept policy is already the column of that name.
    writer.writerow(dict.fromkeys(header))
    for row in results:
        cells: list[object] = [row.label, row.policy]
        cells += [value for key, value in row.settings.items() if key != "policy"]
        cells.append(row.num_replications)
        for name in names:
            mean, half_width = row.told(name)
            cells += [mean, half_width] if several else [mean]
        writer.writerow(cells)
    return text.getvalue()


def summary_data(results: Sequence[Row]) -> list[dict[str, object]]:
    """Return the same as plain data, for `json_text`.

    Parameters
    ----------
    results : sequence of Row
        The settings.

    Returns
    -------
    list of dict
        Keys label, policy, settings, num_replications, metrics and, for several replications,
        ci95 (metric to half-width).
    """
    data = []
    for row in results:
        entry: dict[str, object] = {
            "label": row.label,
            "policy": row.policy,
            "settings": row.settings,
            "num_replications": row.num_replications,
            "metrics": {name: value.mean for name, value in row.metrics.items()},
        }
        if row.num_replications > 1:
            entry["ci95"] = {name: value.half_width for name, value in row.metrics.items()}
        data.append(entry)
    return data


def warnings(result: RunResult) -> list[str]:
    """Return what qualifies the numbers of a run.

    Parameters
    ----------
    result : RunResult
        The run.

    Returns
    -------
    list of str
        What part of the run is measured, requests rejected (with a reason) or cut off,
        steps outside the measured range of the cost model, what could be said before the run
        (`experiments.running.cautions`), a predictor tested on what it learned from, and rows of
        the trace that were dropped, clipped or estimated.
    """
    metrics = result.metrics()
    found = []
    if result.window is not None:
        begin_s = (result.window.begin_ns - result.requests["arrival_ns"].min()) / 1e9
        found.append(
            f"measured from {begin_s:.4g} s to {begin_s + result.window.duration_s:.4g} s after "
            f"the first arrival: {metrics['num_requests']:.0f} of {len(result.requests['id'])} "
            "requests arrived then; rates are of that time"
        )
    if metrics["rejected"]:
        example = next(iter(result.reject_reasons.values()), "no reason given")
        counts = f"{metrics['rejected']:.0f} of {metrics['num_requests']:.0f}"
        found.append(f"{counts} requests rejected, e.g.: {example}")
    if metrics["truncated"]:
        found.append(f"{metrics['truncated']:.0f} answers cut off by a length limit")
    extrapolated = result.provenance.get("extrapolated_steps", 0)
    if extrapolated:
        found.append(
            f"{extrapolated} of {result.provenance['num_steps']} steps lie outside the range the "
            "cost model was measured in; their times are extrapolated"
        )
    told = result.provenance.get("cautions", [])
    assert isinstance(told, list)
    found += told
    prediction = result.provenance.get("prediction")
    if isinstance(prediction, dict) and prediction.get("learned_from_this_trace"):
        found.append(
            "the predictor learned from prompts of this very trace, so it does better here than on "
            "new ones (schedlab predictor held-out writes those it did not learn from)"
        )
    lines = result.provenance.get("workload", [])
    assert isinstance(lines, list)
    return found + changed_rows(lines)


def changed_rows(lines: Sequence[str]) -> list[str]:
    """Return, of what is told of a workload, which rows are not as its trace has them."""
    return [line.removeprefix("note: ") for line in lines if _CHANGED.search(line)]


def notes(
    cost_models: Sequence[Mapping[str, object]],
    found: Sequence[str],
    predictors: Sequence[str] = (),
) -> list[str]:
    """Return the lines to print under a table: cost models, predictors and warnings.

    Parameters
    ----------
    cost_models : sequence of mapping
        What `CostModel.describe` says of each model used.
    found : sequence of str
        The warnings of all runs; those beyond the first few are counted.
    predictors : sequence of str
        A line on each predictor; those beyond the first few are counted.

    Returns
    -------
    list of str
        One line each.
    """
    lines = []
    for described in cost_models:
        kind = f"cost model: {described.get('name', 'of no name')}"
        of = [str(described[key]) for key in ("model", "hardware") if described.get(key)]
        if of:
            kind += f" ({' on '.join(of)})"
        calibration = described.get("calibration")
        if calibration == "UNCALIBRATED":
            kind += (
                ", UNCALIBRATED: compare policies by it, do not take its times for measured ones"
            )
        elif calibration:
            kind += f", calibrated: {calibration}{_known_error(described)}"
        lines.append(kind)
    lines += predictors[:_SHOWN_PREDICTORS]
    if len(predictors) > _SHOWN_PREDICTORS:
        lines.append(f"and {len(predictors) - _SHOWN_PREDICTORS} more predictions, in the results")
    lines += [f"warning: {warning}" for warning in found[:_SHOWN_WARNINGS]]
    if len(found) > _SHOWN_WARNINGS:
        lines.append(f"warning: and {len(found) - _SHOWN_WARNINGS} more, in the results")
    return lines


def _known_error(described: Mapping[str, object]) -> str:
    """Say what is known of a profile's error."""
    known = described.get("published_error")
    error = described.get("error")
    if isinstance(error, Mapping):
        held_out = error.get("held_out")
        known = "not known, no step was held out of the fit"
        if isinstance(held_out, Mapping):
            known = f"{held_out['mape']:.1%} mean on steps it was not fitted to"
    return f"; error: {known}" if known else ""


def _cell(row: Row, metric: str) -> str:
    return with_interval(*row.estimate(metric))
