"""The regression check, with regressions and improvements planted in policy and cost model."""

import importlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from schedlab.experiments.commands import regress as regress_command
from schedlab.experiments.commands.app import app
from schedlab.experiments.regression import baseline as regress_baseline
from schedlab.experiments.regression import check as regress
from schedlab.experiments.regression.check import CaseVerdict, Move
from schedlab.experiments.regression.matrix import MatrixPoint, Tolerance, load_matrix
from schedlab.experiments.regression.report import (
    markdown,
    passes,
    rows,
    summary_lines,
    write_junit,
)
from schedlab.experiments.sweeps.runs import Runs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.policies import registry
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.errors import SpecError

ROOT = Path(__file__).resolve().parents[2]
MATRIX = """\
seeds: [0, 1]
experiment:
  slo: {ttft_ms: 1000}
  engine: {max_num_seqs: 4}
workloads:
  chat:
    workload: {trace: azure-conv, num_requests: 14, request_rate: 8.0}
registered: false
policies:
  fcfs: fcfs
  mine: planted_policy:Mine
metrics:
  completed: {better: higher}
  output_throughput: {relative: 0.02}
  mean_ttft_ms: {relative: 0.05, absolute: 1.0}
  p99_e2el_ms: {relative: 0.05}
  e2el_slo_attainment: {absolute: 0.01}
"""
MINE = """\
from schedlab.policies import ContinuousBatching

class Mine(ContinuousBatching):
    def key(self, request, now):
        return ({}, request.request.arrival_ns, request.request.id)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a matrix, and a policy of its own in a module."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    write_policy(tmp_path)
    yield tmp_path
    sys.modules.pop("planted_policy", None)


@pytest.fixture(scope="module")
def baseline_text(tmp_path_factory):
    """Keep the unchanged program's results once."""
    place = tmp_path_factory.mktemp("baseline")
    (place / "matrix.yaml").write_text(MATRIX)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path, str(place)])
        patched.setattr(sys, "dont_write_bytecode", True)
        write_policy(place)
        assert schedlab("update", place).exit_code == 0
    sys.modules.pop("planted_policy", None)
    return (place / "baseline.json").read_text()


@pytest.fixture
def baselined(folder, baseline_text):
    """Return a folder with a matrix, a policy of its own, and the baseline of both."""
    (folder / "baseline.json").write_text(baseline_text)
    return folder


def write_policy(folder, key="0"):
    (folder / "planted_policy.py").write_text(MINE.format(key))
    sys.modules.pop("planted_policy", None)
    importlib.invalidate_caches()


def schedlab(command, folder, *options):
    arguments = ["regress", command, "--baseline", folder, *options]
    return CliRunner().invoke(app, [str(one) for one in arguments])


