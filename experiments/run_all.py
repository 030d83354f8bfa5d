"""Run all points of an experiment and write the results folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import report
from experiments.plots import RATE_KEYS, throughput_against_p99
from experiments.spec import ExperimentSpec, spec_hash
from experiments.sweep import Point, points
from experiments.yaml_lines import dump_yaml
from sim.files import replacing

if TYPE_CHECKING:
    from sim.result import RunResult

Progress = Callable[[int, int, str, int, int], None]
"""Called with: points done, points in all, label, requests done, requests in all (0 unknown)."""


@dataclass
class Outcome:
    """What all runs of an experiment gave, without their tables.

    Attributes
    ----------
    rows : list of Row
        A row a setting.
    cost_models : list of dict
        Descriptions of the cost models used, each once.
    warnings : list of str
        What a reader of the numbers must know, each once, with the runs it concerns.
    """

    rows: list[report.Row] = field(default_factory=list)
    cost_models: list[dict[str, object]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run_all(
    spec: ExperimentSpec,
    folder: Path,
    *,
    perfetto: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Run every point of an experiment, one after the other, and write results as they come.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    folder : Path
        An empty folder. One point writes its files into it, several write into a folder each,
        with summary.csv, summary.json and figures beside them.
    perfetto : bool
        Also write trace.json of each run, for ui.perfetto.dev.
    progress : callable, optional
        Told how far it is.

    Returns
    -------
    Outcome
        Metrics of all settings; only one run's tables are in memory at a time.

    Raises
    ------
    SchedlabError
        If a point is invalid or a run ends with an error.
    """
    from experiments.run import run

    todo = points(spec)
    outcome = Outcome()
    metrics = []
    found: list[tuple[str, str]] = []
    for done, point in enumerate(todo):

        def tell(requests_done: int, requests: int, done: int = done, point: Point = point) -> None:
            if progress is not None:
                progress(done, len(todo), point.label, requests_done, requests)

        tell(0, 0)
        result = run(point.spec, tell)
        metrics.append(result.metrics())
        _write_point(result, point, folder / point.folder if len(todo) > 1 else folder, perfetto)
        found += [(point.label, warning) for warning in report.warnings(result)]
        if _cost_model(result) not in outcome.cost_models:
            outcome.cost_models.append(_cost_model(result))
    outcome.rows = report.rows(todo, metrics)
    outcome.warnings = _told_once(found, len(todo))
    if len(todo) > 1:
        _write_summary(spec, outcome, folder)
    return outcome


def _write_point(result: RunResult, point: Point, folder: Path, perfetto: bool) -> None:
    folder.mkdir(exist_ok=True)
    _write(folder / "spec.yaml", dump_yaml(point.spec.to_data()))
    result.save(folder)
    if perfetto:
        result.to_perfetto(folder / "trace.json")


def _write_summary(spec: ExperimentSpec, outcome: Outcome, folder: Path) -> None:
    _write(folder / "spec.yaml", dump_yaml(spec.to_data()))
    _write(folder / "summary.csv", report.summary_csv(outcome.rows))
    _write(folder / "summary.json", json.dumps(summary(spec, outcome), indent=1) + "\n")
    if any(len(spec.sweep.get(key, [])) > 1 for key in RATE_KEYS):
        from experiments.plot_style import save

        save(throughput_against_p99(outcome.rows, spec.name), folder / "throughput_p99")


def summary(spec: ExperimentSpec, outcome: Outcome) -> dict[str, object]:
    """Return what summary.json holds.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    outcome : Outcome
        What its runs gave.

    Returns
    -------
    dict
        name, spec_hash, cost_models, warnings and rows (see `report.summary_data`).
    """
    return {
        "name": spec.name,
        "spec_hash": spec_hash(spec),
        "cost_models": outcome.cost_models,
        "warnings": outcome.warnings,
        "rows": report.summary_data(outcome.rows),
    }


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _cost_model(result: RunResult) -> dict[str, object]:
    """Return what the cost model says of itself, without what it counted in this run."""
    described = result.provenance["cost_model"]
    assert isinstance(described, dict)
    return {key: value for key, value in described.items() if not key.startswith("extrapolated")}


def _told_once(found: Sequence[tuple[str, str]], num_points: int) -> list[str]:
    """Return each warning once, with the runs it concerns; `found` is (label, warning) pairs."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for label, warning in found:
        alike.setdefault(re.sub(r"[0-9][0-9,.]*", "#", warning), []).append((label, warning))
    lines = []
    for group in alike.values():
        labels = list(dict.fromkeys(label for label, _ in group))
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        who = "" if len(group) == num_points else f"{'; '.join(labels[:3])}{more}: "
        vary = " (numbers vary by run)" if len({warning for _, warning in group}) > 1 else ""
        lines.append(who + group[0][1] + vary)
    return lines
