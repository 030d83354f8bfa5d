"""Results folders read back, and the figures that suit them."""

import json
import shutil

import pytest

from schedlab.experiments.figures import plots
from schedlab.experiments.figures.chosen import Chosen, draw_chosen
from schedlab.experiments.figures.figures import drawings, shown_load
from schedlab.experiments.report.page import write_page
from schedlab.experiments.results import results_folder, saved_results
from schedlab.experiments.results.point_folder import (
    POINT_FILE,
    PointMetrics,
    content_hash_of,
    read_point,
    write_point,
)
from schedlab.experiments.results.results_folder import MARKER, check_replaceable, replacing_folder
from schedlab.experiments.results.saved_results import read_points, read_results
from schedlab.experiments.results.tables import Estimate, Row, warnings
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.sweep_all import run_into
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.sim.errors import SchedlabError

SWEPT = {
    "name": "small",
    "slo": {"ttft_ms": 500},
    "replications": 2,
    "workload": {"trace": "azure-conv", "num_requests": 12},
    "sweep": {"policy": ["fcfs", "prefill_first"], "workload.request_rate": [2, 8]},
}


def results_of(spec, folder):
    with replacing_folder(folder) as new:
        outcome = run_into(make_spec(spec), new, InProcess())
    return outcome, read_results(folder)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    return results_of(SWEPT, tmp_path_factory.mktemp("results") / "swept")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    spec = {key: value for key, value in SWEPT.items() if key not in ("sweep", "replications")}
    return results_of(spec, tmp_path_factory.mktemp("results") / "single")


@pytest.mark.slow
def test_a_sweep_reads_back_as_its_rows(swept):
    outcome, results = swept
    assert [row.settings for row in results.rows] == [row.settings for row in outcome.rows]
    for read, written in zip(results.rows, outcome.rows, strict=True):
        assert read.mean("p99_ttft_ms") == written.mean("p99_ttft_ms")
        assert read.metrics["p99_ttft_ms"] == written.metrics["p99_ttft_ms"]
    assert results.warnings == outcome.warnings
    assert results.cost_models == outcome.cost_models


@pytest.mark.slow
def test_each_row_finds_its_own_runs(swept):
    _, results = swept
    for row in results.rows:
        runs = results.of(row)
        assert [run.replication for run in runs] == [0, 1]
        values = [run.load().metrics()["mean_ttft_ms"] for run in runs]
        assert sum(values) / 2 == pytest.approx(row.mean("mean_ttft_ms"))
        assert runs[0].head()["policy"] == row.policy


def test_settings_with_a_missing_or_torn_point_are_left_out(swept, tmp_path):
    folder = tmp_path / "torn"
    shutil.copytree(swept[1].folder, folder)
    first, *_, last = read_results(folder).runs
    (first.folder / "steps.parquet").unlink()
    shutil.rmtree(last.folder)
    results = read_results(folder)
    assert [row.settings for row in results.rows] == [r.settings for r in swept[1].rows[1:-1]]
    assert len(results.runs) == 4
    assert len(read_points(folder)) == 6


def test_report_and_plot_of_a_sweep_without_a_complete_setting_say_what_is_missing(tmp_path):
    workload = {"trace": "azure-conv", "num_requests": 2, "request_rate": 2}
    spec = {"name": "cut", "replications": 2, "workload": workload}
    folder = tmp_path / "cut"
    results_of(spec, folder)
    shutil.rmtree(read_points(folder)[0].folder)
    said = r"no setting is complete: 1 of 2 points have no result in .*; schedlab sweep runs what"
    with pytest.raises(SchedlabError, match=said):
        write_page(folder)
    with pytest.raises(SchedlabError, match=said):
        draw_chosen([folder], Chosen())


@pytest.mark.parametrize("num_engines", [1, 2])
def test_figures_of_a_run_that_served_nobody_are_those_that_need_no_step(tmp_path, num_engines):
    workload = {"num_requests": 2, "prompt_tokens": 900, "output_tokens": 1, "request_rate": 1}
    spec = make_spec({"name": "no", "workload": workload, "engine": {"max_model_len": 100},
                      "cluster": num_engines if num_engines > 1 else None})  # fmt: skip
    served = run(spec)
    write_point(served, spec, tmp_path / "no", "hash", 0.0)
    names = [one.name for one in drawings(read_results(tmp_path / "no"))]
    assert names == ["gantt"]
    said = "no request was ever scheduled, e.g.: .*: there are no steps to draw"
    with pytest.raises(SchedlabError, match=said):
        plots.time_series(served, "no")
    if num_engines > 1:
        with pytest.raises(SchedlabError, match=said):
            plots.engines_over_time(served, "no")