def rewrite(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def scale_steps(monkeypatch, factor):
    """Make every simulated step longer or shorter."""
    step_ns = RooflineCostModel.step_ns
    monkeypatch.setattr(
        RooflineCostModel,
        "step_ns",
        lambda self, *given: [round(ns * factor) for ns in step_ns(self, *given)],
    )


def pretend_other_sources(monkeypatch):
    monkeypatch.setattr(regress_baseline, "code_version", lambda: "another version of the sources")
    monkeypatch.setattr(
        "schedlab.experiments.running.point_hash.code_version", lambda **_: "another version"
    )


@pytest.mark.slow
def test_check_of_unchanged_program_compares_exactly_and_passes(folder):
    assert "kept 4 points" in schedlab("update", folder).output
    done = schedlab("check", folder)
    assert done.exit_code == 0, done.output
    assert "2 policies on workloads: 2 same." in done.output
    assert "2 compared to the last bit" in done.output


@pytest.mark.slow
def test_baseline_is_sorted_json_with_a_line_a_point_and_the_same_every_time(folder):
    schedlab("update", folder)
    path = folder / "baseline.json"
    text = path.read_text()
    data = json.loads(text)
    assert [line.split('"')[1] for line in text.splitlines() if line.startswith('"chat/')] == [
        "chat/fcfs/0", "chat/fcfs/1", "chat/mine/0", "chat/mine/1"
    ]  # fmt: skip
    assert list(data) == sorted(data)
    assert data["points"]["chat/fcfs/0"]["metrics"]["completed"] == 14
    assert data["points"]["chat/fcfs/0"]["metrics"]["e2el_slo_attainment"] is None
    schedlab("update", folder)
    assert path.read_text() == text


@pytest.mark.slow
def test_kept_runs_are_not_repeated_and_those_of_another_policy_are(folder):
    schedlab("update", folder, "--keep", folder / "runs")
    first = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    assert len(first) == 4
    shutil.rmtree(next(path.parent for path in first if "mine" in path.parent.name))
    assert schedlab("check", folder, "--keep", folder / "runs").exit_code == 0
    again = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/result.json")}
    assert again.keys() == first.keys()
    assert sum(again[path] == first[path] for path in first) == 3
    write_policy(folder, "-request.request.prompt_tokens")
    assert schedlab("check", folder, "--keep", folder / "runs").exit_code == 1
    assert len(list(folder.glob("runs/*/result.json"))) == 6


@pytest.mark.slow
def test_runs_are_thrown_away_unless_they_are_to_be_kept(folder):
    schedlab("update", folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "baseline.json", "matrix.yaml", "planted_policy.py"
    ]  # fmt: skip


@pytest.mark.slow
def test_check_of_the_real_backend_runs_one_point_at_a_time(baselined):
    rewrite(baselined / "matrix.yaml", "experiment:\n", "experiment:\n  backend: real\n")
    done = schedlab("check", baselined, "-j", "2")
    assert done.exit_code == 2
    assert "one point at a time" in done.output


@pytest.mark.slow
def test_planted_slow_cost_model_is_not_reproduced_by_the_same_sources(baselined, monkeypatch):
    scale_steps(monkeypatch, 1.001)
    done = schedlab("check", baselined)
    assert done.exit_code == 1
    assert "2 not reproduced" in done.output
    assert "NOT REPRODUCED, seed 1" in done.output


@pytest.mark.slow
def test_planted_improvement_of_the_same_sources_is_not_reproduced_either(baselined, monkeypatch):
    scale_steps(monkeypatch, 0.9)
    assert schedlab("check", baselined).exit_code == 1


@pytest.mark.slow
def test_planted_slow_cost_model_of_other_sources_is_worse_with_direction(baselined, monkeypatch):
    pretend_other_sources(monkeypatch)
    scale_steps(monkeypatch, 1.2)
    done = schedlab("check", baselined)
    assert done.exit_code == 1
    assert "2 worse" in done.output
    assert "changed: the simulator's sources" in done.output
    ttft = next(line for line in done.output.splitlines() if "mean_ttft_ms" in line)
    assert "WORSE" in ttft
    assert "+" in ttft
    assert "schedlab regress update" in done.output


@pytest.mark.slow
def test_planted_slow_cost_model_within_tolerance_passes_and_is_counted(baselined, monkeypatch):
    pretend_other_sources(monkeypatch)
    scale_steps(monkeypatch, 1.004)
    done = schedlab("check", baselined)
    assert done.exit_code == 0, done.output
    assert "2 same" in done.output
    assert "0 figures moved" not in done.output


@pytest.mark.slow
def test_planted_improvement_of_other_sources_passes_and_is_shown(baselined, monkeypatch):
    pretend_other_sources(monkeypatch)
    scale_steps(monkeypatch, 0.8)
    done = schedlab("check", baselined, "--junit", baselined / "junit.xml")
    assert done.exit_code == 0
    assert "2 better" in done.output
    assert "Better than kept: schedlab regress update" in done.output
    assert "mean_ttft_ms" in ET.parse(baselined / "junit.xml").find(".//system-out").text


@pytest.mark.slow
def test_planted_regression_in_own_policy_is_found_and_leaves_others_exact(baselined):
    write_policy(baselined, "-request.request.prompt_tokens")
    done = schedlab("check", baselined)
    assert done.exit_code == 1, done.output
    assert "1 worse, 1 same" in done.output
    assert "1 compared to the last bit" in done.output
    assert "1 compared by tolerance" in done.output
    assert "modules of policies of your own" in done.output
    worse = [line for line in done.output.splitlines() if "WORSE" in line]
    assert worse
    assert all(" mine " in line for line in worse)


@pytest.mark.slow
def test_own_policy_that_raises_fails_alone_and_cannot_be_kept(baselined):
    kept = (baselined / "baseline.json").read_bytes()
    write_policy(baselined, "1 / 0")
    done = schedlab("check", baselined, "--junit", baselined / "junit.xml")
    assert done.exit_code == 1
    assert "1 failed, 1 same" in done.output
    assert "ZeroDivisionError" in ET.parse(baselined / "junit.xml").find(".//error").get("message")
    update = schedlab("update", baselined)
    assert update.exit_code == 2
    assert "nothing kept: 2 of 4 points failed, first chat/mine/0: " in update.output
    assert (baselined / "baseline.json").read_bytes() == kept


@pytest.mark.slow
def test_policy_without_baseline_and_baseline_without_policy_are_told(baselined):
    rewrite(baselined / "matrix.yaml", "  fcfs: fcfs\n", "  other: priority\n")
    done = schedlab("check", baselined, "--markdown", baselined / "summary.md")
    assert done.exit_code == 1
    assert "1 new, 1 gone, 1 same" in done.output
    summary = (baselined / "summary.md").read_text()
    assert "| chat | other | - | - | - | - | - | NEW: no baseline for seed 0, 1 |" in summary
    assert "| chat | fcfs | - | - | - | - | - | GONE: kept for seed 0, 1, but" in summary


@pytest.mark.slow
def test_other_seeds_are_told(baselined):
    rewrite(baselined / "matrix.yaml", "seeds: [0, 1]", "seeds: [1, 2]")
    done = schedlab("check", baselined)
    assert done.exit_code == 1
    assert "no baseline for seed 2" in done.output
    assert "kept for seed 0, but" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        ("num_requests: 14", "num_requests: 13", "asks for another run"),
        ("  completed: {better: higher}\n", "", "compares other metrics"),
    ],
)
def test_changed_matrix_is_no_regression_but_another_question(baselined, old, new, detail):
    rewrite(baselined / "matrix.yaml", old, new)
    done = schedlab("check", baselined)
    assert done.exit_code == 1
    assert "2 other question" in done.output
    assert detail in done.output


