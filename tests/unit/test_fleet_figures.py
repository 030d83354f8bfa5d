"""Figures and tables of a fleet show what its engines did."""

import dataclasses
import json
import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from schedlab.experiments.figures import figures, fleets, plots, timelines
from schedlab.experiments.figures.figures import fleet_drawings
from schedlab.experiments.figures.interactive import traces_and_layout
from schedlab.experiments.report import fleet as report_fleet
from schedlab.experiments.report.fleet import fleet_table
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.sweep_all import run_into
from schedlab.experiments.sweeps.workers import InProcess
from schedlab.sim.errors import SchedlabError
from schedlab.sim.record.fleet import STILL, EngineFacts, Span

FLEET = {
    "model": "schedlab-small",
    "hardware": "a100-80gb",
    "slo": {"ttft_ms": 500, "tpot_ms": 50},
    "workload": {"trace": "fixed", "num_requests": 12, "request_rate": 200},
    "cluster": {
        "pools": {"prompts": {"role": "prefill"}, "answers": {"role": "decode", "count": 2}},
        "start_up": {"load_gb_per_s": 100, "warm_up_s": 0.05},
        "failures": {"engines": [{"engine": 2, "at_s": 0.05, "down_s": 0.01}]},
    },
}


@pytest.fixture(scope="module")
def result():
    return run(make_spec(FLEET))


def test_requests_over_time_are_those_of_the_steps(result):
    steps = result.log.steps()
    begin, end = (steps[name].astype(float) for name in ("start_ns", "end_ns"))
    edges = np.linspace(begin.min(), end.max(), 8)
    requests, held = fleets._means(result, edges)
    for index in range(result.num_engines):
        there = steps["engine"] == index
        weights = (end - begin)[there]
        num = (steps["num_running"] + steps["num_waiting"])[there]
        assert requests[index].sum() * np.diff(edges)[0] == pytest.approx(weights @ num)
        tokens = steps["kv_allocated_tokens"][there]
        assert held[index].sum() * np.diff(edges)[0] == pytest.approx(weights @ tokens)
    # The first piece alone, by hand.
    inside = np.clip(edges[1] - begin, 0, end - begin)
    first = inside[steps["engine"] == 0] @ steps["num_running"][steps["engine"] == 0]
    waiting = inside[steps["engine"] == 0] @ steps["num_waiting"][steps["engine"] == 0]
    assert requests[0][0] * np.diff(edges)[0] == pytest.approx(first + waiting)


def test_engine_that_died_is_white_until_it_is_up_again(result):
    figure = plots.engines_over_time(result, "title")
    requests, held, uneven = figure.axes[:3]
    shown = requests.images[0].get_array()
    assert shown.mask[2].any()
    assert not shown.mask[2].all()
    assert not shown.mask[:2].any()
    assert [line.get_label() for line in uneven.lines[:2]] == ["prompts", "answers"]
    assert np.nanmin(uneven.lines[0].get_ydata()) == 1.0  # one engine is its own mean
    assert (held.images[0].get_array() <= 100).all()


@pytest.mark.parametrize(
    ("pools", "named"), [("aab", ["a", "b"]), ("abb", ["a", "b"]), ("aaa", None)]
)
def test_pools_are_named_where_there_are_several_however_many_engines_each_has(
    result, pools, named
):
    engines = [one._replace(pool=pool) for one, pool in zip(result.engines, pools, strict=True)]
    figure = plots.engines_over_time(dataclasses.replace(result, engines=tuple(engines)), "")
    (axes,) = (axes for axes in figure.axes if axes.get_xlabel().startswith("time"))
    legend = axes.get_legend()
    found = None if legend is None else [text.get_text() for text in legend.get_texts()]
    assert found == named


def test_steps_of_an_engine_count_by_their_length_in_each_piece_of_time():
    # Two steps of 3 and 5 requests, from 10 to 20 and from 30 to 50; one is another engine's.
    steps = {"start_ns": np.array([10, 12, 30]), "end_ns": np.array([20, 18, 50])}
    there, values = np.array([True, False, True]), np.array([3.0, 9.0, 5.0])
    edges = np.array([0.0, 10.0, 15.0, 25.0, 40.0, 60.0])
    found = fleets._integral(steps, there, values, edges)
    assert found.tolist() == [0.0, 15.0, 15.0, 50.0, 50.0]