def test_a_single_run_reads_back_as_one_row(single):
    outcome, results = single
    (row,) = results.rows
    assert row.settings == {}
    assert row.mean("p99_ttft_ms") == outcome.rows[0].mean("p99_ttft_ms")
    assert results.warnings == outcome.warnings


def test_a_cost_model_is_told_once(swept, tmp_path):
    folder = tmp_path / "two-models"
    shutil.copytree(swept[1].folder, folder)
    fitted = {"name": "fitted", "model": "m", "hardware": "h", "calibration": "CALIBRATED"}
    for path in list(folder.glob("*/result.json"))[:3]:
        data = json.loads(path.read_text())
        data["schedlab"]["provenance"]["cost_model"] = fitted
        path.write_text(json.dumps(data))
    names = [described["name"] for described in read_results(folder).cost_models]
    assert sorted(names) == ["fitted", "roofline"]


def test_a_result_saved_by_hand_says_what_qualifies_it(swept, tmp_path):
    spec = make_spec(SWEPT | {"sweep": {}, "replications": 1, "engine": {"max_model_len": 600}})
    run(spec).save(tmp_path)
    (row,) = read_results(tmp_path).rows
    assert row.label == "small"
    assert "requests rejected" in read_results(tmp_path).warnings[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no results"),
        ({"points.json": "{"}, "not valid JSON"),
        ({"points.json": '{"name": "x", "points": [{}]}'}, "not a list of points"),
        ({"points.json": '{"name": "x", "points": []}'}, "not a list of points"),
        ({"result.json": "{}"}, "not a schedlab result"),
    ],
)
def test_a_folder_without_results_says_what_is_wrong(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(SchedlabError, match=message):
        read_results(tmp_path)


def test_figures_suit_what_is_there(swept, single):
    assert [item.name for item in drawings(swept[1])] == [
        "throughput_p99", "latency_rate", "slo_attainment", "pareto", "gpu_frontier", "heat_map",
        "ttft_cdf", "e2el_cdf",
    ]  # fmt: skip
    assert [item.name for item in drawings(single[1])] == [
        "ttft_cdf", "e2el_cdf", "time_series", "gantt",
    ]  # fmt: skip


def test_a_sweep_without_a_rate_has_a_frontier_and_a_heat_map(tmp_path):
    spec = SWEPT | {"sweep": {"policy": ["fcfs", "prefill_first"]}, "replications": 1}
    spec["workload"] = SWEPT["workload"] | {"request_rate": 4}
    _, results = results_of(spec, tmp_path / "out")
    assert [item.name for item in drawings(results)][:2] == ["pareto", "heat_map"]
    assert shown_load(results.rows) == (results.rows, "")


@pytest.mark.parametrize(
    ("achieved", "expected"),
    [
        ({"a": {"2": 2, "4": 4, "8": 5}, "b": {"2": 2, "4": 3, "8": 3}}, "4"),
        ({"a": {"2": 2, "4": 4, "8": 5}, "b": {"2": 2, "4": 3, "8": 8}}, "8"),
        # Where even the lowest is too much, there is nothing better to show.
        ({"a": {"2": 1, "4": 1, "inf": 1}, "b": {"2": 1, "4": 1, "inf": 1}}, "2"),
    ],
)
def test_shown_load_is_the_highest_that_is_not_all_saturated(achieved, expected):
    def row(policy, rate, reached):
        values = {"offered_request_rate": float(rate), "completed": 1000, "median_e2el_ms": 0.0,
                  "median_queue_time_ms": 0.0, "duration_s": 1000 / reached}  # fmt: skip
        settings = {"policy": policy, "workload.request_rate": rate}
        metrics = {name: Estimate(value, None) for name, value in values.items()}
        return Row(f"{policy} {rate}", policy, settings, 1, metrics)

    rows = [row(p, rate, r) for p, rates in achieved.items() for rate, r in rates.items()]
    shown, load = shown_load(rows)
    assert load == f"at {expected} requests/s"
    assert [one.settings["workload.request_rate"] for one in shown] == [expected, expected]


@pytest.mark.slow
def test_drawing_leaves_a_folder_that_can_be_replaced(single, blank_figures):
    folder = single[1].folder
    written = {path.name for path in draw_chosen([folder], Chosen())[0]}
    assert {"time_series.png", "time_series.svg", "gantt.png"} <= written
    check_replaceable(folder)


@pytest.mark.parametrize("warnings", [True, float("nan"), "text", [1]])
def test_point_whose_warnings_are_no_lines_is_refused_by_its_folder(single, tmp_path, warnings):
    folder = shutil.copytree(single[1].folder, tmp_path / "point")
    (folder / "point.json").write_text(json.dumps({"warnings": warnings}))
    with pytest.raises(SchedlabError, match=r"point: not the result of a point \(.*warnings"):
        read_point(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("settings", "../.."),
        ("settings", {"policy": [1]}),
        ("replication", None),
        ("folder", "../elsewhere"),
        ("folder", ""),
        ("label", 1),
    ],
)
def test_sweep_with_a_point_that_is_none_is_refused_by_its_file(tmp_path, key, value):
    point = {
        "label": "a", "settings": {}, "replication": 0, "content_hash": "0", "folder": "a",
        key: value,
    }  # fmt: skip
    (tmp_path / "points.json").write_text(json.dumps({"name": "x", "points": [point]}))
    with pytest.raises(SchedlabError, match=r"points\.json: not a list of points"):
        read_results(tmp_path)