@pytest.mark.slow
def test_wider_tolerance_leaves_the_question_the_same(baselined):
    rewrite(baselined / "matrix.yaml", "relative: 0.02", "relative: 0.5")
    assert schedlab("check", baselined).exit_code == 0


@pytest.mark.slow
def test_junit_and_markdown_say_what_the_exit_code_says(baselined, monkeypatch):
    junit, summary = baselined / "junit.xml", baselined / "summary.md"
    files = ("--junit", junit, "--markdown", summary)
    assert schedlab("check", baselined, *files).exit_code == 0
    suite = ET.parse(junit).find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "0")
    assert [one.get("name") for one in suite.iter("testcase")] == ["fcfs", "mine"]
    assert summary.read_text().startswith("## Scheduling regression check passed\n")
    pretend_other_sources(monkeypatch)
    scale_steps(monkeypatch, 1.2)
    assert schedlab("check", baselined, *files, "-q").exit_code == 1
    suite = ET.parse(junit).find("testsuite")
    assert suite.get("failures") == "2"
    failure = suite.find("testcase/failure")
    assert failure.get("type") == "worse"
    assert "worse; allowed" in failure.get("message")
    assert summary.read_text().startswith("## Scheduling regression check FAILED\n")
    assert "| chat | fcfs | mean_ttft_ms |" in summary.read_text()


@pytest.mark.parametrize("is_installed", [False, True])
def test_module_that_is_installed_and_hides_the_one_of_the_matrix_is_told(
    folder, monkeypatch, capsys, is_installed
):
    other = folder / ("site-packages" if is_installed else "elsewhere")
    other.mkdir()
    write_policy(other)
    assert regress_command._matrix(folder).points
    assert capsys.readouterr() == ("", "")
    monkeypatch.chdir(other)
    monkeypatch.setattr(sys, "path", [*sys.path[:-1], str(other), str(folder)])
    regress_command._matrix(folder)
    mine = "planted_policy.py"
    told = f"module planted_policy is {other / mine}, which comes before {folder / mine}\n"
    assert capsys.readouterr() == ("", told if is_installed else "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds:", "seed:", "matrix.yaml:1: seed: unknown key; did you mean seeds?"),
        ("seeds: [0, 1]", "seeds: [1, 1]", "matrix.yaml:1: seeds: has the same seed twice"),
        ("better: higher}", "better: more}", "metrics.completed.better"),
        ("completed: {better: higher}", "num_steps: {}", "metrics.num_steps: neither way"),
        (
            "mean_ttft_ms:",
            "mean_tft_ms:",
            "mean_tft_ms: no metric is called",
        ),
        ("relative: 0.02", "relative: -1", "metrics.output_throughput.relative"),
        ("fcfs: fcfs", "fcfs: fcsf", ": policies.fcfs: chat with fcfs: "),
        ("azure-conv", "azure-con", "workloads.chat: chat with fcfs: workload.trace: unknown"),
        ("planted_policy:Mine", "planted_policy:Yours", "policies.mine: "),
        ("  slo:", "  seed: 3\n  slo:", "experiment.seed: is for the matrix to set"),
        ("  chat:", "  ch/at:", "a label is made of letters"),
        ("  chat:", "  chat:\n    policies: [mien]", "chat.policies: there is no policy 'mien'"),
        ("  chat:", "  chat:\n    policies: mine", "chat.policies: a list of labels, got 'mine'"),
        ("  chat:", "  chat:\n    policies: []", "chat.policies: a list of labels, got []"),
        ("registered: false", "registered: true", "aged needs predictions: give predictor"),
    ],
)
def test_check_with_a_wrong_matrix_exits_2_and_names_the_key(folder, old, new, message):
    rewrite(folder / "matrix.yaml", old, new)
    done = schedlab("check", folder)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "baseline.json: no such file; schedlab regress update --baseline"),
        ("{", "not valid JSON"),
        ('{"schema": 99}', "schema 99, this version reads 1"),
        ('{"schema": 1, "code": "", "versions": {}}', "damaged: KeyError: 'points'"),
        ('{"schema": 1, "code": "", "versions": {}, "points": {"a": {}}}', "damaged"),
    ],
)
def test_check_with_a_bad_baseline_exits_2(folder, content, message):
    if content is not None:
        (folder / "baseline.json").write_text(content)
    done = schedlab("check", folder)
    assert done.exit_code == 2
    assert message in done.output