def test_piece_of_time_is_up_whose_middle_an_engine_served_its_end_not_counted():
    # The middles of ten pieces are 5, 15, .. 95.
    served = [[(5, 25), (75, STILL)], [], [(15, 45), (45, 46)]]
    result = SimpleNamespace(
        num_engines=3, engines=[SimpleNamespace(served=spans) for spans in served]
    )
    down = fleets._down(result, np.arange(0.0, 101.0, 10.0))
    assert [np.flatnonzero(~row).tolist() for row in down] == [
        [0, 1, 7, 8, 9], list(range(10)), [1, 2, 3, 4],
    ]  # fmt: skip


@pytest.mark.slow
def test_engines_over_time_are_where_they_were_in_a_live_figure_too(result):
    figure = plots.engines_over_time(result, "title")
    shown = next(one for one in traces_and_layout(figure)["data"] if one["type"] == "heatmap")
    edges = figure.axes[0].images[0].get_extent()
    assert shown["x0"] == pytest.approx(shown["dx"] / 2)
    assert shown["x0"] + shown["dx"] * (len(shown["z"][0]) - 0.5) == pytest.approx(edges[1])
    assert (shown["y0"], shown["dy"]) == (0, 1)


def test_shares_of_engines_add_up_to_the_run(result):
    observed = result.observation()
    shares = fleets.of_engines(observed)
    assert shares["requests answered"].sum() == 12
    computed = observed.steps["num_decodes"].sum() + observed.steps["prefill_tokens"].sum()
    assert shares["tokens computed"].sum() == computed
    assert shares["busy (% of the run)"].max() / 100 == pytest.approx(
        result.metrics()["max_engine_busy_share"]
    )
    figure = plots.engine_shares(observed, "title")
    most = result.metrics()["token_imbalance"]
    assert figure.axes[1].get_title(loc="left") == f"most / mean {most:.2f}"


def test_transfers_have_a_row_for_each_prompt_that_went_elsewhere(result):
    figure = plots.transfers(result, "title", max_requests=5)
    (axes,) = figure.axes
    assert len(axes.patches) == 4 * 5
    sent = axes.patches[10:15]
    columns = result.requests
    first = np.argsort(columns["arrival_ns"], kind="stable")[0]
    took = columns["transfer_end_ns"][first] - columns["transfer_start_ns"][first]
    assert sent[0].get_width() == pytest.approx(took / 1e9)
    assert axes.get_title(loc="left") == "title (first 5 of 12 requests)"
    took_ms = (columns["transfer_end_ns"] - columns["transfer_start_ns"]) / 1e6
    middle, tail = np.quantile(took_ms, [0.5, 0.99])
    told = f"on the link: median {middle:.2f} ms, P99 {tail:.2f} ms; a tick is where it began"
    assert told in [text.get_text() for text in figure.findobj(Text)]


@pytest.mark.slow
def test_transfer_that_begins_before_the_first_token_waits_for_nothing(result):
    columns = {name: column.copy() for name, column in result.requests.items()}
    early = columns["transfer_start_ns"] - 2_000_000
    columns["first_token_ns"] = np.where(columns["id"] % 2, early, early + 5_000_000)
    (axes,) = plots.transfers(dataclasses.replace(result, requests=columns), "title").axes
    num = len(columns["id"])
    order = np.argsort(columns["arrival_ns"], kind="stable")
    waits = [bar.get_width() for bar in axes.patches[num : 2 * num]]
    assert waits == pytest.approx([0.002 if i % 2 else 0.0 for i in columns["id"][order].tolist()])


@pytest.mark.parametrize(("most", "is_named"), [(2, True), (1, False)])
def test_engines_have_names_up_to_a_number_of_them(monkeypatch, result, most, is_named):
    monkeypatch.setattr(fleets, "_MOST_NAMED", most)
    figure = Figure()
    axes = figure.subplots()
    fleets._draw_rows(figure, axes, np.arange(4.0), np.ones((2, 3)), "what", result)
    told = [tick.get_text() for tick in axes.get_yticklabels()]
    names = [fleets.engine_name(result, index) for index in range(2)]
    assert (told == names) is is_named