def test_sweep_with_a_point_that_is_no_mapping_is_refused_by_its_file(tmp_path):
    (tmp_path / "points.json").write_text('{"name": "x", "points": ["a"]}')
    with pytest.raises(SchedlabError, match=r"points\.json: not a list of points"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    "change", [{"kv_capacity_tokens": float("inf")}, {"tiers": [1]}, {"tiers": [{}]}]
)
def test_result_with_an_impossible_number_is_refused_by_its_file(single, tmp_path, change):
    shutil.copytree(single[1].folder, tmp_path / "r")
    path = tmp_path / "r" / "result.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schedlab": data["schedlab"] | change}))
    with pytest.raises(SchedlabError, match=r"result\.json: not a whole schedlab result"):
        read_point(tmp_path / "r").load()


@pytest.mark.parametrize("schema", [0, 99, None])
def test_point_of_another_schema_is_refused_by_its_file(single, tmp_path, schema):
    folder = shutil.copytree(single[1].folder, tmp_path / "point")
    head = json.loads((folder / "result.json").read_text())
    head["schedlab"]["schema"] = schema
    (folder / "result.json").write_text(json.dumps(head))
    with pytest.raises(SchedlabError, match=rf"result schema {schema}, this version reads 1"):
        read_point(folder)


@pytest.mark.parametrize("value", ["many", [1.0], {"a": 1}])
def test_point_whose_metric_is_no_number_is_refused_by_its_folder(single, tmp_path, value):
    folder = shutil.copytree(single[1].folder, tmp_path / "point")
    whole = json.loads((folder / "result.json").read_text())
    whole["schedlab"]["metrics"]["mean_ttft_ms"] = value
    (folder / "result.json").write_text(json.dumps(whole))
    with pytest.raises(SchedlabError, match=r"point: not the result of a point .*mean_ttft_ms"):
        read_point(folder)


@pytest.mark.slow
def test_points_that_are_gone_are_told_by_whoever_reads_the_rest(swept, tmp_path, blank_figures):
    from typer.testing import CliRunner

    from schedlab.experiments.commands.app import app

    folder = tmp_path / "half"
    shutil.copytree(swept[1].folder, folder)
    assert not any("have no result" in line for line in read_results(folder).warnings)
    points = sorted(path for path in folder.iterdir() if path.is_dir())
    shutil.rmtree(points[0])
    said = f"1 of 8 points have no result in {folder}: "
    assert any(said in line for line in read_results(folder).warnings)
    for command in (["compare"], ["by-class"], ["plot", "--figure", "latency_rate"]):
        done = CliRunner().invoke(app, [*command, str(folder)])
        assert f"warning: {said}" in done.stderr, command
    for path in points[1:]:
        shutil.rmtree(path)
    with pytest.raises(SchedlabError, match=r"8 of 8 points have no result .* and 1 more; "):
        read_results(folder)


def test_folder_of_a_search_says_where_its_verdicts_stand(tmp_path):
    (tmp_path / "find.json").write_text("{}")
    with pytest.raises(SchedlabError, match=r"is of a search.*find\.json"):
        read_points(tmp_path)


@pytest.mark.parametrize("lost", [None, POINT_FILE, MARKER, "result.json", "requests.csv"])
def test_folder_of_a_point_is_whole_if_nothing_of_it_is_missing(tmp_path, lost):
    for name, content in {
        POINT_FILE: {"content_hash": "abc"}, MARKER: {"files": ["requests.csv"]},
        "result.json": {}, "requests.csv": {},
    }.items():  # fmt: skip
        if name != lost:
            (tmp_path / name).write_text(json.dumps(content))
    assert content_hash_of(tmp_path) == (None if lost else "abc")
    if lost is None:
        assert content_hash_of(tmp_path, light=False) == "abc"
        (tmp_path / POINT_FILE).write_text(json.dumps({"content_hash": "abc", "light": True}))
        assert (content_hash_of(tmp_path), content_hash_of(tmp_path, light=False)) == ("abc", None)