def test_check_without_a_matrix_exits_2(tmp_path):
    done = schedlab("check", tmp_path)
    assert done.exit_code == 2
    assert "matrix.yaml: no such file" in done.output


def test_tolerance_is_the_larger_of_its_bounds_and_nothing_measured_is_worse(folder):
    matrix = load_matrix(folder)
    tolerance = matrix.metrics["mean_ttft_ms"]
    assert tolerance.allowed(100.0) == 5.0
    assert tolerance.allowed(-100.0) == 5.0
    assert tolerance.allowed(2.0) == 1.0
    assert tolerance.allowed(math.nan) == 1.0
    assert not regress._is_better(tolerance, 3.0, math.nan)
    assert not regress._is_better(tolerance, math.nan, 3.0)


@pytest.mark.slow
def test_means_over_the_seeds_are_what_tolerance_judges(folder):
    matrix = load_matrix(folder)
    outcome = regress.measure(matrix, Runs(Store(folder / "runs"), InProcess()))

    def shifted(by):
        points = {}
        for key, point in outcome.points.items():
            ttft = point.metrics["mean_ttft_ms"] + by[key[-1]]
            metrics = {**point.metrics, "mean_ttft_ms": ttft}
            points[key] = regress_baseline.MeasuredPoint(point.question, "old", metrics, "old")
        return regress.compare(matrix, regress_baseline.Baseline("old", {}, points), outcome)

    assert {case.status for case in shifted({"0": 1e5, "1": -1e5})} == {"same"}
    assert {case.status for case in shifted({"0": 1e5, "1": 0.0})} == {"better"}
    worse = shifted({"0": 0.0, "1": -1e5})
    assert {case.status for case in worse} == {"worse"}
    assert [move.metric for move in worse[0].moves] == ["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("now", "status"),
    [(105.0, "same"), (105.2, "worse"), (95.0, "same"), (94.8, "better"), (100.0, "same")],
)
def test_tolerance_is_a_share_of_what_was_kept(now, status):
    kept, found = (
        regress_baseline.MeasuredPoint("q", name, {"m": value}, name)
        for name, value in (("old", 100.0), ("new", now))
    )
    case = regress.CaseVerdict("w", "p")
    tolerance = Tolerance(better="lower", relative=0.05)
    regress._judge_by_tolerance(case, {"m": tolerance}, [(kept, found)])
    assert case.status == status
    assert case.num_within == (now in (95.0, 105.0))
    assert [move.allowed for move in case.moves] == [5.0] * (status != "same")


def test_workload_with_policies_of_its_own_is_run_with_these_only(folder):
    everywhere = load_matrix(folder)
    rewrite(folder / "matrix.yaml", "  chat:", "  chat:\n    policies: [mine]")
    chosen = load_matrix(folder)
    assert {p.policy for p in chosen.points} == {"mine"}
    questions = {p.key: p.question for p in everywhere.points}
    assert all(questions[p.key] == p.question for p in chosen.points)


@pytest.mark.slow
def test_kept_matrix_asks_for_every_registered_policy_on_five_workloads():
    matrix = load_matrix(ROOT / "regression")
    workloads = {}
    for point in matrix.points:
        workloads.setdefault(point.workload, set()).add(point.spec.policy.name)
    assert len(workloads) == 6
    assert workloads.pop("shared") == {"boosted", "edf", "fcfs", "hrrn", "sarathi", "srtf", "vtc"}
    assert all(names == set(registry.names()) for names in workloads.values())
    assert len({p.seed for p in matrix.points}) > 1
    kept = regress_baseline.kept_baseline(ROOT / "regression")
    assert set(kept.points) == {point.key for point in matrix.points}
    for point in matrix.points:
        assert kept.points[point.key].question == point.question[:16]
        assert set(kept.points[point.key].metrics) == set(matrix.metrics)


