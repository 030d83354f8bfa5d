"""Tables of a page, each from rows and heads written by hand."""

from types import SimpleNamespace

import pytest

from schedlab.experiments.report import page as page_module
from schedlab.experiments.results.tables import Estimate, Row


def row(num_replications=1, policy="fcfs", half_width=None, **metrics):
    shown = {name: Estimate(float(value), half_width) for name, value in metrics.items()}
    return Row(policy, policy, {"workload.request_rate": "2"}, num_replications, shown)


@pytest.mark.parametrize(
    ("preempted", "rejected", "absent", "columns"),
    [
        ((0, 0), (0, 0), " No request was preempted or rejected.", []),
        ((0, 3), (0, 0), " No request was rejected.", ["num_preemptions"]),
        ((0, 0), (2, 0), " No request was preempted.", ["rejected"]),
        ((1, 0), (0, 1), "", ["num_preemptions", "rejected"]),
    ],
)
def test_results_table_leaves_out_counts_that_no_setting_has(preempted, rejected, absent, columns):
    rows = [
        row(num_with_slo=0, num_preemptions=p, rejected=r)
        for p, r in zip(preempted, rejected, strict=True)
    ]
    table = page_module._results_table(SimpleNamespace(rows=rows))
    ends = [page_module.metric_named(name).axis for name in columns]
    first = page_module.metric_named("p99_e2el_ms").axis
    assert list(table.header)[:2] == ["policy", "request rate"]
    assert list(table.header)[list(table.header).index(first) + 1 :] == ends
    assert table.note.endswith(f"gaps between the tokens of all requests.{absent}")


@pytest.mark.parametrize(
    ("counts", "explains"), [((1, 1), False), ((1, 2), True), ((3, 1), True), ((2, 2), True)]
)
def test_results_table_explains_intervals_once_a_setting_has_replications(counts, explains):
    rows = [row(n, num_with_slo=0, num_preemptions=0, rejected=0) for n in counts]
    table = page_module._results_table(SimpleNamespace(rows=rows))
    assert table.note.startswith("±") is explains


@pytest.mark.parametrize("num_with_slo", [(0, 0), (0, 4), (4, 0)])
def test_results_table_has_attainment_where_any_setting_has_targets(num_with_slo):
    rows = [row(num_with_slo=n, num_preemptions=0, rejected=0) for n in num_with_slo]
    header = page_module._results_table(SimpleNamespace(rows=rows)).header
    assert (page_module.metric_named("slo_attainment").axis in header) is any(num_with_slo)


@pytest.mark.parametrize(
    ("described", "outside", "told"),
    [
        ([{"name": "table", "validity": {}}], (1, 3), "4 of 40 steps (10.0%)"),
        ([{"name": "roofline"}, {"name": "table", "validity": {}}], (0, 1), "1 of 40 steps (2.5%)"),
        ([{"name": "roofline"}], (1, 3), ""),
        ([{"name": "table", "validity": {}}], (0, 0), "0 of 40 steps (0.0%)"),
    ],
)
def test_page_tells_of_all_runs_how_many_steps_lie_outside_what_was_measured(
    described, outside, told
):
    heads = [
        {"provenance": {"num_steps": n, "extrapolated_steps": more}}
        for n, more in zip((10, 30), outside, strict=True)
    ]
    found = page_module._cost_models(SimpleNamespace(cost_models=described), heads)
    assert found["outside"] == told


def test_page_of_measured_cost_models_and_no_steps_tells_no_share():
    heads = [{"provenance": {"num_steps": 0}}]
    results = SimpleNamespace(cost_models=[{"name": "table", "validity": {}}])
    assert page_module._cost_models(results, heads)["outside"] == ""
    assert page_module._cost_models(SimpleNamespace(cost_models=[]), heads) is None
