"""Tables over settings and replications."""

import csv
import io
import json
import math

import pytest

from schedlab.experiments.report.live import live_data
from schedlab.experiments.report.page import _all_metrics
from schedlab.experiments.results import tables as report
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sweep import points
from schedlab.sim.text import json_text

WORKLOAD = {"trace": "azure-conv", "num_requests": 10, "request_rate": 2.0}


def two_by_two():
    spec = make_spec(
        {"workload": WORKLOAD, "replications": 2, "sweep": {"policy": ["fcfs", "static"]}}
    )
    metrics = [{"p99_ttft_ms": value, "rejected": 0} for value in (1.0, 3.0, 10.0, math.nan)]
    return report.rows(points(spec), metrics)


def test_estimate_is_the_t_interval():
    # mean 2, s = 1, t(0.975, 2) = 4.30265: half-width 4.30265 / sqrt(3).
    mean, half_width = report.estimate([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half_width == pytest.approx(2.48414, abs=1e-5)


def test_estimate_of_one_replication_has_no_interval():
    assert report.estimate([5.0]) == (5.0, None)


def test_rows_gather_the_replications_of_each_setting():
    rows = two_by_two()
    assert [(row.label, row.policy, row.num_replications) for row in rows] == [
        ("fcfs", "fcfs", 2), ("static", "static", 2)
    ]  # fmt: skip
    assert rows[0].mean("p99_ttft_ms") == 2.0
    assert math.isnan(rows[1].mean("p99_ttft_ms"))
    assert math.isnan(rows[0].mean("no_such_metric"))


def test_rows_of_equal_labels_and_different_settings_stay_apart():
    spec = make_spec({"workload": WORKLOAD, "sweep": {"seed": [1, 2]}})
    rows = report.rows(points(spec), [{"completed": 1}, {"completed": 2}])
    assert [row.mean("completed") for row in rows] == [1, 2]


def test_summary_csv_has_a_column_for_each_metric_and_interval():
    lines = list(csv.DictReader(io.StringIO(report.summary_csv(two_by_two()))))
    assert list(lines[0]) == [
        "label", "policy", "num_replications", "p99_ttft_ms", "p99_ttft_ms_ci95", "rejected",
        "rejected_ci95",
    ]  # fmt: skip
    assert lines[0]["p99_ttft_ms"] == "2.0"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_summary_csv_has_a_column_for_what_only_some_settings_tell(order):
    spec = make_spec({"workload": WORKLOAD, "sweep": {"seed": [1, 2]}})
    told = [{"completed": 1, "loaded_bytes": 7.0}, {"completed": 2}]
    made = report.rows(points(spec), [told[i] for i in order])
    lines = list(csv.DictReader(io.StringIO(report.summary_csv(made))))
    assert [lines[i]["loaded_bytes"] for i in order] == ["7.0", "nan"]
    assert [lines[i]["completed"] for i in order] == ["1.0", "2.0"]
    table = _all_metrics(made)
    assert [name for name, *_ in table.lines] == sorted(told[0])
    assert live_data(made, "x")["metrics"].keys() == told[0].keys()


def test_summary_data_has_none_for_what_was_not_measured():
    first, second = json.loads(json_text(report.summary_data(two_by_two())))
    assert first["metrics"]["p99_ttft_ms"] == 2.0
    assert second["metrics"]["p99_ttft_ms"] is None
    assert second["ci95"]["rejected"] == 0.0


def test_table_shows_goodput_only_with_targets():
    def header(num_with_slo):
        spec = make_spec({"workload": WORKLOAD})
        rows = report.rows(points(spec), [{"num_with_slo": num_with_slo, "request_goodput": 1.0}])
        return report.result_table(rows).header

    assert "good\nreq/s" not in header(0)
    assert "good\nreq/s" in header(3)


def test_table_has_a_column_for_preemptions_only_where_there_are_some():
    def table(preemptions):
        spec = make_spec({"workload": WORKLOAD})
        measured = {"num_with_slo": 0, "num_preemptions": preemptions, "rejected": 0}
        return report.result_table(report.rows(points(spec), [measured]))

    assert "preempted" in table(2).header
    assert table(2).note == "no request was rejected"
    assert table(0).note == "no request was preempted or rejected"


@pytest.mark.parametrize(("p99_ms", "told"), [(12.0, False), (9.0, True)])
def test_table_tells_how_a_mean_gap_can_be_above_its_p99(p99_ms, told):
    measured = {"num_with_slo": 0, "mean_itl_ms": 10.0, "p99_itl_ms": p99_ms}
    rows = report.rows(points(make_spec({"workload": WORKLOAD})), [measured])
    assert ("a mean ITL above its P99" in report.result_table(rows).note) is told


def test_notes_label_an_uncalibrated_model_and_count_long_lists():
    model = {"name": "roofline", "model": "m", "hardware": "h", "calibration": "UNCALIBRATED"}
    lines = report.notes([model], [f"w{i}" for i in range(12)])
    assert lines[0].startswith("cost model: roofline (m on h), UNCALIBRATED")
    assert lines[-1] == "warning: and 4 more, in the results"
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ({"train": {"mape": 0.0}, "held_out": {"mape": 0.021}}, "2.1% mean on steps it was not"),
        ({"train": {"mape": 0.0}}, "not known, no step was held out of the fit"),
    ],
)
def test_error_of_a_calibration_is_that_on_held_out_steps_or_not_known(error, told):
    model = {"name": "fitted", "calibration": "CALIBRATED", "error": error}
    assert f"calibrated: CALIBRATED; error: {told}" in report.notes([model], [])[0]


def test_cost_model_that_says_no_more_than_its_name_is_told_by_that():
    assert report.notes([{"name": "mine"}], []) == ["cost model: mine"]