def test_unknown_folder_names_the_matrix(tmp_path):
    with pytest.raises(SpecError, match=r"matrix\.yaml: no such file"):
        load_matrix(tmp_path / "nowhere")


@pytest.mark.slow
def test_planted_change_of_the_sources_is_found_end_to_end(folder):
    """Edit the cost model in a copy of the program, as a commit would."""
    copy = folder / "checkout"
    for package in ("sim", "policies", "traces", "gpu_backend", "experiments"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(ROOT / "schedlab", copy / "schedlab", symlinks=True)

    def run(command):
        return subprocess.run(
            [sys.executable, "-m", "schedlab", "regress", command, "--baseline", folder],
            cwd=copy, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(copy)},
        )  # fmt: skip

    assert run("update").returncode == 0
    with (copy / "sim" / "cost" / "roofline.py").open("a") as file:
        file.write(
            "\n_true = RooflineCostModel.step_ns\n"
            "RooflineCostModel.step_ns = (\n"
            "    lambda self, *given: [round(ns * 1.3) for ns in _true(self, *given)]\n)\n"
        )
    done = run("check")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 worse" in done.stdout


@pytest.mark.slow
def test_workflow_calls_the_check_with_options_it_has(tmp_path):
    path = ROOT / ".github" / "workflows" / "regression.yml"
    steps = yaml.safe_load(path.read_text())["jobs"]["regress"]["steps"]
    command = next(step["run"] for step in steps if step.get("name") == "Check")
    program, *arguments = shlex.split(command)
    assert program == "schedlab"
    assert load_matrix(ROOT / arguments[arguments.index("--baseline") + 1]).points
    arguments[arguments.index("--baseline") + 1] = str(tmp_path)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "matrix.yaml: no such file" in done.output


def test_documented_matrices_load(folder):
    page = (ROOT / "docs" / "regression.md").read_text()
    plain, own = re.findall(r"^( *)```yaml\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)
    (folder / "matrix.yaml").write_text(plain[1])
    assert {p.spec.policy.name for p in load_matrix(folder).points} == set(registry.names())
    (folder / "matrix.yaml").write_text(textwrap.dedent(own[1]))
    (folder / "our-trace.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},9,9\n" for i in range(500))
    )
    (folder / "lottery.py").write_text(
        "from schedlab.policies import ContinuousBatching\n\n\n"
        "class Lottery(ContinuousBatching):\n"
        "    def __init__(self, tickets: int) -> None:\n"
        "        self.tickets = tickets\n\n"
        "    def key(self, state, now_ns):\n"
        "        return state.request.id % self.tickets\n"
    )
    try:
        assert {p.workload for p in load_matrix(folder).points} == {"chat", "ours"}
    finally:
        sys.modules.pop("lottery", None)


@pytest.mark.parametrize(("key", "is_read"), [("a/b/0", True), ("a/b", False), ("a/b/c/0", False)])
def test_baseline_is_damaged_if_a_name_has_not_three_parts(key, is_read, tmp_path):
    point = regress_baseline.MeasuredPoint("question", "version", {"completed": 3.0}, "0")
    regress_baseline.write_baseline(tmp_path, {key: point})
    if is_read:
        assert regress_baseline.kept_baseline(tmp_path).points == {key: point}
        return
    with pytest.raises(SpecError, match="named workload/policy/seed"):
        regress_baseline.kept_baseline(tmp_path)


_MOVES = [(2.0, 3.0, 0.5), (-2.0, -3.0, -0.5), (-2.0, 0.0, 1.0), (0.0, 1.0, math.inf)]


@pytest.mark.parametrize(("before", "now", "change"), [*_MOVES, (0.0, -1.0, -math.inf)])
def test_change_of_a_figure_has_the_sign_of_its_move(before, now, change):
    assert regress.Move("mean_slack_ms", before, now, allowed=0.0, better=True).change == change


