"""Figures show what the data say; looks are for eyes, these are for numbers."""

import dataclasses
import math
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.colors
import numpy as np
import pytest

from schedlab.experiments.analysis.latencies import latencies_s
from schedlab.experiments.figures import distributions, plots, timelines
from schedlab.experiments.figures.distributions import _by_length as by_length
from schedlab.experiments.figures.gantt import _COLORS as PHASES
from schedlab.experiments.figures.heat_map import times_worse
from schedlab.experiments.figures.lines import lines
from schedlab.experiments.figures.style import LOOKS, PALE, house_style, looks, paper, save, spread
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.record.columns import REJECTED

NONE = np.zeros(0, dtype=np.int64)


def row(
    policy, rate, achieved, p99_ms=100.0, half_width=None, service_ms=1000.0, attainment=math.nan
):
    values = {
        "offered_request_rate": rate, "request_throughput": achieved, "completed": 1000,
        "duration_s": 1000 / achieved, "median_e2el_ms": service_ms + 500.0,
        "median_queue_time_ms": 500.0, "p99_tpot_ms": p99_ms / 10, "slo_attainment": attainment,
        "output_throughput": 100 * achieved, "num_preemptions": 0.0,
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
    assert list(lines[0].get_ydata()) == [50, 400]
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
    assert list(interval[0].get_ydata()) == pytest.approx([80, 120])


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


def test_is_saturated_leaves_only_time_in_service_out_of_the_span():
    # 1000 requests in 100 s. An hour in the queue is no service: 10.6 a second came meanwhile.
    values = {
        "offered_request_rate": 10.6, "completed": 1000, "duration_s": 100.0,
        "median_e2el_ms": 3601e3, "median_queue_time_ms": 3600e3,
    }  # fmt: skip
    metrics = {name: Estimate(value, None) for name, value in values.items()}
    assert not plots.is_saturated(Row("x", "x", {}, 1, metrics))
    metrics["offered_request_rate"] = Estimate(10.7, None)
    assert plots.is_saturated(Row("x", "x", {}, 1, metrics))


@pytest.mark.slow
def test_latency_cdf_ends_at_one_and_marks_percentiles(small_run):
    figure = plots.latency_cdf({"fcfs": small_run, "again": small_run}, "title", "e2el")
    (axes,) = figure.axes
    curve = axes.lines[0]
    metrics = small_run.metrics()
    assert curve.get_ydata()[-1] == 1.0
    assert axes.lines[1].get_xdata()[0] == pytest.approx(metrics["p50_e2el_ms"])
    assert axes.lines[2].get_xdata()[0] == pytest.approx(metrics["p99_e2el_ms"])


@pytest.mark.slow
def test_time_series_of_a_long_run_keeps_extremes(small_run):
    steps = small_run.log.steps()
    figure = plots.time_series(small_run, "title")
    upper, lower, waste, preempted = figure.axes
    assert len(steps["start_ns"]) > 0
    assert [t.get_text() for t in upper.get_legend().get_texts()] == ["running", "waiting"]
    assert upper.dataLim.ymax >= max(steps["num_waiting"].max(), steps["num_running"].max())
    top = 100 * steps["kv_allocated_tokens"].max() / small_run.kv_capacity_tokens
    assert lower.dataLim.ymax >= top
    shares = steps["kv_fragmentation_tokens"] / np.maximum(steps["kv_allocated_tokens"], 1)
    assert waste.dataLim.ymax >= 100 * shares.max() > 0
    drawn = sum(bar.get_height() * bar.get_width() / 0.9 for bar in preempted.patches)
    assert drawn == pytest.approx(steps["num_preempted"].sum())


@pytest.mark.slow
def test_time_series_of_steps_beyond_memory_says_how_many_it_looks_at(small_run, monkeypatch):
    steps = small_run.log.steps()
    monkeypatch.setattr(timelines, "BATCH_ROWS", len(steps["start_ns"]) // 4 + 1)
    figure = plots.time_series(small_run, "title")
    assert "of every 4 steps one" in figure.axes[-1].get_xlabel()
    drawn = sum(bar.get_height() * bar.get_width() / 0.9 for bar in figure.axes[-1].patches)
    assert drawn == pytest.approx(steps["num_preempted"].sum())
    waiting = figure.axes[0].lines[1].get_ydata()
    assert np.array_equal(waiting, steps["num_waiting"][::4])


def test_latency_cdf_of_many_requests_keeps_ends_and_percentiles(small_run, monkeypatch):
    whole = plots.latency_cdf({"fcfs": small_run}, "title", "e2el").axes[0].lines
    monkeypatch.setattr(distributions, "_MOST_POINTS", 7)
    thin = plots.latency_cdf({"fcfs": small_run}, "title", "e2el").axes[0].lines
    assert len(thin[0].get_xdata()) == 7
    for line, kept in zip(whole, thin, strict=True):
        assert line.get_xydata()[[0, -1]].tolist() == kept.get_xydata()[[0, -1]].tolist()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_gantt_says_what_it_leaves_out(small_run):
    figure = plots.gantt(small_run, "title", max_requests=5)
    assert figure.axes[0].get_title(loc="left") == "title (first 5 of 15 requests)"


@pytest.mark.slow
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
    requests["status"][:] = REJECTED
    log = SimpleNamespace(preemptions=lambda: {"id": NONE, "evicted_ns": NONE, "resumed_ns": NONE})
    nobody = dataclasses.replace(small_run, requests=requests, log=log)
    assert not plots.latency_cdf({"x": nobody}, "title").axes[0].lines
    assert len(plots.gantt(nobody, "title").axes[0].patches) == 0


@pytest.mark.slow
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


def test_phases_of_a_request_differ_in_grey_too():
    lightness = sorted(
        np.dot(matplotlib.colors.to_rgb(PHASES[phase]), [0.299, 0.587, 0.114])
        for phase in ("queued", "prefill", "decode")
    )
    assert min(np.diff(lightness)) > 0.15


def test_spread_keeps_order_and_distance():
    placed = spread([0.5, 0.5, 0.51, 0.0, 0.99], 0.1)
    assert placed[3] == 0.0
    assert sorted(placed) == [placed[i] for i in (3, 0, 1, 2, 4)]
    assert min(np.diff(sorted(placed))) >= 0.1 - 1e-12


# -- curves over the rate ----------------------------------------------------------------------


def test_rate_figure_has_the_offered_rate_and_shades_where_all_are_saturated():
    rows = [
        row("a", 2, 2),
        row("a", 4, 2),
        row("a", 8, 2),
        row("b", 2, 2),
        row("b", 4, 4),
        row("b", 8, 4),
    ]
    figure = plots.latency_against_rate(rows, "title")
    axes = figure.axes[0]
    curve = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    assert list(curve.get_xdata()) == [2, 4, 8]
    (shade,) = [patch for patch in axes.patches if patch.get_width() > 0]
    assert shade.get_x() == 8


def test_rate_figure_without_common_saturation_shades_nothing():
    rows = [row("a", 2, 2), row("a", 4, 2), row("b", 2, 2), row("b", 4, 4)]
    assert not plots.latency_against_rate(rows, "title").axes[0].patches


def test_highlight_draws_the_others_grey_and_unnamed():
    rows = [row("a", 1, 1), row("a", 2, 2), row("b", 1, 1), row("b", 2, 2)]
    figure = plots.throughput_against_p99(rows, "title", highlight=["b"])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["b"]
    assert PALE in {line.get_color() for line in axes.lines}
    assert "grey: the other 1 settings" in figure.get_supxlabel()


@pytest.mark.parametrize(
    ("attainments", "expected"),
    [
        ([1.0, 0.95, 0.45], (4.0, 8.0)),
        ([0.8, 1.0, 1.0], (math.nan, 2.0)),
        ([1.0, 1.0, 0.9], (8.0, math.nan)),
        # Walking up stops at the first failure, whatever comes after it.
        ([1.0, 0.8, 1.0], (2.0, 4.0)),
        ([1.0, math.nan, 1.0], (2.0, 4.0)),
    ],
)
def test_rate_bracket_is_between_rates_that_were_run(attainments, expected):
    rows = [
        row("x", rate, rate, attainment=a) for rate, a in zip((2, 4, 8), attainments, strict=True)
    ]
    found = plots.rate_bracket(rows, "slo_attainment", 0.9)
    assert found == pytest.approx(expected, nan_ok=True)


def test_attainment_figure_names_each_limit():
    rows = [row("a", 2, 2, attainment=1.0), row("a", 4, 4, attainment=0.8),
            row("b", 2, 2, attainment=1.0), row("b", 4, 4, attainment=0.95),
            row("c", 2, 2, attainment=0.1), row("c", 4, 4, attainment=0.0)]  # fmt: skip
    figure = plots.attainment_against_rate(rows, "title")
    assert [text.get_text() for text in figure.axes[0].texts] == ["a: 2 to 4", "b: > 4", "c: < 2"]


@pytest.mark.parametrize("size", [None, "column"])
def test_attainment_figure_draws_whole_marks_and_nothing_it_does_not_explain(size):
    rows = [row("a", 2, 2, attainment=1.0), row("a", 8, 2, attainment=0.0)]
    with paper(size):
        figure = plots.attainment_against_rate(rows, "title")
        with house_style():
            figure.draw_without_rendering()
        (axes,) = figure.axes
        marks = [line for line in axes.lines if line.get_marker() not in ("None", "")]
        assert [line.get_ydata()[0] for line in marks] == [100.0, 0.0], "no ticks on the bar"
        assert not any(line.get_clip_on() for line in marks)
        told = [
            figure.get_supxlabel(), *(one.get_title().get_text() for one in figure.legends)
        ]  # fmt: skip
        said = " ".join(told).replace("\n", " ")
        assert "dashed: 90%; names say between" in said
        assert "hollow: saturated" in said
        box = axes.get_position()
        assert box.height > 0.5
        name = axes.yaxis.label.get_window_extent()
        assert 0 <= name.y0 <= name.y1 <= figure.bbox.y1


def test_attainment_interval_ends_at_all_requests():
    one = row("a", 2, 2)
    one.metrics["slo_attainment"] = Estimate(0.99, 0.05)
    (axes,) = plots.attainment_against_rate([one], "title").axes
    spans = [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 2]
    assert [pytest.approx(94.0), 100.0] in spans


def test_attainment_figure_of_a_saturated_rate_that_holds_claims_nothing_of_it():
    rows = [row("a", 2, 2, attainment=1.0), row("a", 9, 2, attainment=1.0),
            row("b", 9, 2, attainment=1.0), row("c", 9, 2, attainment=0.5)]  # fmt: skip
    named = [text.get_text() for text in plots.attainment_against_rate(rows, "").axes[0].texts]
    assert sorted(named) == ["a: > 2", "b: not known", "c: < 9"]


def test_narrow_logarithmic_axis_has_ticks():
    rows = [row("a", 2, 2, p99_ms=96.0), row("a", 4, 4, p99_ms=103.0)]
    axes = plots.latency_against_rate(rows, "").axes[0]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3


def test_attainment_figure_without_targets_is_an_error():
    with pytest.raises(SchedlabError, match="no run has a target"):
        plots.attainment_against_rate([row("a", 2, 2)], "title")


def test_figure_over_rates_without_a_swept_rate_is_an_error():
    still = dataclasses.replace(row("a", 2, 2), settings={"policy": "a"})
    with pytest.raises(SchedlabError, match="no request rate is swept"):
        plots.latency_against_rate([still], "title")


# -- settings side by side ---------------------------------------------------------------------


def test_pareto_draws_the_frontier_in_colour_and_the_rest_faint():
    rows = [row("good", 1, 1, 100), row("good", 2, 2, 200), row("bad", 2, 2, 400)]
    axes = plots.pareto(rows, "title").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["good"]
    (front,) = [line for line in axes.lines if line.get_label() == "good"]
    assert list(front.get_xdata()) == [100, 200]
    assert list(front.get_ydata()) == [100, 200]
    # Along a step nothing is reached that is not: left of a point with more throughput its P99.
    assert [line.get_drawstyle() for line in axes.lines].count("steps-pre") == 1
    turned = plots.pareto(rows, "title", x="p99_ttft_ms", y="output_throughput").axes[0]
    assert [line.get_drawstyle() for line in turned.lines].count("steps-post") == 1
    assert [text.get_text() for text in axes.texts] == ["1/s", "2/s"]


def test_pareto_shows_each_axis_in_its_own_unit():
    rows = [row("a", 1, 1, 100, attainment=0.25), row("a", 2, 2, 200, attainment=0.5)]
    for x, y in (("p99_ttft_ms", "slo_attainment"), ("slo_attainment", "p99_ttft_ms")):
        lines = plots.pareto(rows, "title", x=x, y=y).axes[0].lines
        (front,) = [line for line in lines if line.get_label() == "a"]
        drawn = {x: sorted(front.get_xdata()), y: sorted(front.get_ydata())}
        assert drawn == {"p99_ttft_ms": [100, 200], "slo_attainment": [25, 50]}


def test_pareto_of_a_metric_without_a_better_side_is_an_error():
    with pytest.raises(SpecError, match="neither better large nor small"):
        plots.pareto([row("a", 1, 1)], "title", x="num_requests")


def test_heat_map_writes_means_with_intervals_and_marks_what_ties_with_the_best():
    rows = [row("a", 2, 2.0, 100, half_width=20), row("b", 2, 2.0, 130, half_width=20),
            row("c", 2, 1.0, 800, half_width=20)]  # fmt: skip
    figure = plots.heat_map(rows, "title", ["request_throughput", "p99_ttft_ms", "request_goodput"])
    axes = figure.axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b", "c"]
    cells = {text.get_position(): text for text in axes.texts}
    assert cells[1, 0].get_text() == "100 ±20"
    assert [cells[1, i].get_fontweight() for i in range(3)] == ["bold", "bold", "normal"]
    assert [cells[0, i].get_fontweight() for i in range(3)] == ["bold", "bold", "normal"]
    assert len(cells) == 6, "a metric that no run has is left out"
    shades = axes.images[0].get_array()
    assert shades[:, 0].tolist() == pytest.approx([0, 0, math.log(2) / math.log(8)])
    assert shades[2, 1] == 1.0


def test_times_worse_knows_directions_and_a_best_of_zero():
    assert times_worse([2.0, 4.0], "request_throughput").tolist() == [2.0, 1.0]
    assert times_worse([2.0, 4.0], "p99_ttft_ms").tolist() == [1.0, 2.0]
    assert times_worse([0.0, 4.0], "num_preemptions").tolist() == [1.0, math.inf]


# -- requests ----------------------------------------------------------------------------------


def small_batches(policy):
    return run(
        make_spec(
            {
                "engine": {"max_num_seqs": 4}, "policy": policy,
                "workload": {
                    "num_requests": 12, "arrivals": "all_at_once", "prompt_tokens": 50,
                    "output_tokens": {"distribution": "uniform", "low": 2, "high": 90},
                },
            }
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def batches():
    return {
        "static": small_batches({"name": "static", "max_batch_size": 4}),
        "continuous": small_batches("fcfs"),
    }


def test_no_seat_has_two_requests_at_once_and_every_request_has_one(batches, small_run):
    for result in (*batches.values(), small_run):
        stays = plots.seats(result)
        assert {stay.request_id for stay in stays} == set(result.requests["id"].tolist())
        by_seat = {}
        for stay in stays:
            by_seat.setdefault(stay.seat, []).append(stay)
        for there in by_seat.values():
            assert all(a.end_s <= b.begin_s for a, b in pairwise(there))
        assert len(by_seat) <= 4


@pytest.mark.slow
def test_batching_figure_shows_that_static_seats_wait(batches):
    figure = plots.batching(batches, "title")
    static, continuous = (
        axes.get_title(loc="left").rpartition(" ")[2].rstrip("%") for axes in figure.axes
    )
    assert int(static) < int(continuous)
    held = [bar for bar in figure.axes[0].patches if bar.get_hatch()]
    waits = [stay.end_s - stay.begin_s - stay.used_s for stay in plots.seats(batches["static"])]
    assert sum(bar.get_width() for bar in held) == pytest.approx(sum(waits))
    assert sum(waits) > 0
    assert len(_legend_of(figure)) == 3


def test_batching_figure_tells_of_waiting_seats_only_where_one_waits():
    workload = {
        "num_requests": 1, "arrivals": "all_at_once", "prompt_tokens": 5, "output_tokens": 3,
    }  # fmt: skip
    figure = plots.batching({"one": run(make_spec({"workload": workload}))}, "title")
    assert _legend_of(figure) == ["prefill", "decode"]


def _legend_of(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_slowdown_figure_draws_median_and_tail(batches):
    result = batches["continuous"]
    many = dataclasses.replace(
        result, requests={name: np.repeat(data, 8) for name, data in result.requests.items()}
    )
    alone = latencies_s(many, "e2el") / 2
    middle, high, one = plots.slowdown_against_length({"x": many}, alone, "t").axes[0].lines
    assert len(middle.get_xdata()) > 3
    assert middle.get_ydata() == pytest.approx(2.0)
    assert high.get_ydata() == pytest.approx(2.0)
    assert list(one.get_ydata()) == [1, 1]


def test_by_length_gives_medians_of_groups():
    tokens = np.repeat(np.arange(1.0, 9.0), 10)
    x, middle, high = by_length(tokens, 3 * tokens)
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert middle.tolist() == (3 * x).tolist()
    assert (high >= middle).all()


@pytest.mark.parametrize("count", [1, 4, 25, 39])
def test_by_length_of_few_requests_makes_fewer_groups(count):
    x, middle, high = by_length(np.arange(1.0, count + 1), np.full(count, 3.0))
    assert 1 <= len(x) <= 1 + count // 5
    assert set(middle) == set(high) == {3.0}
    alike, _, _ = by_length(np.ones(count), np.full(count, 3.0))
    assert alike.tolist() == [1]


def test_predictability_figure_is_in_percent(small_run):
    slower = {name: column.copy() for name, column in small_run.requests.items()}
    slower["finish_ns"] = slower["arrival_ns"] + 2 * (slower["finish_ns"] - slower["arrival_ns"])
    runs = [small_run, dataclasses.replace(small_run, requests=slower)]
    axes = plots.predictability({"x": runs}, "title").axes[0]
    # Of 1 and 2 the mean is 1.5 and the sample standard deviation 1 / sqrt 2.
    assert axes.lines[0].get_xdata() == pytest.approx(100 / math.sqrt(2) / 1.5)


# -- measurements, claims ----------------------------------------------------------------------


def test_claim_figure_keeps_a_long_source_inside_the_page():
    told = {"name": "x", "compare": "ratio", "accept": [1, 2]}
    found = {"estimate": 1.5, "interval": [1.4, 1.6], "verdict": "reproduced"}
    source = "a paper of many authors, " * 12
    drawn = plots.claim(
        {"claim": {"system": "Sarathi", "source": source, "figures": [told]}, "figures": [found]}
    )
    title = drawn._suptitle
    assert title.get_window_extent().x1 < drawn.bbox.width
    assert title.get_text().startswith("Sarathi: a paper of many authors")


def test_claim_figure_shows_estimate_band_and_source():
    one = {
        "claim": {
            "system": "Sarathi", "source": "a paper",
            "figures": [
                {"name": "capacity", "compare": "ratio", "paper": 2.6, "accept": [1.8, "inf"]},
                {"name": "gap", "compare": "reduction", "accept": [0.6, 0.9]},
            ],
        },
        "figures": [
            {"estimate": 3.0, "interval": [2.9, 3.1], "verdict": "reproduced"},
            {"estimate": 0.5, "interval": [0.4, 0.55], "verdict": "direction only"},
        ],
    }  # fmt: skip
    upper, lower = plots.claim(one).axes
    dots = [
        next(line for line in axes.lines if line.get_marker() == "o") for axes in (upper, lower)
    ]
    assert [dot.get_xdata()[0] for dot in dots] == [3.0, 50.0]
    assert [dot.get_markerfacecolor() for dot in dots] == [LOOKS[0].color, "white"]
    assert [line.get_xdata()[0] for line in upper.lines if line.get_marker() == "D"] == [2.6]
    assert upper.texts[-1].get_text() == "reproduced"


def test_agreement_figure_marks_what_is_outside_and_cuts_what_is_far():
    def metric(name, error, holds):
        return {"metric": name, "error": error, "spread": 0.01, "within_bar_or_spread": holds}

    point = {"load": "request_rate=2", "policy": "fcfs", "metrics": [
        metric("request_throughput", 0.02, True), metric("p99_ttft_ms", 1.5, False),
        metric("mean_ttft_ms", None, False), metric("num_preemptions", 0.1, True),
    ]}  # fmt: skip
    data = {"bars": {"throughput": 0.05, "latency": 0.1}, "points": [point]}
    axes = plots.measured_against_simulated(data, "title").axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata()) == 1]
    assert [dot.get_xdata()[0] for dot in dots] == [2.0, 60.0]
    assert [dot.get_markerfacecolor() for dot in dots] == [LOOKS[0].color, "white"]
    assert [text.get_text() for text in axes.texts] == ["+150 %"]


def test_heat_map_marks_the_best_of_each_column():
    rows = [row("fast", 2, 1.0, 100), row("much", 2, 3.0, 900)]
    axes = plots.heat_map(rows, "title", ["request_throughput", "p99_ttft_ms"]).axes[0]
    bold = {text.get_position() for text in axes.texts if text.get_fontweight() == "bold"}
    assert bold == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("num_seeds", "tells"),
    [((1, 1), True), ((2, 2), False), ((4, 5), False), ((5, 1), True), ((5, 5), True)],
)
def test_heat_map_of_few_seeds_or_equal_values_marks_no_best(num_seeds, tells):
    rows = [row("fast", 2, 1.0, 100), row("much", 2, 1.0, 900)]
    rows = [
        dataclasses.replace(one, num_replications=n) for one, n in zip(rows, num_seeds, strict=True)
    ]
    figure = plots.heat_map(rows, "title", ["request_throughput", "p99_ttft_ms"])
    texts = figure.axes[0].texts
    bold = {text.get_position() for text in texts if text.get_fontweight() == "bold"}
    assert bold == ({(1, 0)} if tells else set())
    told = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert ("bold: the best" in told) is tells
    assert ("fewer than 5 seeds tell no best" in told) is not tells
    assert ("95 % confidence interval" in told) is (max(num_seeds) > 1)


def test_heat_map_has_a_column_for_what_any_setting_has_and_a_cell_for_each():
    def setting(name, ttft_ms, throughput, half_width=None, num_seeds=5):
        metrics = {
            "p99_ttft_ms": Estimate(ttft_ms, half_width),
            "request_throughput": Estimate(throughput, None),
            "request_goodput": Estimate(math.nan, None),
        }
        return Row(name, name, {"policy": name}, num_seeds, metrics)

    rows = [setting("a", 200.0, 8.0, 5.0), setting("b", math.nan, 4.0), setting("c", 800.0, 0.5)]
    asked = ["p99_ttft_ms", "request_goodput", "request_throughput"]
    figure = plots.heat_map(rows, "title", asked)
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells[0, 0] == "200 ±5"
    assert cells[1, 1] == "4"
    assert {place[0] for place in cells} == {0, 1}, "nobody has a goodput"
    # Of the best 200 ms and 8 a second: as good, and 4, 2 and 16 times worse, of which 8 is shown.
    (image,) = axes.images
    shade = np.ma.filled(image.get_array(), math.nan).tolist()
    assert shade[0] == pytest.approx([0, 0])
    assert shade[1] == pytest.approx([math.nan, 1 / 3], nan_ok=True)
    assert shade[2] == pytest.approx([2 / 3, 1])
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    words = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert "± is the 95 % confidence interval over replications" in words
    alone = plots.heat_map([setting("a", 200.0, 8.0, num_seeds=1)], "title", asked)
    assert not any("±" in text.get_text() for text in alone.texts)


@pytest.mark.parametrize(
    ("values", "scale", "at_zero"),
    [
        ([0.0, 5.0], "linear", True), ([1.0, 5.0], "linear", True), ([-1.0, 5.0], "linear", False),
        ([1.0, 1e6], "log", False), ([0.0, 1e6], "linear", True),
    ],
)  # fmt: skip
def test_lines_begin_at_zero_unless_they_go_below_or_over_many_powers(values, scale, at_zero):
    rows = [
        Row(f"{rate}", "fcfs", {"policy": "fcfs", "workload.request_rate": str(rate)}, 1,
            {"p99_ttft_ms": Estimate(value, None), "offered_request_rate": Estimate(rate, None)})
        for rate, value in zip((1.0, 2.0), values, strict=True)
    ]  # fmt: skip
    (axes,) = lines(rows, "", ["p99_ttft_ms"]).axes
    assert axes.get_yscale() == scale
    assert bool(axes.get_ylim()[0] == 0) is at_zero


def test_gantt_of_a_few_draws_those_that_came_first(small_run):
    (axes,) = plots.gantt(small_run, "title", max_requests=3).axes
    came_s = (
        np.sort(small_run.requests["arrival_ns"])[:3] - small_run.requests["arrival_ns"].min()
    ) / 1e9
    begins = [
        min(bar.get_x() for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == i)
        for i in range(3)
    ]
    assert begins == pytest.approx(came_s.tolist())


def test_gantt_draws_phases_that_end_at_time_zero_and_no_further_than_those_that_ended(small_run):
    requests = {name: data[:4].copy() for name, data in small_run.requests.items()}
    marks = {
        "arrival_ns": [0, 0, 0, 10**9],
        "first_scheduled_ns": [0, 0, -1, 2 * 10**9],
        "first_token_ns": [0, 10**9, -1, -1],
        "finish_ns": [3 * 10**9, 2 * 10**9, -1, -1],
    }
    for name, values in marks.items():
        requests[name][:] = values
    requests["status"][:] = [0, 0, REJECTED, REJECTED]
    log = SimpleNamespace(preemptions=lambda: {"id": NONE, "evicted_ns": NONE, "resumed_ns": NONE})
    run = dataclasses.replace(small_run, requests=requests, log=log)
    (axes,) = plots.gantt(run, "title").axes
    drawn = {line: [] for line in range(4)}
    for bar in axes.patches:
        line = round(bar.get_y() + bar.get_height() / 2)
        drawn[line].append((bar.get_x(), bar.get_x() + bar.get_width()))
    assert drawn == {0: [(0, 0), (0, 0), (0, 3)], 1: [(0, 0), (0, 1), (1, 2)], 2: [], 3: [(1, 2)]}
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [(one.get_xdata()[0], one.get_ydata()[0]) for one in crosses] == [(0, 2), (1, 3)]
