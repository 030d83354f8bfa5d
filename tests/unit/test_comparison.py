import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.experiments.analysis import comparison
from schedlab.experiments.analysis.comparison import (
    METRICS,
    compare_runs,
    rank_agreement,
    step_errors,
)
from schedlab.experiments.comparing import compare_figures
from schedlab.experiments.comparing.compare_figures import cdf_figure, step_figure
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec


def result(policy="fcfs", seed=0, **engine):
    spec = {
        "name": "c", "seed": seed, "policy": policy, "engine": engine,
        "workload": {"trace": "azure-conv", "num_requests": 80, "request_rate": 5.0},
    }  # fmt: skip
    return run(make_spec(spec))


def scaled(run_result, factor):
    """Return the run as if the machine had been slower by a factor."""
    times = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns", "finish_ns")
    requests = {
        name: (column * factor).astype(np.int64) if name in times else column
        for name, column in run_result.requests.items()
    }
    return type(run_result)(
        run_result.name, run_result.policy, requests, run_result.log, run_result.kv_capacity_tokens
    )


def test_compare_runs_of_a_run_with_itself_finds_no_error():
    one = result()
    rows = compare_runs("fcfs", [one], [one])
    assert [row.metric for row in rows] == list(METRICS)
    for row in rows:
        assert row.measured == row.simulated
        assert row.in_spread
        if row.measured:
            assert row.error == 0
        if row.interval is not None:
            assert row.interval == (0.0, 0.0)


def test_compare_runs_finds_the_factor_between_two_machines():
    measured, simulated = result(), scaled(result(), 1.25)
    rows = {row.metric: row for row in compare_runs("fcfs", [measured], [simulated])}
    for metric in ("mean_ttft_ms", "p99_e2el_ms", "p50_tpot_ms"):
        assert rows[metric].error == pytest.approx(0.25, abs=1e-6)
        low, high = rows[metric].interval
        assert low == pytest.approx(0.25, abs=1e-6)
        assert high == pytest.approx(0.25, abs=1e-6)
    assert rows["request_throughput"].error == pytest.approx(-0.2, abs=1e-6)
    assert not rows["mean_ttft_ms"].holds


def test_spread_is_that_of_several_runs_and_unknown_of_one():
    one = result()
    (row, *_) = compare_runs("fcfs", [one], [one])
    assert row.num_runs == 1
    assert math.isnan(row.spread)
    (row, *_) = compare_runs("fcfs", [one, one], [one])
    assert (row.num_runs, row.spread) == (2, 0.0)
    apart = dataclasses.replace(row, measured=10.0, low=9.0, high=12.0)
    assert apart.spread == pytest.approx(0.15)
    assert math.isnan(dataclasses.replace(apart, measured=0.0).spread)


def test_deviations_are_those_from_the_mean_of_the_measured_runs_in_theirs():
    runs = [scaled(result(), factor) for factor in (0.9, 1.0, 1.1)]
    rows = {row.metric: row for row in compare_runs("fcfs", runs, [scaled(result(), 1.15)])}
    assert rows["mean_e2el_ms"].deviations == pytest.approx(1.5, abs=1e-4)
    assert math.isnan(rows["num_preemptions"].deviations), "all runs alike"
    (row, *_) = compare_runs("fcfs", runs[:1], [result()])
    assert math.isnan(row.deviation)
    assert math.isnan(row.deviations)


def test_bars_are_those_given_of_throughputs_and_of_whatever_else():
    one, other = result(), scaled(result(), 1.04)
    bars = {"throughput_bar": 0.03, "latency_bar": 0.045}
    rows = {row.metric: row for row in compare_runs("fcfs", [one], [other], **bars)}
    assert {rows[f"{name}_throughput"].bar for name in ("request", "output")} == {0.03}
    assert not rows["output_throughput"].holds
    assert rows["mean_ttft_ms"].holds
    assert {row.bar for row in rows.values() if "throughput" not in row.metric} == {0.045}
    usual = {row.metric: row.bar for row in compare_runs("fcfs", [one], [other])}
    assert (usual["request_throughput"], usual["kv_utilization"]) == (0.05, 0.1)


def chance_of(draws, num_runs, bar=0.1):
    return comparison._off_by_chance(np.array(draws, dtype=float), num_runs, bar, seed=1)


def test_chance_to_be_off_is_that_of_runs_which_the_simulation_drew_itself():
    assert chance_of([7.0] * 40, 5) == 0.0
    assert chance_of([7.0] * 19, 5) is None, "too few to tell"
    assert chance_of([100.0, *[200.0, *[100.0] * 9] * 10, 100.0], 1) == pytest.approx(0.1, abs=0.03)
    assert chance_of([100.0, 120.0] * 10, 1, bar=0.2) == 0.0
    assert chance_of([100.0, 121.0] * 10, 1, bar=0.05) == 1.0
    # Each run has a level of its own, at which every other draw was.
    assert chance_of([50.0, 150.0] * 10, 2) == 0.0
    assert chance_of([*[50.0] * 10, *[150.0] * 10], 2) == pytest.approx(0.5, abs=0.05)
    # Off are those that are all above the mean or all below, and by more than the bar.
    alike = chance_of([90.0, 110.0, 110.0, 90.0] * 5, 2, bar=0.05)
    assert alike == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_compare_runs_calls_a_value_among_repeats_within_the_spread():
    slow, fast = scaled(result(), 1.2), scaled(result(), 0.8)
    row = next(
        r for r in compare_runs("fcfs", [slow, fast], [result()]) if r.metric == "mean_ttft_ms"
    )
    assert row.in_spread
    assert row.spread == pytest.approx(0.2, abs=1e-3)
    assert row.holds