@pytest.mark.slow
def test_update_without_a_folder_begins_with_the_matrix_of_schedlab(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(
        "schedlab.experiments.commands.regress._measure", lambda matrix, *_: asked.append(matrix)
    )
    monkeypatch.setattr(regress, "keep", lambda folder, outcome: None)
    CliRunner().invoke(app, ["regress", "update", "-q"])
    assert (tmp_path / "regression/matrix.yaml").read_text() == (
        ROOT / "regression/matrix.yaml"
    ).read_text()
    assert asked[0].points


def test_report_of_a_check_tells_each_case_in_every_form(tmp_path):
    moves = [
        Move("p99_ttft_ms", 100.0, 125.5, 5.0, better=False),
        Move("completed", 1000.0, 999.99, 0.0, better=True, seed=3),
        Move("rejected", 0.0, 2.0, 0.25, better=False),
    ]
    cases = [
        CaseVerdict("chat", "fcfs", "same", exact=True, num_within=50, seconds=0.25),
        CaseVerdict("chat", "edf", "better", moves=moves[1:2], num_within=2, seconds=1.0),
        CaseVerdict("code", "sjf", "worse", moves=moves[::2], num_within=3, seconds=2.25),
        CaseVerdict("code", "vtc", "failed", detail="\x1b[31mit broke & <fell>"),
        CaseVerdict("code", "old", "gone", detail="not in the matrix"),
        CaseVerdict("code", "exact", "not reproduced", exact=True, moves=moves[1:2]),
        CaseVerdict("code", "none", "same"),
    ]  # fmt: skip
    table = [
        ("code", "sjf", "p99_ttft_ms", "100", "125.5", "+25.50%", "±5", "WORSE"),
        ("code", "sjf", "rejected", "0", "2", "-", "±0.2500", "WORSE"),
        ("code", "vtc", *"-----", "FAILED: \x1b[31mit broke & <fell>"),
        ("code", "old", *"-----", "GONE: not in the matrix"),
        ("code", "exact", "completed", "1,000", "1,000", "-1e-05", "none",
         "NOT REPRODUCED, seed 3"),
        ("chat", "edf", "completed", "1,000", "1,000", "-1e-05", "none", "better"),
    ]  # fmt: skip
    assert rows(cases) == table, "failing ones first"
    assert summary_lines(cases, "numpy") == [
        "7 policies on workloads: 1 worse, 1 not reproduced, 1 failed, 1 gone, 1 better, 2 same.",
        "2 compared to the last bit: same program, same question.",
        "3 compared by tolerance, means over the seeds (changed: numpy); 5 figures moved, but no "
        "further than they may.",
        "If this is meant: schedlab regress update, look at the difference, and commit it.",
    ]
    one = summary_lines([CaseVerdict("chat", "edf", "same", num_within=1)], "numpy")
    assert one[-1].endswith("(changed: numpy); 1 figure moved, but no further than it may.")
    better = cases[:2]
    assert passes(better)
    assert not passes(cases[2:3])
    assert summary_lines(better, "")[-1].startswith("Better than kept: schedlab regress update")
    text = markdown(cases, "numpy")
    assert text.startswith("## Scheduling regression check FAILED\n\n7 policies on workloads")
    assert markdown(better, "").startswith("## Scheduling regression check passed\n")
    assert markdown(cases[:1], "").endswith("same program, same question.\n"), "no table"
    for more, told in ((200, ""), (201, "\n... and 1 more rows.\n"), (215, "and 15 more rows.\n")):
        text = markdown([CaseVerdict("w", f"p{i}", "new") for i in range(more)], "")
        assert text.count("NEW:") == 200
        assert text.endswith(told)
        assert ("more rows" in text) == (more > 200)
    write_junit(cases, tmp_path / "told.xml")
    (suite,) = ET.parse(tmp_path / "told.xml").getroot()
    assert suite.attrib == {
        "name": "schedlab regress", "tests": "7", "errors": "1", "time": "3.500",
        "failures": "3",
    }  # fmt: skip
    first = "p99_ttft_ms: 100 -> 125.5 (+25.50%, worse; allowed ±5)"
    second = "rejected: 0 -> 2 (-, worse; allowed ±0.2500)"
    exact = "completed (seed 3): 1,000 -> 1,000 (-1e-05, better; allowed none)"
    assert [
        (one.get("classname"), one.get("name"), one.get("time"),
         [(part.tag, part.get("type"), part.get("message"), part.text) for part in one])
        for one in suite
    ] == [
        ("regress.chat", "fcfs", "0.250", []),
        ("regress.chat", "edf", "1.000", [("system-out", None, None, exact)]),
        ("regress.code", "sjf", "2.250", [("failure", "worse", first, f"{first}\n{second}")]),
        ("regress.code", "vtc", "0.000",
         [("error", "failed", "[31mit broke & <fell>", "[31mit broke & <fell>")]),
        ("regress.code", "old (gone)", "0.000",
         [("failure", "gone", "not in the matrix", "not in the matrix")]),
        ("regress.code", "exact", "0.000", [("failure", "not reproduced", exact, exact)]),
        ("regress.code", "none", "0.000", []),
    ]  # fmt: skip


def measured(question="q", version="v", digest="d", **metrics):
    values = {"p99_ttft_ms": 100.0, "completed": 50.0, "mean_tpot_ms": math.nan} | metrics
    return regress_baseline.MeasuredPoint(question, version, values, digest)


METRICS = {
    "p99_ttft_ms": Tolerance(better="lower", relative=0.05, absolute=2.0),
    "completed": Tolerance(better="higher"),
    "mean_tpot_ms": Tolerance(better="lower", absolute=1.0),
}


def judged(kept, now, errors=None):
    """Judge the seeds 4 and 9 of a policy; a point that is None is not there."""
    points = [MatrixPoint("chat", "fcfs", seed, None, "q") for seed in (4, 9)]
    of = [
        {point.key: one for point, one in zip(points, some, strict=True) if one is not None}
        for some in (kept, now)
    ]
    seconds = {points[0].key: 1.5, points[1].key: 2.25}
    matrix = SimpleNamespace(points=points, metrics=METRICS)
    outcome = regress.Outcome(of[1], errors or {}, seconds)
    (case,) = regress.compare(matrix, regress_baseline.Baseline("", {}, of[0]), outcome)
    assert (case.workload, case.policy, case.seconds) == ("chat", "fcfs", 3.75)
    return case


def test_point_of_the_same_version_is_held_against_the_last_bit():
    same = measured()
    case = judged([same, same], [same, same])
    assert (case.status, case.exact, case.moves, case.num_within) == ("same", True, [], 0)
    other = measured(p99_ttft_ms=100.0 + 1e-12, completed=51.0, mean_tpot_ms=1.0)
    case = judged([same, same], [same, other])
    assert (case.status, case.exact) == ("not reproduced", True)
    assert case.detail == "the same program and question gave another result"
    assert case.moves == [
        Move("p99_ttft_ms", 100.0, 100.0 + 1e-12, 0.0, False, 9),
        Move("completed", 50.0, 51.0, 0.0, True, 9),
        case.moves[2],
    ]
    assert math.isnan(case.moves[2].before)
    assert (case.moves[2].now, case.moves[2].better, case.moves[2].seed) == (1.0, False, 9)
    # Equal figures of other requests are another result as well.
    case = judged([same, same], [measured(digest="e"), same])
    assert (case.status, case.moves) == ("not reproduced", [])


@pytest.mark.parametrize(
    ("figures", "status", "within", "moved"),
    [
        # Of 100 and 100 the mean may move by 5: the larger of 2 and 5 in a hundred.
        ([{"p99_ttft_ms": 104.0}, {"p99_ttft_ms": 106.0}], "same", 1, []),
        ([{"p99_ttft_ms": 104.0}, {"p99_ttft_ms": 106.5}], "worse", 0,
         [("p99_ttft_ms", 100.0, 105.25, 5.0, False)]),
        ([{"p99_ttft_ms": 90.0}, {"p99_ttft_ms": 99.0}], "better", 0,
         [("p99_ttft_ms", 100.0, 94.5, 5.0, True)]),
        ([{"completed": 51.0}, {"completed": 50.0}], "better", 0,
         [("completed", 50.0, 50.5, 0.0, True)]),
        # Worse ones first, those without a tolerance before all.
        ([{"completed": 49.0, "p99_ttft_ms": 200.0}, {}], "worse", 0,
         [("completed", 50.0, 49.5, 0.0, False), ("p99_ttft_ms", 100.0, 150.0, 5.0, False)]),
        ([{"completed": 52.0, "p99_ttft_ms": 200.0}, {}], "worse", 0,
         [("p99_ttft_ms", 100.0, 150.0, 5.0, False), ("completed", 50.0, 51.0, 0.0, True)]),
    ],
)  # fmt: skip
def test_point_of_another_version_may_move_in_the_mean_over_the_seeds(
    figures, status, within, moved
):
    kept = [measured(), measured()]
    case = judged(kept, [measured(version="w", **figures[0]), measured(**figures[1])])
    assert (case.status, case.exact, case.num_within) == (status, False, within)
    assert [
        (one.metric, one.before, one.now, one.allowed, one.better, one.seed) for one in case.moves
    ] == [(*one, None) for one in moved]


def test_point_that_failed_or_is_new_or_asks_something_else_is_told_as_such():
    same = measured()
    case = judged([None, same], [None, same], {"chat/fcfs/9": "broke"})
    assert (case.status, case.detail) == ("failed", "seed 9: broke")
    case = judged([None, same], [same, same])
    assert (case.status, case.detail) == ("new", "no baseline for seed 4")
    assert judged([None, None], [same, same]).detail == "no baseline for seed 4, 9"
    case = judged([same, measured(question="p")], [same, same])
    assert (case.status, case.exact) == ("other question", False)
    assert case.detail.startswith("the matrix, or a file it names, asks for another run")
    case = judged([same, measured(other=1.0)], [same, same])
    assert (case.status, case.detail) == (
        "other question", "the matrix compares other metrics than those kept"
    )  # fmt: skip


def test_cases_are_those_of_the_matrix_in_its_order_and_then_those_that_are_gone():
    points = [
        MatrixPoint(*key, None, "q")
        for key in (("chat", "sjf", 1), ("chat", "fcfs", 1), ("chat", "sjf", 2))
    ]
    same = measured()
    kept = {point.key: same for point in points}
    gone = {"code/b/7": same, "code/a/3": same, "code/b/10": same}
    outcome = regress.Outcome(dict(kept), {}, dict.fromkeys(kept, 1.0))
    matrix = SimpleNamespace(points=points, metrics=METRICS)
    cases = regress.compare(matrix, regress_baseline.Baseline("", {}, kept | gone), outcome)
    assert [(one.workload, one.policy, one.status, one.seconds) for one in cases] == [
        ("chat", "sjf", "same", 2.0), ("chat", "fcfs", "same", 1.0), ("code", "a", "gone", 0.0),
        ("code", "b", "gone", 0.0),
    ]  # fmt: skip
    assert cases[3].detail == "kept for seed 10, 7, but the matrix does not ask for it any more"


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
def test_update_shows_what_moved_and_where_it_is_kept_unless_quiet(
    tmp_path, monkeypatch, capsys, quiet, is_kept
):
    told = []

    def noting(name, answer=None):
        return lambda *given: told.append((name, *given)) or answer

    command = importlib.import_module("schedlab.experiments.commands.regress")
    outcome = regress.Outcome({"a": 1, "b": 2}, {}, {})
    monkeypatch.setattr(command, "_matrix", lambda folder: f"matrix of {folder.name}")
    monkeypatch.setattr(command, "_measure", noting("measure", outcome))
    monkeypatch.setattr(command, "_print", noting("print"))
    monkeypatch.setattr(regress, "compare", lambda *given: ("verdicts", *given))
    monkeypatch.setattr(regress, "keep", noting("keep"))
    monkeypatch.setattr(regress_baseline, "kept_baseline", lambda folder: "kept")
    monkeypatch.setattr(regress_baseline, "version_change", lambda kept: f"since {kept}")
    folder, name = tmp_path / "ours", "matrix of ours"
    folder.mkdir()
    path = folder / regress_baseline.BASELINE
    if is_kept:
        path.write_text("{}")
    command.update_command(folder, jobs=3, keep="runs", quiet=quiet)
    shown = [("print", ("verdicts", name, "kept", outcome), "since kept")]
    assert told == [
        ("measure", name, 3, "runs", quiet), *(shown if is_kept and not quiet else []),
        ("keep", folder, outcome),
    ]  # fmt: skip
    assert capsys.readouterr().out == ("" if quiet else f"kept 2 points in {path}\n")


@pytest.mark.parametrize("wrong", [True, False, "3", [1]])
def test_metric_of_a_baseline_is_a_number_or_absent(wrong):
    data = {"question": "q", "version": "v", "requests": "r", "metrics": {"a": 3, "b": None}}
    point = regress_baseline._point(data)
    assert (point.question, point.version, point.requests_sha256) == ("q", "v", "r")
    assert point.metrics["a"] == 3
    assert math.isnan(point.metrics["b"])
    assert regress_baseline._data(point) == data
    with pytest.raises(TypeError, match="is no number"):
        regress_baseline._point(data | {"metrics": {"a": wrong}})


def test_baseline_of_which_points_failed_is_not_kept_and_the_first_is_told(tmp_path):
    failed = {"a fcfs 0": "no memory", "b fcfs 0": "no time"}
    outcome = regress.Outcome({}, failed, dict.fromkeys((*failed, "c fcfs 0"), 1.0))
    with pytest.raises(SpecError, match="2 of 3 points failed, first a fcfs 0: no memory"):
        regress.keep(tmp_path, outcome)
    assert not list(tmp_path.iterdir())
