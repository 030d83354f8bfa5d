"""Finished runs sent to experiment trackers, through their own packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import SavedResults
from schedlab.sim.errors import SchedlabError

Send = Callable[[Any, str, PointMetrics, Mapping[str, str], Mapping[str, float]], None]
"""Sends a run: the tracker's module, the project, the run, its parameters, its metrics."""


def log_runs(results: SavedResults, tracker: str, project: str | None = None) -> int:
    """Send every run of a results folder to a tracker, with its settings, metrics and spec.yaml.

    Parameters
    ----------
    results : SavedResults
        Finished runs.
    tracker : str
        Of `TRACKERS`; where it writes is its own configuration's business.
    project : str, optional
        Experiment (MLflow) or project (Weights & Biases); the experiment's name if absent.

    Returns
    -------
    int
        How many runs were sent.

    Raises
    ------
    SchedlabError
        If its package is not installed, or cannot write where it is configured to.
    """
    try:
        package = import_module(tracker)
    except ImportError:
        raise SchedlabError(f"{tracker} is not installed: pip install {tracker}") from None
    send = TRACKERS[tracker]
    for point in results.runs:
        origin = point.head()["provenance"]
        parameters = {
            "policy": point.policy,
            **point.settings,
            "seed": str(origin.get("seed", "")),
            "replication": str(point.replication),
        }
        metrics = {name: value for name, value in point.metrics.items() if math.isfinite(value)}
        try:
            send(package, project or results.name, point, parameters, metrics)
        except Exception as error:  # whatever the package raises where it cannot write
            raise SchedlabError(f"{tracker}: {' '.join(str(error).split())}") from error
    return len(results.runs)


def _mlflow(
    mlflow: Any,  # noqa: ANN401 - a module that may be absent
    project: str,
    point: PointMetrics,
    parameters: Mapping[str, str],
    metrics: Mapping[str, float],
) -> None:
    mlflow.set_experiment(project)
    with mlflow.start_run(run_name=point.label):
        mlflow.log_params(dict(parameters))
        mlflow.log_metrics(dict(metrics))
        mlflow.log_artifact(str(point.folder / "spec.yaml"))


def _wandb(
    wandb: Any,  # noqa: ANN401 - a module that may be absent
    project: str,
    point: PointMetrics,
    parameters: Mapping[str, str],
    metrics: Mapping[str, float],
) -> None:
    run = wandb.init(project=project, name=point.label, config=dict(parameters), reinit=True)
    run.log(dict(metrics))
    run.save(str(point.folder / "spec.yaml"), base_path=str(point.folder), policy="now")
    run.finish()


TRACKERS: dict[str, Send] = {"mlflow": _mlflow, "wandb": _wandb}
"""How to send a run, by the name of the tracker's package."""