@pytest.mark.slow
@pytest.mark.parametrize(("num", "is_named"), [(64, True), (65, False)])
def test_shares_of_engines_name_each_of_64_and_show_the_first_on_top(monkeypatch, num, is_named):
    engines = tuple(SimpleNamespace(pool=f"kind {i % 2}") for i in range(num))
    run = SimpleNamespace(engines=engines, num_engines=num)
    values = {
        "requests": np.arange(1.0, num + 1),
        "tokens": np.full(num, 2e6),
        "busy": np.ones(num),
    }
    monkeypatch.setattr(fleets, "of_engines", lambda run: values)
    figure = fleets.engine_shares(run, "title")
    first, second, _ = figure.axes
    named = [tick.get_text() for tick in first.get_yticklabels()]
    assert (named == [f"{i} kind {i % 2}" for i in range(num)]) is is_named
    assert first.get_ylim() == (num - 0.4, -0.6)
    assert [bar.get_width() for bar in first.patches] == values["requests"].tolist()
    assert {bar.get_facecolor() for bar in first.patches[::2]} != {first.patches[1].get_facecolor()}
    assert second.get_xlabel() == "tokens"
    assert "2,000,000" in [tick.get_text() for tick in second.get_xticklabels()]


def test_figures_of_a_fleet_refuse_a_single_engine():
    alone = run(make_spec({key: FLEET[key] for key in ("model", "hardware", "workload")}))
    for draw in (plots.engines_over_time, plots.transfers):
        with pytest.raises(SchedlabError, match=r"one engine|no prompt went"):
            draw(alone, "title")
    with pytest.raises(SchedlabError, match="give the experiment a cluster"):
        plots.engine_shares(alone.observation(), "title")
    with pytest.raises(SchedlabError, match="no setting has good requests and a price"):
        plots.goodput_per_dollar({"a": [float("nan")]}, "title")


@pytest.mark.slow
def test_report_tells_each_engine_of_a_run_and_each_fleet_of_a_sweep(tmp_path):
    run_into(make_spec(FLEET), tmp_path / "one", InProcess())
    one = read_results(tmp_path / "one")
    table = fleet_table(one)
    assert [line[:2] for line in table.lines] == [
        ("0 prompts", "prefill"), ("1 answers", "decode"), ("2 answers", "decode"),
    ]  # fmt: skip
    assert [drawing.name for drawing in fleet_drawings(one)] == [
        "engines_over_time", "engine_shares", "transfers",
    ]  # fmt: skip
    swept = {**FLEET, "cluster": 2, "sweep": {"cluster.count": [1, 2]}, "replications": 2}
    run_into(make_spec(swept), tmp_path / "swept", InProcess())
    results = read_results(tmp_path / "swept")
    assert [line[0] for line in fleet_table(results).lines] == [row.label for row in results.rows]
    (drawing,) = fleet_drawings(results)
    bars = [bar.get_width() for bar in drawing.draw().axes[0].patches]
    heads = [run.head()["metrics"] for run in results.of(results.rows[0])]
    expected = np.mean([head["num_slo_met"] / head["cost_usd"] for head in heads])
    assert bars[0] == pytest.approx(expected)


def test_table_of_engines_has_the_price_of_all_gpus_of_each(monkeypatch):
    engines = [
        SimpleNamespace(
            role="prefill", hardware="h100", policy="fcfs", num_gpus=4, kv_capacity_tokens=12_345,
            usd_per_gpu_hour=2.5,
        ),
        SimpleNamespace(
            role="decode", hardware="own", policy="sjf", num_gpus=1, kv_capacity_tokens=99,
            usd_per_gpu_hour=None,
        ),
    ]  # fmt: skip
    run = SimpleNamespace(engines=engines, observation=lambda: "observed")
    monkeypatch.setattr(report_fleet, "engine_name", lambda run, index: f"engine {index}")
    monkeypatch.setattr(
        report_fleet, "of_engines", lambda observed: {"a": [1234.4, 5.0], "b": [0.6, 7.0]}
    )
    table = report_fleet._of_engines(run)
    assert table.header == (
        "engine", "role", "hardware", "policy", "GPUs", "KV tokens", "a", "b", "USD an hour",
    )  # fmt: skip
    assert table.lines == [
        ("engine 0", "prefill", "h100", "fcfs", "4", "12,345", "1,234", "1", "10.00"),
        ("engine 1", "decode", "own", "sjf", "1", "99", "5", "7", "-"),
    ]
    assert table.num_text == 4


