"""Runs are sent to trackers through their own packages, which need not be there."""

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
    assert log_runs(results, "mlflow") == 2
    project, name, parameters, metrics, artifact = sent[:5]
    assert (project, name) == ("logged", "fcfs")
    assert parameters["policy"] == "fcfs"
    assert metrics["completed"] == 5
    assert all(value == value for value in metrics.values())
    assert artifact.endswith("spec.yaml")


def test_wandb_gets_a_run_a_point_and_each_is_finished(results, monkeypatch):
    sent = []
    run = SimpleNamespace(
        log=lambda metrics: sent.append(metrics["completed"]),
        save=lambda *_, **__: None,
        finish=lambda: sent.append("finished"),
    )

    def init(project, name, config, reinit):
        sent.append((project, name, config["policy"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert log_runs(results, "wandb", "mine") == 2
    assert sent[:3] == [("mine", "fcfs", "fcfs"), 5, "finished"]


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
