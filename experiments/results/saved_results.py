"""What a results folder holds, read back: one run, or the settings and runs of a sweep."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.results.tables import Row, warnings
from schedlab.experiments.statistics import Estimate
from schedlab.sim.errors import SchedlabError

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

_NUMBERED = re.compile(r"^\d+-")


@dataclass(frozen=True)
class SavedRun:
    """One run of a sweep.

    Attributes
    ----------
    label : str
        Its settings in one line, as in the summary.
    replication : int
        0-based.
    folder : Path
        Where its result.json and tables are.
    """

    label: str
    replication: int
    folder: Path

    def load(self) -> RunResult:
        """Return the run with its tables."""
        from schedlab.sim.result import RunResult

        return RunResult.load(self.folder)

    def head(self) -> dict[str, Any]:
        """Return metrics and provenance alone, as plain data, without reading any table."""
        ours = _json(self.folder / "result.json").get("schedlab")
        if not isinstance(ours, dict):
            raise SchedlabError(f"{self.folder / 'result.json'}: not a schedlab result")
        return ours


@dataclass(frozen=True)
class SavedResults:
    """A results folder.

    Attributes
    ----------
    folder : Path
        Where it is.
    name : str
        Of the experiment.
    rows : list of Row
        One a setting; one row without settings for a single run.
    runs : list of SavedRun
        All runs whose files are there, in the order of the rows, replications together.
    cost_models : list of dict
        Descriptions of the cost models used, each once.
    predictors, warnings : list of str
        As under the table of `schedlab run`.
    """

    folder: Path
    name: str
    rows: list[Row]
    runs: list[SavedRun]
    cost_models: list[dict[str, Any]]
    predictors: list[str]
    warnings: list[str]

    def of(self, row: Row) -> list[SavedRun]:
        """Return the runs of a row, one a replication."""
        return [run for run in self.runs if run.label == row.label]


def read_results(folder: Path) -> SavedResults:
    """Read what `schedlab run` or `schedlab sweep` wrote.

    Parameters
    ----------
    folder : Path
        A results folder.

    Returns
    -------
    SavedResults
        The tables of single runs are read when asked for.

    Raises
    ------
    SchedlabError
        If the folder holds no results, or files in it are not ours.
    """
    if (folder / "summary.json").is_file():
        return _read_summary(folder)
    if (folder / "result.json").is_file():
        return _read_one(folder)
    raise SchedlabError(f"{folder} holds no results: neither summary.json nor result.json")


def _read_summary(folder: Path) -> SavedResults:
    path = folder / "summary.json"
    data = _json(path)
    try:
        rows = [_row(entry) for entry in data["rows"]]
        return SavedResults(
            folder=folder,
            name=data["name"],
            rows=rows,
            runs=_runs(folder, rows),
            cost_models=_each_once(data["cost_models"]),
            predictors=data["predictors"],
            warnings=data["warnings"],
        )
    except (KeyError, TypeError) as error:
        raise SchedlabError(f"{path}: not a summary of schedlab ({error!r})") from error


def _read_one(folder: Path) -> SavedResults:
    from schedlab.experiments.running.prediction import prediction_line

    run = SavedRun("", 0, folder)
    result = run.load()
    metrics = {name: Estimate(value, None) for name, value in result.metrics().items()}
    row = Row("", result.policy, {}, 1, metrics)
    prediction = result.provenance.get("prediction")
    described = result.provenance["cost_model"]
    assert isinstance(described, dict)
    return SavedResults(
        folder=folder,
        name=result.name,
        rows=[row],
        runs=[run],
        cost_models=_each_once([described]),
        predictors=[prediction_line([prediction])] if prediction is not None else [],
        warnings=warnings(result),
    )


def _row(entry: Mapping[str, Any]) -> Row:
    intervals = entry.get("ci95", {})
    metrics = {
        name: Estimate(math.nan if mean is None else float(mean), intervals.get(name))
        for name, mean in entry["metrics"].items()
    }
    return Row(
        label=entry["label"],
        policy=entry["policy"],
        settings=entry["settings"],
        num_replications=entry["num_replications"],
        metrics=metrics,
    )


def _each_once(cost_models: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each description once, with model and device of what it describes."""
    found: list[dict[str, Any]] = []
    for described in cost_models:
        # A profile has model and device among its particulars.
        meta = described.get("meta") or {}
        kept = {key: meta[key] for key in ("model", "hardware") if key in meta} | dict(described)
        if kept not in found:
            found.append(kept)
    return found


def _runs(folder: Path, rows: Sequence[Row]) -> list[SavedRun]:
    """Find the folder of each run: by points.json (a sweep), or by their numbers (a run)."""
    if (folder / "points.json").is_file():
        return [
            SavedRun(point["label"], point["replication"], folder / point["folder"])
            for point in _json(folder / "points.json")
            if (folder / point["folder"] / "result.json").is_file()
        ]
    numbered = sorted(
        (path.parent for path in folder.glob("*/result.json") if _NUMBERED.match(path.parent.name)),
        key=lambda path: int(path.name.partition("-")[0]),
    )
    places = [(row.label, r) for row in rows for r in range(row.num_replications)]
    return [
        SavedRun(*places[number], path)
        for path in numbered
        if (number := int(path.name.partition("-")[0])) < len(places)
    ]


def _json(path: Path) -> Any:  # noqa: ANN401 - whatever JSON holds
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SchedlabError(f"{path}: cannot read: {error.strerror}") from error
    except ValueError as error:
        raise SchedlabError(f"{path}: not JSON: {error}") from error
