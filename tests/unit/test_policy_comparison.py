"""Policies compared over the seeds they share."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schedlab.experiments.analysis.policy_comparison import compare_policies, left_out, rejections
from schedlab.experiments.commands.app import app
from schedlab.experiments.results import saved_results
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import read_points
from schedlab.experiments.specification.loading import load_spec
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import sweep_all
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.sim.errors import SchedlabError, SpecError


def point(policy, replication, metrics):
    return PointMetrics(policy, {"policy": policy}, replication, policy, metrics)


def schedlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def spec_file(tmp_path, monkeypatch, blank_figures):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.yaml"
    path.write_text(
        "workload: {trace: fixed, num_requests: 30}\nreplications: 5\n"
        "sweep: {policy: [fcfs, static], workload.request_rate: [2, 4]}\n"
    )
    return path


@pytest.mark.slow
def test_compare_reads_runs_and_sweeps_alike(spec_file):
    assert schedlab("run", spec_file, "-o", "run", "-q").exit_code == 0
    sweep_all(load_spec(spec_file), Store(Path("swept")), InProcess())
    found = compare_policies(read_points(Path("run")), ["mean_ttft_ms"])
    assert found == compare_policies(read_points(Path("swept")), ["mean_ttft_ms"])
    assert [(one.setting, one.of, one.against) for one in found] == [
        ("workload.request_rate=2", "static", "fcfs"), ("workload.request_rate=4", "static", "fcfs")
    ]  # fmt: skip
    assert all(one.verdict.startswith("static is worse than fcfs") for one in found)
    shown = schedlab("compare", "swept", "-m", "mean_ttft_ms", "--against", "static")
    assert "fcfs beats static in mean_ttft_ms by" in shown.stdout
    listed = json.loads(schedlab("compare", "swept", "--json").stdout)
    assert listed[0]["change"]["num_pairs"] == 5


def test_rejections_are_told_with_the_run_of_the_most():
    def ran(policy, replication, rejected):
        return point(policy, replication, {"rejected": rejected, "num_requests": 8.0})

    assert rejections([ran("fcfs", 0, 0.0), ran("sjf", 0, 0.0)]) == ""
    told = rejections([ran("fcfs", 0, 2.0), ran("sjf", 0, 0.0), ran("sjf", 1, 8.0)])
    assert told.startswith("2 of 3 runs rejected requests, up to 8 of 8 (sjf): latencies")


def test_compare_command_warns_of_rejections(monkeypatch):
    metrics = {"rejected": 8.0, "num_requests": 8.0, "p99_ttft_ms": math.nan}
    runs = [point(policy, seed, metrics) for policy in ("fcfs", "sjf") for seed in range(2)]
    monkeypatch.setattr(saved_results, "read_points", lambda folder: runs)
    done = schedlab("compare", "there", "-m", "p99_ttft_ms")
    assert done.exit_code == 0, done.output
    assert "warning: 4 of 4 runs rejected requests, up to 8 of 8 (fcfs)" in done.stderr


@pytest.mark.slow
def test_compare_of_one_run_each_is_refused(spec_file):
    assert schedlab("run", spec_file, "replications=1", "-o", "one", "-q").exit_code == 0
    done = schedlab("compare", "one")
    assert done.exit_code == 2
    assert " one: no verdict from one run" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["p99_tft_ms"]}, "did you mean p99_ttft_ms"),
        ({"against": "sjff"}, "did you mean sjf"),
        ({"key": "workload.request_rate"}, "takes no two values"),
    ],
)
def test_compare_wrong_names_are_named(arguments, message):
    runs = [point(p, r, {"p99_ttft_ms": 1.0}) for p in ("fcfs", "sjf") for r in (0, 1)]
    with pytest.raises(SpecError, match=message):
        compare_policies(runs, **{"metrics": ["p99_ttft_ms"], **arguments})


def test_compare_pairs_by_replication_and_leaves_out_what_one_side_lacks():
    def run(policy, replication, value):
        return point(policy, replication, {"failed": value})

    runs = [run("a", 0, 10.0), run("a", 1, 20.0), run("b", 2, 9.0), run("b", 1, 10.0)]
    runs += [run("b", 0, 5.0)]
    (found,) = compare_policies(runs, ["failed"])
    assert found.means == (7.5, 15.0)
    assert found.change.change == -0.5


def test_compare_with_one_seed_left_at_a_setting_compares_the_others_and_names_it(monkeypatch):
    def run(policy, rate, replication, value):
        settings = {"policy": policy, "workload.request_rate": rate}
        metrics = {"p99_ttft_ms": value, "rejected": 0.0, "num_requests": 8.0}
        return PointMetrics(f"{policy}, {rate}", settings, replication, policy, metrics)

    runs = [
        run(policy, rate, seed, 10.0 * seed + (policy == "b"))
        for policy in "ab" for rate in "248" for seed in (1, 2)
        if (policy, rate, seed) not in (("b", "4", 1), ("a", "8", 1), ("b", "8", 2))
    ]  # fmt: skip
    found = compare_policies(runs, ["p99_ttft_ms"])
    assert [(one.setting, one.means) for one in found] == [("workload.request_rate=2", (16, 15))]
    told = ["b against a at workload.request_rate=4: 1 seed in common",
            "b against a at workload.request_rate=8: no seeds in common"]  # fmt: skip
    assert left_out(runs) == told
    monkeypatch.setattr(saved_results, "read_points", lambda folder: runs)
    done = schedlab("compare", "there", "-m", "p99_ttft_ms")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [f"left out: {line}" for line in told]


def test_compare_of_one_seed_everywhere_is_refused():
    runs = [point(policy, 0, {"p99_ttft_ms": 1.0}) for policy in ("fcfs", "sjf")]
    with pytest.raises(SpecError, match="no verdict from one run"):
        compare_policies(runs, ["p99_ttft_ms"])


def test_compare_of_a_folder_without_results_raises(tmp_path):
    with pytest.raises(SchedlabError, match="holds no results"):
        read_points(tmp_path)