def test_memory_of_each_engine_is_shown_as_a_share_of_its_own(result):
    times = 2 ** np.arange(len(result.engines))
    larger = [
        one._replace(kv_capacity_tokens=int(n) * one.kv_capacity_tokens)
        for one, n in zip(result.engines, times, strict=True)
    ]
    changed = dataclasses.replace(result, engines=tuple(larger))
    before, after = (
        [axes.images[0].get_array().filled(np.nan) for axes in figure.axes if axes.images][:2]
        for figure in (plots.engines_over_time(one, "") for one in (result, changed))
    )
    assert np.nanmax(before[1]) > 0
    np.testing.assert_allclose(after[0], before[0])
    np.testing.assert_allclose(after[1], before[1] / times[:, None])


@pytest.mark.parametrize(
    ("goods", "is_drawn"),
    [
        ({"a": [1.0, 2.0]}, True), ({"a": [math.nan], "b": [3.0]}, True),
        ({"a": [math.nan, 1.0]}, True), ({"a": [math.nan], "b": [math.nan]}, False), ({}, False),
    ],
)  # fmt: skip
def test_goodput_for_a_dollar_is_drawn_once_any_run_has_it(monkeypatch, goods, is_drawn):
    results = SimpleNamespace(name="mine", rows=[1, 2], runs=[])
    monkeypatch.setattr(figures, "shown_load", lambda rows: (rows, "at 3"))
    monkeypatch.setattr(figures, "good_requests_per_usd", lambda of, rows: goods)
    drawn = []
    monkeypatch.setattr(plots, "goodput_per_dollar", lambda *given: drawn.append(given))
    found = figures.fleet_drawings(results)
    assert [one.name for one in found] == ["goodput_per_dollar"] * is_drawn
    for one in found:
        one.draw()
    assert drawn == [(goods, "mine at 3")] * is_drawn


def test_memory_over_time_since_the_first_arrival_is_a_share_of_that_of_the_engine_of_each_step(
    monkeypatch, result
):
    times = 3 ** np.arange(len(result.engines))
    larger = [
        one._replace(kv_capacity_tokens=int(n) * one.kv_capacity_tokens)
        for one, n in zip(result.engines, times, strict=True)
    ]
    drawn = {}
    monkeypatch.setattr(
        timelines, "_draw_area",
        lambda axes, time_s, values, name: drawn.setdefault(name, (time_s, values)),
    )  # fmt: skip
    # Nobody is served for seven seconds: time counts from the first arrival all the same.
    early = {**result.requests, "arrival_ns": result.requests["arrival_ns"] - 7_000_000_000}
    plots.time_series(dataclasses.replace(result, requests=early, engines=tuple(larger)), "")
    steps = result.log.steps()
    capacity = np.array([larger[i].kv_capacity_tokens for i in steps["engine"].tolist()])
    time_s, percent = drawn["held by requests"]
    np.testing.assert_allclose(percent, 100 * steps["kv_allocated_tokens"] / capacity)
    first_ns = result.requests["arrival_ns"].min()
    np.testing.assert_allclose(time_s, 7 + (steps["start_ns"] - first_ns) / 1e9)


def test_facts_of_an_engine_are_read_back_as_they_were_whatever_they_lack():
    names = {"pool": "p", "hardware": "h100", "policy": "fcfs", "role": "mixed"}
    for price, paid, served in product(
        (None, 0.0, 2.5), ((), (Span(0, 9), Span(20, STILL))), ((), (Span(3, 7),))
    ):
        facts = EngineFacts(
            **names, num_gpus=2, kv_capacity_tokens=640, usd_per_gpu_hour=price, paid=paid,
            served=served,
        )  # fmt: skip
        data = json.loads(json.dumps(facts.to_data()))
        assert EngineFacts.from_data(data) == facts
        assert data["usd_per_gpu_hour"] == price
        assert {*data} & {"paid", "served"} == {
            name for name, spans in (("paid", paid), ("served", served)) if spans
        }
