"""Figures show what the data say; looks are for eyes, these are for numbers."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import plots
from experiments.loading import make_spec
from experiments.plot_style import LOOKS, looks, save, spread
from experiments.report import Estimate, Row
from experiments.run import run

NONE = np.zeros(0, dtype=np.int64)


def row(policy, rate, achieved, p99_ms=100.0, half_width=None, service_ms=1000.0):
    values = {
        "offered_request_rate": rate, "request_throughput": achieved, "completed": 1000,
        "duration_s": 1000 / achieved, "median_e2el_ms": service_ms + 500.0,
        "median_queue_time_ms": 500.0, "p99_tpot_ms": p99_ms / 10,
    }  # fmt: skip
    metrics = {name: Estimate(value, None) for name, value in values.items()}
    metrics["p99_ttft_ms"] = Estimate(p99_ms, half_width)
    return Row(policy, policy, {"policy": policy, "workload.request_rate": str(rate)}, 1, metrics)


@pytest.fixture(scope="module")
def small_run():
    return run(
        make_spec(
            {
                "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 256,
                           "num_gpu_blocks_override": 100, "scheduler_reserve_full_isl": False},
                "workload": {"trace": "fixed", "num_requests": 15, "request_rate": 8},
            }
        )
    )  # fmt: skip


def test_throughput_figure_draws_a_curve_a_policy_through_its_points():
    rows = [row("fcfs", 1, 1, 50), row("fcfs", 4, 3.9, 400), row("sjf", 1, 1, 60)]
    figure = plots.throughput_against_p99(rows, "title")
    left, right = figure.axes
    lines = [line for line in left.lines if len(line.get_xdata()) == 2]
    assert list(lines[0].get_xdata()) == [1, 3.9]
    assert list(lines[0].get_ydata()) == [0.05, 0.4]
    assert [text.get_text() for text in left.texts] == ["fcfs", "sjf"]
    assert right.get_ylabel() == "P99 TPOT (ms)"
    assert left.get_yscale() == "log"


def test_throughput_figure_marks_saturated_points_hollow():
    rows = [row("fcfs", 4, 4), row("fcfs", 8, 4)]
    figure = plots.throughput_against_p99(rows, "title")
    fills = [
        line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"
    ]
    assert fills == [LOOKS[0].color, "white"]
    assert "hollow: saturated" in figure.get_supxlabel()


def test_throughput_figure_draws_intervals():
    figure = plots.throughput_against_p99([row("fcfs", 1, 1, 100, half_width=20)], "title")
    interval = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    assert list(interval[0].get_ydata()) == pytest.approx([0.08, 0.12])


@pytest.mark.parametrize(
    ("rate", "achieved", "service_ms", "saturated"),
    [
        (4.0, 3.9, 1e3, False),
        (4.0, 3.5, 1e3, True),
        # 1000 requests at 10/s and 20 s in service: the last one ends at 120 s, which is no
        # saturation although only 8.3 requests/s were served on average.
        (10.0, 1000 / 120, 20e3, False),
        (math.nan, 3.5, 1e3, False),
    ],
)
def test_is_saturated_allows_for_the_time_in_service(rate, achieved, service_ms, saturated):
    assert plots.is_saturated(row("x", rate, achieved, service_ms=service_ms)) is saturated


def test_latency_cdf_ends_at_one_and_marks_percentiles(small_run):
    figure = plots.latency_cdf({"fcfs": small_run, "again": small_run}, "title", "e2el")
    (axes,) = figure.axes
    curve = axes.lines[0]
    metrics = small_run.metrics()
    assert curve.get_ydata()[-1] == 1.0
    assert axes.lines[1].get_xdata()[0] * 1e3 == pytest.approx(metrics["p50_e2el_ms"])
    assert axes.lines[2].get_xdata()[0] * 1e3 == pytest.approx(metrics["p99_e2el_ms"])


def test_time_series_of_a_long_run_keeps_extremes(small_run):
    steps = small_run.log.steps()
    figure = plots.time_series(small_run, "title")
    upper, lower = figure.axes
    assert len(steps["start_ns"]) > 0
    assert [t.get_text() for t in upper.get_legend().get_texts()] == ["running", "waiting"]
    assert upper.dataLim.ymax >= max(steps["num_waiting"].max(), steps["num_running"].max())
    top = 100 * steps["kv_allocated_tokens"].max() / small_run.kv_capacity_tokens
    assert lower.dataLim.ymax >= top


def test_gantt_bars_are_the_phases_of_each_request(small_run):
    figure = plots.gantt(small_run, "title")
    (axes,) = figure.axes
    columns = small_run.requests
    start = columns["arrival_ns"].min()
    first = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == 0]
    edges = [(columns[name][0] - start) / 1e9 for name in
             ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")]  # fmt: skip
    for bar, begin, end in zip(first, edges, edges[1:], strict=False):
        assert bar.get_x() == pytest.approx(begin)
        assert bar.get_x() + bar.get_width() == pytest.approx(end)


def test_gantt_draws_every_preemption_where_it_was(small_run):
    rows = small_run.log.preemptions()
    assert len(rows["id"]) > 0
    figure = plots.gantt(small_run, "title")
    hatched = [bar for bar in figure.axes[0].patches if bar.get_hatch()]
    start = small_run.requests["arrival_ns"].min()
    drawn = sorted((round(bar.get_y() + 0.36), bar.get_x(), bar.get_width()) for bar in hatched)
    expected = sorted(
        (int(number), (evicted - start) / 1e9, (resumed - evicted) / 1e9)
        for number, evicted, resumed in zip(
            rows["id"], rows["evicted_ns"], rows["resumed_ns"], strict=True
        )
    )
    assert np.allclose(drawn, expected)


def test_gantt_says_what_it_leaves_out(small_run):
    figure = plots.gantt(small_run, "title", max_requests=5)
    assert figure.axes[0].get_title(loc="left") == "title (first 5 of 15 requests)"


def test_gantt_of_a_saved_run_is_the_same(small_run, tmp_path):
    small_run.save(tmp_path)
    drawn = [
        [(bar.get_xy(), bar.get_width()) for bar in plots.gantt(run, "title").axes[0].patches]
        for run in (small_run, type(small_run).load(tmp_path))
    ]
    assert drawn[0] == drawn[1]


def test_figures_without_a_completed_request_are_empty_not_broken(small_run):
    requests = {name: data.copy() for name, data in small_run.requests.items()}
    for name in ("first_scheduled_ns", "first_token_ns", "finish_ns"):
        requests[name][:] = -1
    log = SimpleNamespace(preemptions=lambda: {"id": NONE, "evicted_ns": NONE, "resumed_ns": NONE})
    nobody = dataclasses.replace(small_run, requests=requests, log=log)
    assert not plots.latency_cdf({"x": nobody}, "title").axes[0].lines
    assert len(plots.gantt(nobody, "title").axes[0].patches) == 0


def test_save_writes_png_and_svg_the_same_each_time(tmp_path):
    rows = [row("fcfs", 1, 1, 50), row("fcfs", 4, 3.9, 400)]
    for folder in ("a", "b"):
        written = save(plots.throughput_against_p99(rows, "t"), tmp_path / folder / "figure")
        assert [path.name for path in written] == ["figure.png", "figure.svg"]
    for name in ("figure.png", "figure.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_looks_differ_in_grey_too():
    found = [look for look, _ in zip(looks(), range(64), strict=False)]
    assert len({(look.color, look.marker) for look in found}) == 64
    assert len({(look.marker, look.line) for look in found[:8]}) == 8


def test_spread_keeps_order_and_distance():
    placed = spread([0.5, 0.5, 0.51, 0.0, 0.99], 0.1)
    assert placed[3] == 0.0
    assert sorted(placed) == [placed[i] for i in (3, 0, 1, 2, 4)]
    assert min(np.diff(sorted(placed))) >= 0.1 - 1e-12
