"""Runs are sent to trackers through their own packages, which need not be there."""

import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import schedlab as sl
from schedlab.experiments.commands.app import app
from schedlab.experiments.results.trackers import log_runs
from schedlab.sim.errors import SchedlabError

SPEC = {
    "name": "logged",
    "seed": 7,
    "replications": 2,
    "workload": {"trace": "fixed", "num_requests": 5, "request_rate": 4},
    "sweep": {"policy": ["fcfs", "static"]},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return sl.run(SPEC, folder=tmp_path_factory.mktemp("logged") / "one").saved


def test_mlflow_gets_parameters_metrics_and_the_experiment(results, monkeypatch):
    sent = []

    @contextmanager
    def start_run(run_name):
        sent.append(run_name)
        yield

    fake = SimpleNamespace(
        set_experiment=sent.append, start_run=start_run, log_params=sent.append,
        log_metrics=sent.append, log_artifact=sent.append,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    assert log_runs(results, "mlflow") == 4
    calls = [sent[i : i + 5] for i in range(0, len(sent), 5)]
    told = [
        ("fcfs", "7", "0"), ("fcfs", "8", "1"), ("static", "7", "0"), ("static", "8", "1"),
    ]  # fmt: skip
    for point, call, (policy, seed, replication) in zip(results.runs, calls, told, strict=True):
        project, name, parameters, metrics, artifact = call
        assert (project, name) == ("logged", point.label)
        assert parameters == {"policy": policy, "seed": seed, "replication": replication}
        assert metrics == {k: v for k, v in point.metrics.items() if math.isfinite(v)}
        assert metrics["completed"] == 5
        assert artifact == str(point.folder / "spec.yaml")


def test_wandb_gets_a_run_a_point_and_each_is_finished(results, monkeypatch):
    sent = []
    run = SimpleNamespace(
        log=lambda metrics: sent.append(metrics["completed"]),
        save=lambda file, **options: sent.append((file, options)),
        finish=lambda: sent.append("finished"),
    )

    def init(project, name, config, reinit):
        sent.append((project, name, config["policy"], config["seed"], reinit))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert log_runs(results, "wandb", "mine") == 4
    folder = results.runs[3].folder
    assert sent[12:] == [
        ("mine", results.runs[3].label, "static", "8", True), 5,
        (str(folder / "spec.yaml"), {"base_path": str(folder), "policy": "now"}), "finished",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tracker", "told"),
    [("mlflow", "pip install mlflow"), ("tensorboard", "choose from mlflow, wandb")],
)
def test_tracker_that_is_not_there_is_told_in_a_line(results, monkeypatch, tracker, told):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    found = CliRunner().invoke(app, ["log", str(results.folder), "--to", tracker])
    assert found.exit_code == 2
    assert told in found.output


def test_tracker_that_cannot_write_is_an_error_in_its_words(results, monkeypatch):
    def refuse(project):
        raise RuntimeError("the store\nis in maintenance")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(set_experiment=refuse))
    with pytest.raises(SchedlabError, match=r"^mlflow: the store is in maintenance$"):
        log_runs(results, "mlflow")
