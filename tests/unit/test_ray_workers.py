"""What is asked of Ray, and what comes of its answers, with a stand-in for it."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps import jobs, ray_workers
from schedlab.experiments.sweeps.jobs import Done, Job
from schedlab.experiments.sweeps.ray_workers import LOCAL, RayWorkers
from schedlab.experiments.sweeps.workers import ONE_THREAD
from schedlab.sim.errors import SpecError


class RayError(Exception):
    """As `ray.exceptions.RayError`."""


@pytest.fixture
def ray(monkeypatch):
    """Put a stand-in in place of the package: tasks run when they are got, the last one first."""
    asked = []

    def init(**options):
        if options["address"] == "nobody:1":
            raise ConnectionError("no cluster there")
        asked.append(options)

    def remote(**options):
        asked.append(options)
        return lambda task: SimpleNamespace(remote=lambda job: lambda: task(job))

    def wait(running, num_returns):
        return running[-num_returns:], running[:-num_returns]

    fake = SimpleNamespace(
        init=init,
        asked=asked,
        cluster_resources=lambda: {"CPU": 7.0},
        remote=remote,
        wait=wait,
        get=lambda ready: ready(),
        shutdown=lambda: asked.append("shutdown"),
        exceptions=SimpleNamespace(RayError=RayError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.mark.parametrize("address", [LOCAL, "auto"])
def test_workers_find_modules_and_date_results_as_this_process_does(
    address, ray, monkeypatch, tmp_path
):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "17")
    assert RayWorkers(address, 3, [tmp_path, tmp_path / "b"]).num_workers == 7
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    RayWorkers(address, 3, [])
    dated, undated = (asked["runtime_env"]["env_vars"] for asked in ray.asked)
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "b")])
    assert dated == {"PYTHONPATH": path, "SOURCE_DATE_EPOCH": "17", **ONE_THREAD}
    assert undated == {"PYTHONPATH": "", **ONE_THREAD}
    assert [asked["address"] for asked in ray.asked] == [address] * 2
    assert ray.asked[0]["num_cpus"] == (3 if address == LOCAL else None)


@pytest.mark.parametrize(
    ("resources", "num_workers"), [({}, 1), ({"CPU": 0.5}, 1), ({"CPU": 2}, 2)]
)
def test_cluster_that_tells_of_no_whole_core_has_one_worker(ray, resources, num_workers):
    ray.cluster_resources = lambda: resources
    assert RayWorkers("auto", 3, []).num_workers == num_workers


def test_address_without_a_cluster_is_named(ray):
    with pytest.raises(SpecError, match="--ray nobody:1: no cluster there"):
        RayWorkers("nobody:1", 1, [])


def test_files_of_jobs_that_ended_well_appear_and_errors_are_told(ray, monkeypatch, tmp_path):
    spec = make_spec({"workload": {"trace": "azure-conv", "num_requests": 1}})
    well = Job(spec, "0", tmp_path / "well", "well")
    failed = replace(well, folder=tmp_path / "failed", label="failed")
    died = replace(well, folder=tmp_path / "died", label="died")

    def run_elsewhere(job, folder):
        if job is died:
            raise RayError("the node is gone\nand so on")
        if job is failed:
            return Done(job, 2.0, "does not fit"), {"half": b"written"}
        return Done(job, 1.0, None), {"result.json": b"{}"}

    monkeypatch.setattr(ray_workers, "run_elsewhere", run_elsewhere)
    done = list(RayWorkers(LOCAL, 1, []).run([well, failed, died]))
    assert [(one.job.label, one.error) for one in done] == [
        ("died", "RayError: the node is gone"),
        ("failed", "does not fit"),
        ("well", None),
    ]
    assert (tmp_path / "well" / "result.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["well"]


def test_workers_leave_the_cluster_at_the_end(ray):
    with RayWorkers("auto", 3, []) as workers:
        assert workers.num_workers == 7
        assert ray.asked[-1] != "shutdown"
    assert ray.asked[-1] == "shutdown"


def test_job_has_a_core_of_its_own_and_is_not_tried_again_by_ray(ray):
    assert list(RayWorkers(LOCAL, 1, []).run([])) == []
    assert ray.asked[-1] == {"num_cpus": 1, "max_retries": 0}


@pytest.mark.parametrize("error", ["", "it broke"])
def test_point_that_runs_elsewhere_comes_back_as_files_of_the_folder_it_is_for(
    monkeypatch, tmp_path, error
):
    ran = []

    def run_job(job):
        ran.append(job)
        job.folder.mkdir()
        (job.folder / "result.json").write_text("some")
        (job.folder / "steps.parquet").write_bytes(b"bytes")
        return Done(job, 2.5, error)

    monkeypatch.setattr(jobs, "run_job", run_job)
    job = Job("spec", "hash", Path("/far/away/the-point"), "label", light=True)
    done, files = jobs.run_elsewhere(job, tmp_path)
    assert ran == [Job("spec", "hash", tmp_path / "the-point", "label", light=True)]
    assert done == Done(job, 2.5, error), "as it was asked for"
    expected = {"result.json": b"some", "steps.parquet": b"bytes"}
    assert files == ({} if error else expected)