@pytest.mark.slow
def test_rank_agreement_is_one_if_both_backends_rank_alike_and_minus_one_if_opposed():
    one, two = result(), result(max_num_seqs=4)
    alike = compare_runs("a", [one], [scaled(one, 1.1)])
    alike += compare_runs("b", [two], [scaled(two, 1.1)])
    assert rank_agreement(alike)["mean_e2el_ms"] == pytest.approx(1.0)
    opposed = compare_runs("a", [one], [two]) + compare_runs("b", [two], [one])
    assert rank_agreement(opposed)["mean_e2el_ms"] == pytest.approx(-1.0)
    assert math.isnan(rank_agreement(compare_runs("a", [one], [one]))["mean_e2el_ms"])


def test_step_errors_are_those_computed_by_hand():
    found = step_errors(np.array([110, 180, 300]), np.array([100, 200, 300]))
    assert found["mape"] == pytest.approx((0.1 + 0.1 + 0.0) / 3)
    assert found["bias"] == pytest.approx(590 / 600 - 1)
    assert found["p90"] == pytest.approx(0.1)
    assert found["num_steps"] == 3


def test_interval_of_an_error_leaves_out_a_fortieth_at_each_end(monkeypatch):
    """Of three requests one is off: no draw of three in 27 is that one thrice, 1 of 27 is."""

    def latencies(e2el):
        unknown = np.full(3, np.nan)
        return SimpleNamespace(ttft=unknown, tpot=unknown, e2el=np.array(e2el))

    monkeypatch.setattr(comparison, "measured_latencies", latencies)
    for off, expected in ((2.0, (0.0, 1.0)), (0.0, (-1.0, 0.0))):
        found = comparison._bootstrap([[1.0, 1.0, 1.0]], [[off, 1.0, 1.0]], seed=0)
        assert found["mean_e2el_ms"] == pytest.approx(expected)
        assert set(found) == {f"{name}_e2el_ms" for name in ("mean", "p50", "p90", "p99")}


@pytest.mark.parametrize(
    ("theirs", "names"),
    [
        ([1.0, 2.0, 3.0], {"ttft", "e2el"}),
        ([np.nan, 2.0, 3.0], {"ttft", "e2el"}),
        ([1.0, np.nan, np.inf], {"ttft"}),  # one is known of both, and says nothing of others
        ([np.nan] * 3, {"ttft"}),
    ],
)
def test_interval_of_an_error_needs_two_requests_whose_time_is_known(monkeypatch, theirs, names):
    def latencies(e2el):
        return SimpleNamespace(ttft=np.ones(3), tpot=np.full(3, np.nan), e2el=np.array(e2el))

    monkeypatch.setattr(comparison, "measured_latencies", latencies)
    for one, other in (([theirs], [[1.0] * 3]), ([[1.0] * 3], [theirs])):
        found = comparison._bootstrap(one, other, seed=0)
        assert {key.split("_")[1] for key in found} == names


@pytest.mark.parametrize(
    ("num_steps", "num_drawn"), [(2_999, 2_999), (3_000, 1_500), (4_500, 1_500)]
)
def test_figure_of_many_steps_draws_every_so_many_of_them(num_steps, num_drawn):
    times_ns = np.arange(1, num_steps + 1) * 1e6
    point = SimpleNamespace(label="a", measured_ns=times_ns, predicted_ns=1.25 * times_ns)
    left, right = step_figure([point], "title").axes
    assert len(left.lines[0].get_xdata()) == num_drawn
    assert len(right.lines[0].get_xdata()) == num_steps, "all are counted"
    assert right.lines[0].get_xdata() == pytest.approx(25.0)


def test_figure_of_latencies_gives_a_policy_one_colour_at_every_load_and_names_each(monkeypatch):
    points = [
        SimpleNamespace(policy=policy, load=load, measured=measured, simulated=measured + 1.0)
        for measured, (policy, load) in enumerate(
            [("a", "slow"), ("b", "slow"), ("c", "fast"), ("b", "fast")]
        )
    ]
    monkeypatch.setattr(
        compare_figures, "latencies_s", lambda run, latency: np.array([run, np.nan, run + 1.0])
    )
    figure = cdf_figure(points, "title")
    slow, fast = figure.axes[:2]
    assert [axes.get_title(loc="left") for axes in (slow, fast)] == ["slow", "fast"]
    drawn = {
        (line.get_xdata()[0] / 1e3, line.get_linestyle()): line.get_color()
        for axes in (slow, fast)
        for line in axes.lines
    }
    a, b, c = (drawn[at, "-"] for at in (0, 1, 2))
    assert len({a, b, c}) == 3
    assert drawn == {
        (0, "-"): a, (1, ":"): a, (1, "-"): b, (2, ":"): b,
        (2, "-"): c, (3, ":"): c, (3, "-"): b, (4, ":"): b,
    }  # fmt: skip
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    assert [line.get_color() for line in legend.get_lines()] == [a, b, c]
    assert {line.get_linestyle() for line in legend.get_lines()} == {"-"}
