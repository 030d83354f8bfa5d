"""What a results folder holds: the settings and finished points of an experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schedlab.experiments.results.point_folder import PointMetrics, content_hash_of, read_point
from schedlab.experiments.results.tables import Row, rows, summary_csv, summary_data
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.identity import spec_hash
from schedlab.experiments.specification.named_files import name_files
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import read_json_object, write_text
from schedlab.sim.text import json_text
from schedlab.sim.yaml_lines import dump_yaml

POINTS_FILE = "points.json"
"""Which folder inside holds which point of the experiment, in order."""

_OF_SEARCHES = ("find.json", "tune.json", "recommend.json")


@dataclass(frozen=True)
class SavedResults:
    """Finished points of an experiment, and what they come to.

    Attributes
    ----------
    folder : Path
        Where they are.
    name : str
        Of the experiment.
    rows : list of Row
        One a setting; one row without settings for a single point.
    runs : list of PointMetrics
        The points, in the order of the rows, replications together.
    cost_models : list of dict
        Descriptions of the cost models used, each once.
    predictors : list of str
        What was predicted, how well and at what cost, each once.
    warnings : list of str
        What a reader of the numbers must know, each once, with the points it concerns.
    """

    folder: Path
    name: str
    rows: list[Row] = field(default_factory=list)
    runs: list[PointMetrics] = field(default_factory=list)
    cost_models: list[dict[str, Any]] = field(default_factory=list)
    predictors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of(self, row: Row) -> list[PointMetrics]:
        """Return the points of a row, one a replication."""
        return [run for run in self.runs if run.label == row.label]


def read_results(folder: Path) -> SavedResults:
    """Read what `schedlab run` or `schedlab sweep` wrote.

    Parameters
    ----------
    folder : Path
        A results folder, or that of a single point.

    Returns
    -------
    SavedResults
        Over the settings all of whose replications are there; tables of single points are read
        when asked for.

    Raises
    ------
    SchedlabError
        If the folder holds no results, or files in it are not ours.
    """
    if not (folder / POINTS_FILE).is_file():
        points = read_points(folder)
        return _gathered(folder, points[0].label, points)
    name, places = _places(folder)
    points = read_points(folder)
    there = {(*_setting(point.label, point.settings), point.replication) for point in points}
    asked = [
        (_setting(place["label"], place["settings"]), place["replication"]) for place in places
    ]
    torn = {setting for setting, replication in asked if (*setting, replication) not in there}
    whole = [point for point in points if _setting(point.label, point.settings) not in torn]
    results = _gathered(folder, name, whole)
    told = missing_points(folder)
    return replace(results, warnings=[*results.warnings, told]) if told else results


def missing_points(folder: Path) -> str:
    """Say how many points of the last experiment have no result in a folder; nothing if none."""
    if not (folder / POINTS_FILE).is_file():
        return ""
    places = _places(folder)[1]
    gone = [place["label"] for place in places if not _is_there(folder, place)]
    if not gone:
        return ""
    labels = list(dict.fromkeys(gone))
    more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
    return (
        f"{len(gone)} of {len(places)} points have no result in {folder}: "
        f"{'; '.join(labels[:3])}{more}; schedlab sweep runs what is missing"
    )


def _is_there(folder: Path, place: Mapping[str, Any]) -> bool:
    return bool(content_hash_of(folder / place["folder"]) == place["content_hash"])


def read_points(folder: Path) -> list[PointMetrics]:
    """Read the finished points of a results folder, also of settings of which some are missing.

    Parameters
    ----------
    folder : Path
        A results folder, or that of a single point.

    Returns
    -------
    list of PointMetrics
        Those of the last experiment that was run into it, in its order.

    Raises
    ------
    SchedlabError
        If the folder holds no results, or files in it are not ours.
    """
    if (folder / POINTS_FILE).is_file():
        points = [
            read_point(folder / place["folder"], **{key: place[key] for key in _OF_POINT})
            for place in _places(folder)[1]
            if _is_there(folder, place)
        ]
        if not points:
            raise SchedlabError(missing_points(folder))
        return points
    if (folder / "result.json").is_file():
        return [read_point(folder)]
    if not folder.is_dir():
        told = "is a file, and results are a folder" if folder.exists() else "no such folder"
        raise SchedlabError(f"{folder}: {told}")
    if searched := next((name for name in _OF_SEARCHES if (folder / name).is_file()), None):
        raise SchedlabError(
            f"{folder} is of a search, not of a sweep: its verdicts stand in {searched}, which "
            "schedlab report and schedlab plot show where the folder is given by itself"
        )
    raise SchedlabError(f"{folder} holds no results: neither {POINTS_FILE} nor result.json")


def write_summary(spec: ExperimentSpec, results: SavedResults) -> None:
    """Write what several points came to into their folder: spec.yaml, summary.csv, summary.json.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    results : SavedResults
        What it gave.
    """
    folder = results.folder
    write_text(folder / "spec.yaml", dump_yaml(name_files(spec.to_data())))
    write_text(folder / "summary.csv", summary_csv(results.rows))
    write_text(folder / "summary.json", json_text(summary(spec, results)) + "\n")


def summary(spec: ExperimentSpec, results: SavedResults) -> dict[str, object]:
    """Return what summary.json holds.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    results : SavedResults
        What it gave.

    Returns
    -------
    dict
        name, spec_hash, cost_models, predictors, warnings and rows (see `tables.summary_data`).
    """
    return {
        "name": spec.name,
        "spec_hash": spec_hash(spec),
        "cost_models": results.cost_models,
        "predictors": results.predictors,
        "warnings": results.warnings,
        "rows": summary_data(results.rows),
    }


_OF_POINT = ("label", "settings", "replication")


def _places(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the name of an experiment, and which folder holds which of its points."""
    path = folder / POINTS_FILE
    data = read_json_object(path)
    places = data.get("points")
    if not isinstance(places, list) or not places or not all(map(_is_place, places)):
        raise SchedlabError(f"{path}: not a list of points that this version can read")
    return str(data.get("name")), places


