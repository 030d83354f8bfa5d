"""Figures as Plotly shows them: every curve, name, axis and word of the still ones."""

import base64
import math
import sys
from types import SimpleNamespace

import pytest

import schedlab as sl
from schedlab.experiments.figures.interactive import interactive, shown, traces_and_layout

SWEPT = {
    "name": "<b>two</b> policies",
    "workload": {"trace": "azure-conv", "num_requests": 25},
    "slo": {"ttft_ms": 500},
    "replications": 2,
    "sweep": {"policy": ["fcfs", "static"], "workload.request_rate": [2, 6]},
}
FIGURES = [
    "throughput_against_p99", "latency_against_rate", "attainment_against_rate", "pareto",
    "gpu_frontier", "lines", "heat_map", "latency_cdf", "slowdown_against_length", "time_series",
    "gantt", "batching",
]  # fmt: skip


@pytest.fixture(scope="module")
def swept():
    return sl.run(SWEPT)


@pytest.fixture
def notebook(monkeypatch):
    """Stand in for what runs in a notebook."""
    formatters = {"image/png": SimpleNamespace(for_type=lambda *_: None)}
    shell = SimpleNamespace(kernel=1, display_formatter=SimpleNamespace(formatters=formatters))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_results_is_one_that_plotly_takes(name, swept):
    plotly = pytest.importorskip("plotly.graph_objects")
    found = interactive(getattr(swept.plot, name)())  # Plotly refuses what it does not know
    assert isinstance(found, plotly.Figure)
    assert len(found.data) > 0


@pytest.mark.slow
def test_plotly_figure_in_a_notebook_has_a_picture_for_where_no_script_runs(swept, monkeypatch):
    pytest.importorskip("plotly")
    found = interactive(swept.plot.matplotlib.latency_against_rate())
    kept = []
    display = SimpleNamespace(display=lambda bundle, raw: kept.append(bundle))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    found._ipython_display_()
    (bundle,) = kept
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert len(found.data) > 0


@pytest.mark.slow
def test_curves_keep_points_names_and_scale_and_text_is_no_markup(swept):
    found = traces_and_layout(swept.plot.latency_against_rate(("ttft", "e2el")))
    named = [trace for trace in found["data"] if trace["showlegend"]]
    assert [trace["name"] for trace in named] == ["fcfs", "static"]  # once, though of two panels
    row = swept.rows[0]
    assert named[0]["x"] == [2, 6]
    assert named[0]["y"][0] == pytest.approx(row.mean("p99_ttft_ms"))
    over = {trace["hovertemplate"].partition("<br>")[0] for trace in found["data"]
            if trace["mode"] == "markers"}  # fmt: skip
    assert over == {one.label for one in swept.rows}
    layout = found["layout"]
    assert layout["title"]["text"] == "&lt;b&gt;two&lt;/b&gt; policies"
    assert layout["yaxis"]["type"] == layout["yaxis2"]["type"] == "log"
    assert layout["xaxis2"]["matches"] == "x"
    assert layout["xaxis2"]["domain"][0] > layout["xaxis"]["domain"][1]
    assert "hollow: saturated" in layout["annotations"][0]["text"]


def test_bars_begin_where_a_request_begins_to_wait(swept):
    found = traces_and_layout(swept.plot.gantt("fcfs, request_rate=6"))
    queued = next(trace for trace in found["data"] if trace["name"] == "queued")
    run = swept.runs[2]
    arrivals = run.requests["arrival_ns"]
    assert sorted(queued["base"]) == pytest.approx(sorted((arrivals - arrivals.min()) / 1e9))
    low, high = found["layout"]["yaxis"]["range"]
    assert low > high  # the first request is at the top


def test_heat_map_has_its_cells_as_text_and_null_where_nothing_was_measured(swept):
    found = traces_and_layout(swept.plot.heat_map(["p99_ttft_ms", "num_preemptions"]))
    (trace,) = found["data"]
    assert len(trace["z"]) == 2
    assert all(value is None or math.isfinite(value) for line in trace["z"] for value in line)
    assert found["layout"]["yaxis"]["ticktext"] == ["fcfs", "static"]
    assert len(found["layout"]["annotations"]) == 1 + 4  # the note, and a text a cell


@pytest.mark.slow
def test_figure_in_a_notebook_is_interactive_where_plotly_is_installed(
    swept, notebook, monkeypatch
):
    plotly = pytest.importorskip("plotly.graph_objects")
    assert isinstance(swept.plot.pareto(), plotly.Figure)
    assert type(swept.plot.matplotlib.pareto()).__module__ == "matplotlib.figure"


def test_figure_in_a_notebook_without_plotly_is_still(swept, notebook, monkeypatch):
    monkeypatch.setattr("schedlab.experiments.figures.interactive.find_spec", lambda name: None)
    assert type(swept.plot.pareto()).__module__ == "matplotlib.figure"


def test_figure_outside_of_a_notebook_is_itself(swept):
    figure = swept.plot.pareto()
    assert shown(figure) is figure


def test_bars_are_called_as_in_the_legend_of_their_own_panel():
    from matplotlib.figure import Figure

    figure = Figure()
    first, unnamed, last = figure.subplots(3)
    for axes, name in ((first, "queued"), (unnamed, "of nobody"), (last, "running")):
        axes.barh([0], [2.0], left=[1.0], color="red", label=name)
        axes.barh([1], [3.0], left=[1.0], color="blue", label=f"{name} too")
    first.legend()
    last.legend()
    named = {}
    for trace in traces_and_layout(figure)["data"]:
        named.setdefault(trace["xaxis"], set()).add((trace["name"], trace["x"][0]))
    assert named == {
        "x": {("queued", 2.0), ("queued too", 3.0)}, "x2": {("", 2.0), ("", 3.0)},
        "x3": {("running", 2.0), ("running too", 3.0)},
    }  # fmt: skip
