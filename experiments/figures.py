"""The figures of a results folder that is already there."""

from __future__ import annotations

import json
from pathlib import Path

from experiments import plots
from experiments.plot_style import save
from experiments.report import Estimate, Row
from experiments.results_folder import add_to_marker
from sim.errors import SchedlabError
from sim.result import RunResult


def draw(folder: Path) -> list[Path]:
    """Draw the figures that suit a results folder, into that folder.

    Parameters
    ----------
    folder : Path
        What `schedlab run` wrote.

    Returns
    -------
    list of Path
        The files written: throughput against P99 latency for a sweep over request rates;
        latency distributions, time series and the first requests for a single run.

    Raises
    ------
    SchedlabError
        If the folder holds no results, or a sweep without a request rate.
    """
    if (folder / "summary.json").is_file():
        results, title = _read_summary(folder / "summary.json")
        figures = {"throughput_p99": plots.throughput_against_p99(results, title)}
    elif (folder / "result.json").is_file():
        result = RunResult.load(folder)
        title = f"{result.name} ({result.policy})"
        figures = {
            "ttft_cdf": plots.latency_cdf({result.policy: result}, title, "ttft"),
            "e2el_cdf": plots.latency_cdf({result.policy: result}, title, "e2el"),
            "time_series": plots.time_series(result, title),
            "gantt": plots.gantt(result, title),
        }
    else:
        raise SchedlabError(f"{folder} holds no results: neither summary.json nor result.json")
    written = [path for name, figure in figures.items() for path in save(figure, folder / name)]
    add_to_marker(folder, [path.name for path in written])
    return written


def _read_summary(path: Path) -> tuple[list[Row], str]:
    data = json.loads(path.read_text(encoding="utf-8"))
    results = []
    for entry in data["rows"]:
        intervals = entry.get("ci95", {})
        metrics = {
            name: Estimate(float("nan") if mean is None else mean, intervals.get(name))
            for name, mean in entry["metrics"].items()
        }
        results.append(
            Row(
                label=entry["label"],
                policy=entry["policy"],
                settings=entry["settings"],
                num_replications=entry["num_replications"],
                metrics=metrics,
            )
        )
    if not any(key in row.settings for row in results for key in plots.RATE_KEYS):
        raise SchedlabError(f"{path}: no request rate is swept, so there is no curve to draw")
    return results, data["name"]