def _is_place(place: object) -> bool:
    kinds = {"label": str, "settings": dict, "replication": int, "content_hash": str, "folder": str}
    return (
        isinstance(place, dict)
        and all(isinstance(place.get(key), kind) for key, kind in kinds.items())
        and all(isinstance(value, str) for value in place["settings"].values())
        and Path(place["folder"]).name == place["folder"] != ""
    )


def _setting(label: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    return (label, *settings.values())


def _gathered(folder: Path, name: str, points: Sequence[PointMetrics]) -> SavedResults:
    """Gather points, in the order of `sweep.points`, into a table with what qualifies it."""
    from schedlab.experiments.running.prediction import prediction_line

    cost_models: list[dict[str, Any]] = []
    predicted: dict[str, list[object]] = {}
    told: list[tuple[str, str]] = []
    for point in points:
        told += [(point.label, warning) for warning in point.warnings]
        described = dict(point.cost_model)
        if described not in cost_models:
            cost_models.append(described)
        if point.prediction is not None:
            predicted.setdefault(point.label, []).append(point.prediction)
    return SavedResults(
        folder=folder,
        name=name,
        rows=rows(points, [point.metrics for point in points]),
        runs=list(points),
        cost_models=cost_models,
        predictors=list(dict.fromkeys(map(prediction_line, predicted.values()))),
        warnings=told_once(told, len(points)),
    )


def told_once(told: Sequence[tuple[str, str]], num_points: int) -> list[str]:
    """Return each warning once, with the points it concerns.

    Parameters
    ----------
    told : sequence of (str, str)
        Label of a point, and a warning of it.
    num_points : int
        Points in all.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for label, warning in told:
        alike.setdefault(re.sub(r"[0-9][0-9,.]*", "#", warning), []).append((label, warning))
    lines = []
    for group in alike.values():
        labels = list(dict.fromkeys(label for label, _ in group))
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        who = "" if len(group) == num_points else f"{'; '.join(labels[:3])}{more}: "
        vary = " (numbers vary by run)" if len({warning for _, warning in group}) > 1 else ""
        lines.append(who + group[0][1] + vary)
    return lines
