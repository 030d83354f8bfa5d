"""Run all points of an experiment and write the results folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from schedlab.experiments.figures.plots import RATE_KEYS, throughput_against_p99
from schedlab.experiments.results import tables as report
from schedlab.experiments.running.prediction import prediction_line
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.sweep import Point, points
from schedlab.sim.files import write_text
from schedlab.sim.yaml_lines import dump_yaml

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

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
    predictors : list of str
        What was predicted, how well and at what cost, each once.
    warnings : list of str
        What a reader of the numbers must know, each once, with the runs it concerns.
    """

    rows: list[report.Row] = field(default_factory=list)
    cost_models: list[dict[str, object]] = field(default_factory=list)
    predictors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """What the table of an experiment needs of one run.

    Attributes
    ----------
    metrics : mapping of str to float
        Metrics of the run.
    warnings : list of str
        What qualifies them; see `report.warnings`.
    cost_model : dict
        What the cost model says of itself.
    prediction : object
        Provenance of the predictions; None if nothing was predicted.
    """

    metrics: Mapping[str, float]
    warnings: list[str]
    cost_model: dict[str, object]
    prediction: object = None


def gather(todo: Sequence[Point], finished: Sequence[Finished]) -> Outcome:
    """Gather the runs of points into a table, with what qualifies it.

    Parameters
    ----------
    todo : sequence of Point
        What was run, as `sweep.points` orders it.
    finished : sequence of Finished
        What each gave.

    Returns
    -------
    Outcome
        A row a setting.
    """
    outcome = Outcome(rows=report.rows(todo, [one.metrics for one in finished]))
    predicted: dict[str, list[object]] = {}
    found: list[tuple[str, str]] = []
    for point, one in zip(todo, finished, strict=True):
        found += [(point.label, warning) for warning in one.warnings]
        described = one.cost_model
        if described not in outcome.cost_models:
            outcome.cost_models.append(described)
        if one.prediction is not None:
            predicted.setdefault(point.label, []).append(one.prediction)
    outcome.predictors = list(dict.fromkeys(map(prediction_line, predicted.values())))
    outcome.warnings = _told_once(found, len(todo))
    return outcome


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
    from schedlab.experiments.running.run import run

    todo = points(spec)
    finished = []
    for done, point in enumerate(todo):

        def tell(requests_done: int, requests: int, done: int = done, point: Point = point) -> None:
            if progress is not None:
                progress(done, len(todo), point.label, requests_done, requests)

        tell(0, 0)
        result = run(point.spec, tell)
        write_point(
            result, point.spec, folder / point.folder if len(todo) > 1 else folder, perfetto
        )
        described = result.provenance["cost_model"]
        assert isinstance(described, dict)
        finished.append(
            Finished(
                result.metrics(),
                report.warnings(result),
                described,
                result.provenance.get("prediction"),
            )
        )
    outcome = gather(todo, finished)
    if len(todo) > 1:
        write_summary(spec, outcome, folder)
    return outcome


def write_point(
    result: RunResult, spec: ExperimentSpec, folder: Path, perfetto: bool = False
) -> None:
    """Write the files of one run.

    Parameters
    ----------
    result : RunResult
        The run.
    spec : ExperimentSpec
        The point that was run.
    folder : Path
        Where to; made if need be.
    perfetto : bool
        Also write trace.json.
    """
    folder.mkdir(exist_ok=True)
    write_text(folder / "spec.yaml", dump_yaml(spec.to_data()))
    result.save(folder)
    if perfetto:
        result.to_perfetto(folder / "trace.json")


def write_summary(spec: ExperimentSpec, outcome: Outcome, folder: Path) -> None:
    """Write what several points came to: spec.yaml, summary.csv, summary.json, a figure.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    outcome : Outcome
        What its runs gave.
    folder : Path
        Where to.
    """
    write_text(folder / "spec.yaml", dump_yaml(spec.to_data()))
    write_text(folder / "summary.csv", report.summary_csv(outcome.rows))
    write_text(folder / "summary.json", json.dumps(summary(spec, outcome), indent=1) + "\n")
    if any(len({row.settings.get(key) for row in outcome.rows}) > 1 for key in RATE_KEYS):
        from schedlab.experiments.figures.style import save

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
        name, spec_hash, cost_models, predictors, warnings and rows (see `report.summary_data`).
    """
    return {
        "name": spec.name,
        "spec_hash": spec_hash(spec),
        "cost_models": outcome.cost_models,
        "predictors": outcome.predictors,
        "warnings": outcome.warnings,
        "rows": report.summary_data(outcome.rows),
    }


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