@pytest.mark.parametrize("label", [None, "ours"])
def test_point_reads_back_with_all_that_was_written_beside_its_result(tmp_path, label):
    policy = {"name": "fcfs", **({} if label is None else {"label": label})}
    spec = make_spec({**SWEPT, "sweep": {}, "replications": 1, "policy": policy})
    result = run(spec)
    write_point(result, spec, tmp_path, "the hash", 1.23456, light=True)
    found = read_point(tmp_path, "called", {"a": "1"}, 4)
    assert (found.label, found.settings, found.replication) == ("called", {"a": "1"}, 4)
    assert found.policy == (label or "fcfs")
    assert (found.seconds, found.folder) == (1.235, tmp_path)
    assert found.warnings == warnings(result)
    assert found.cost_model == result.provenance["cost_model"]
    assert found.prediction is None
    assert len(found.requests_sha256) == 64
    (tmp_path / MARKER).write_text('{"files": ["result.json"]}')
    assert content_hash_of(tmp_path) == "the hash"
    assert content_hash_of(tmp_path, light=False) is None, "its tables were left out"


@pytest.mark.parametrize("are_sessions", [False, True])
def test_table_of_another_run_in_the_folder_of_a_point_is_refused_where_it_is_read(
    tmp_path, are_sessions
):
    sessions = {"count": 3, "turns": 2, "new_tokens": 30, "output_tokens": 4, "think_s": 1}
    lengths = {"num_requests": 6, "prompt_tokens": 30, "output_tokens": 4, "request_rate": 9}
    workload = {"session_rate": 2, "sessions": sessions} if are_sessions else lengths
    for seed in (1, 2):
        spec = make_spec({"name": "one", "seed": seed, "workload": workload})
        write_point(run(spec), spec, tmp_path / str(seed), "hash", 0.0)
    point = read_point(tmp_path / "2")
    assert len(point.load().requests["id"]) == 6
    shutil.copy(tmp_path / "1" / "requests.parquet", tmp_path / "2")
    for read in (point.load, lambda: point.metrics["largest(latency=ttft)"]):
        with pytest.raises(SchedlabError, match=r"2.requests\.parquet: not the table of this run"):
            read()
    (tmp_path / "2" / POINT_FILE).unlink()  # as of a result that was saved by hand
    assert len(read_point(tmp_path / "2").load().requests["id"]) == 6


def test_folder_is_locked_by_one_at_a_time_and_whoever_fails_leaves_nothing_open(
    monkeypatch, tmp_path
):
    pytest.importorskip("fcntl")
    closed = []
    close = results_folder.os.close
    monkeypatch.setattr(
        results_folder.os, "close", lambda number: closed.append(number) or close(number)
    )
    first = results_folder._locked(tmp_path)
    assert first is not None
    assert results_folder._locked(tmp_path) is None
    assert len(closed) == 1
    close(first)
    again = results_folder._locked(tmp_path)
    assert again is not None
    close(again)
    assert results_folder._locked(tmp_path / "nowhere") is None
    assert len(closed) == 1


def test_points_are_gathered_with_each_model_once_and_predictions_by_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "schedlab.experiments.running.prediction.prediction_line", lambda found: f"of {found}"
    )
    points = [
        PointMetrics(
            label, {"policy": label}, seed, label, {"p99_ttft_ms": 1.0 + seed}, folder=tmp_path,
            cost_model={"name": model}, prediction=prediction, warnings=warnings,
        )
        for label, seed, model, prediction, warnings in (
            ("a", 0, "m", 1, ["3 requests rejected"]), ("a", 1, "m", 2, ["4 requests rejected"]),
            ("b", 0, "n", None, ["odd"]), ("c", 0, "m", 3, ["odd"]),
        )
    ]  # fmt: skip
    found = saved_results._gathered(tmp_path, "mine", points)
    assert (found.folder, found.name, found.runs) == (tmp_path, "mine", points)
    assert [(row.label, row.num_replications) for row in found.rows] == [
        ("a", 2), ("b", 1), ("c", 1)
    ]  # fmt: skip
    assert found.cost_models == [{"name": "m"}, {"name": "n"}]
    assert found.predictors == ["of [1, 2]", "of [3]"]
    assert found.warnings == ["a: 3 requests rejected (numbers vary by run)", "b; c: odd"]
