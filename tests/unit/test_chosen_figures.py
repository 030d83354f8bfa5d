"""Figures by name, of what was asked for: names, filters, axes, several folders, sizes, formats."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import schedlab as sl
from schedlab.experiments.figures import accessor, figures, plots
from schedlab.experiments.figures import chosen as chosen_figures
from schedlab.experiments.figures.chosen import FIGURES, Chosen, Drawing, draw_chosen
from schedlab.experiments.figures.heat_map import DEFAULT_METRICS
from schedlab.experiments.figures.lines import lines
from schedlab.experiments.figures.searches import answers, tried, tuned
from schedlab.experiments.figures.style import SIZES, house_style, new_figure, paper, title_in_lines
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import SavedResults, read_results
from schedlab.experiments.results.selection import (
    filtered,
    merged,
    num_gpus,
    relabelled,
    swept_key,
)
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.record.columns import FINISHED, REJECTED

SWEPT = {
    "name": "swept",
    "workload": {"trace": "fixed", "num_requests": 12},
    "sweep": {
        "policy": ["fcfs", "static"],
        "engine.max_num_seqs": [2, 8],
        "workload.request_rate": [1, 4],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("results") / "one"
    sl.run(SWEPT, folder=place)
    return place


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    place = tmp_path_factory.mktemp("results") / "two"
    tp2 = {"tensor_parallel_size": 2, "max_num_seqs": 8}
    sl.run({**SWEPT, "engine": tp2, "sweep": {"workload.request_rate": [1, 4]}}, folder=place)
    return place


@pytest.fixture(scope="module")
def results(folder):
    return read_results(folder)


def names(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.slow
def test_filter_by_the_end_of_a_key_keeps_its_values_and_their_runs(results):
    some = filtered(results, {"max_num_seqs": ["8"], "policy": ["fcfs"]})
    assert [row.label for row in some.rows] == [
        "fcfs, max_num_seqs=8, request_rate=1", "fcfs, max_num_seqs=8, request_rate=4"
    ]  # fmt: skip
    assert [run.label for run in some.runs] == [row.label for row in some.rows]


@pytest.mark.slow
def test_filter_by_several_values_of_a_key_keeps_all_of_them(results):
    some = filtered(results, {"policy": ["static", "fcfs"], "request_rate": ["4"]})
    assert [(row.policy, row.settings["workload.request_rate"]) for row in some.rows] == [
        ("fcfs", "4"), ("fcfs", "4"), ("static", "4"), ("static", "4")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_num_seq": ["8"]}, "did you mean engine.max_num_seqs"),
        ({"policy": ["static", "fcsf"]}, "did you mean fcfs"),
        ({"max_num_seqs": ["9"]}, "no setting has max_num_seqs=9"),
    ],
)
def test_filter_of_what_is_not_swept_is_refused(results, wanted, message):
    with pytest.raises(SpecError, match=message):
        filtered(results, wanted)


def test_label_renames_a_policy_in_every_figure(results):
    named = relabelled(results, {"static": "no batching in between"})
    assert {row.policy for row in named.rows} == {"fcfs", "no batching in between"}
    with pytest.raises(SpecError, match="did you mean static"):
        relabelled(results, {"statik": "x"})


def test_lines_have_a_curve_a_setting_over_the_rate(results):
    figure = lines(results.rows, "title", ["p99_ttft_ms"])
    assert names(figure)[:2] == ["fcfs, max_num_seqs=2", "fcfs, max_num_seqs=8"]
    curve = figure.axes[0].lines[0]
    rows = [row for row in results.rows if row.label.startswith("fcfs, max_num_seqs=2")]
    assert list(curve.get_xdata()) == [1, 4]
    assert list(curve.get_ydata()) == pytest.approx([r.mean("p99_ttft_ms") for r in rows])


@pytest.mark.slow
def test_lines_over_a_key_without_numbers_set_its_values_side_by_side(results):
    some = filtered(results, {"request_rate": ["4"]}).rows
    figure = lines(some, "", ["mean_e2el_ms"], "policy")
    ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert ticks == ["fcfs", "static"]
    assert names(figure) == ["max_num_seqs=2", "max_num_seqs=8"]
    # A quarter apart, their middle at the name.
    drawn = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2]
    places = {tuple(line.get_xdata()) for line in drawn if line.get_marker() != "None"}
    assert places == {(-0.125, 0.875), (0.125, 1.125)}


def test_lines_over_a_metric_join_the_rates_of_a_setting(results):
    figure = lines(results.rows, "", ["mean_e2el_ms"], "request_throughput", ["policy"])
    assert names(figure) == ["fcfs", "static"]
    assert figure.axes[0].get_xlabel().startswith("throughput")


def test_lines_over_a_metric_are_drawn_in_the_units_of_both_axes(results):
    (axes,) = lines(results.rows, "", ["p99_ttft_ms"], "mean_e2el_ms", ["policy"]).axes
    assert "(ms)" in axes.get_xlabel()
    assert "(ms)" in axes.get_ylabel()
    drawn = [tuple(xy) for line in axes.lines for xy in line.get_xydata()]
    for row in results.rows:
        at = row.mean("mean_e2el_ms"), row.mean("p99_ttft_ms")
        assert any(xy == pytest.approx(at) for xy in drawn), row.label


def test_lines_refuse_settings_that_share_a_place(results):
    with pytest.raises(SpecError, match=r"engine\.max_num_seqs varies as well; add it to --by"):
        lines(results.rows, "", ["mean_e2el_ms"], "request_rate", ["policy"])


@pytest.mark.parametrize("values", ["00", "77", "aa", "100", "abb"])
def test_settings_that_share_any_place_even_the_first_are_not_drawn_over_each_other(values):
    settings = ({"policy": "p", "k": k, "other": str(n)} for n, k in enumerate(values))
    with pytest.raises(SpecError, match="other varies as well; add it to --by"):
        lines(rows_of(*settings, completed=1.0), "", ["completed"], "k", ["policy"])


def test_settings_of_different_curves_may_share_a_place():
    rows = rows_of(*({"policy": p, "k": k} for p in "ab" for k in ("0", "3")), completed=1.0)
    (axes,) = lines(rows, "", ["completed"], "k", ["policy"]).axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    assert [curve for curve in drawn if len(curve[0])] == [([0, 3], [1, 2]), ([0, 3], [3, 4])]


@pytest.mark.slow
def test_folders_are_one_sweep_and_what_one_does_not_sweep_is_read_from_its_points(folder, other):
    both = merged([read_results(folder), read_results(other)])
    last = both.rows[-1]
    assert last.settings == {
        "folder": "two", "policy": "fcfs", "engine.max_num_seqs": "8", "workload.request_rate": "4"
    }  # fmt: skip
    assert len(both.of(last)) == 1
    assert [num_gpus(both.of(row)[0]) for row in (both.rows[0], last)] == [1, 2]
    assert plots.curve_name(last) == "two, fcfs, max_num_seqs=8"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "schedlab.provenance.spec is no experiment"),
        ({"engine": 3}, "schedlab.provenance.spec is no experiment"),
        ({"engine": {"tensor_parallel_size": "two"}}, "does not say on how many GPUs: ValueError"),
        ({"engine": {}, "cluster": {"pools": [1]}}, "does not say on how many GPUs: Attribute"),
    ],
)
def test_result_that_does_not_tell_its_gpus_is_refused_by_name(tmp_path, spec, message):
    head = {"schedlab": {"schema": 1, "provenance": {"spec": spec}}}
    (tmp_path / "result.json").write_text(json.dumps(head))
    run = PointMetrics("", {}, 0, "fcfs", {}, folder=tmp_path)
    with pytest.raises(SchedlabError, match=f"result.json: .*{message}"):
        num_gpus(run)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"engine": {}}, 1),
        ({"engine": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}}, 8),
        ({"engine": {"pipeline_parallel_size": 3}, "cluster": 5}, 15),
        ({"engine": {"tensor_parallel_size": 3}, "cluster": {"count": 4}}, 12),
        (
            {
                "engine": {"tensor_parallel_size": 2},
                "cluster": {
                    "pools": {"a": {"count": 3, "engine": {"pipeline_parallel_size": 4}}, "b": {}}
                },
            },
            26,
        ),
    ],
)
def test_gpus_of_a_result_are_those_of_all_stages(tmp_path, spec, expected):
    head = {"schedlab": {"schema": 1, "provenance": {"spec": spec}}}
    (tmp_path / "result.json").write_text(json.dumps(head))
    assert num_gpus(PointMetrics("", {}, 0, "fcfs", {}, folder=tmp_path)) == expected


def test_gpu_frontier_divides_by_the_gpus_of_each_setting(results):
    rows = filtered(results, {"policy": ["fcfs"], "max_num_seqs": ["8"]}).rows
    points = {}
    for gpus in (1, 2):
        (axes,) = plots.gpu_frontier(rows, "", [gpus] * len(rows)).axes
        points[gpus] = axes.lines[0].get_xydata()
    assert points[1][:, 1] == pytest.approx(2 * points[2][:, 1])
    assert points[1][0] == pytest.approx(
        [1e3 / rows[0].mean("median_tpot_ms"), rows[0].mean("output_throughput")]
    )


def test_paper_sets_the_width_and_refuses_what_cannot_be_read():
    with paper("column"):
        assert new_figure(10, 4).get_size_inches()[0] == SIZES["column"]
        with pytest.raises(SchedlabError, match=r"needs 5\.0 inches and a column has 3\.4"):
            new_figure(10, 4, least=5)
    assert new_figure(10, 4).get_size_inches()[0] == 10


@pytest.mark.slow
def test_drawing_writes_the_formats_asked_for_and_the_same_bytes(folder, tmp_path):
    chosen = Chosen(["latency_rate"], wanted={"policy": ["fcfs"]}, title="")
    for _ in range(2):
        written, _ = draw_chosen([folder], chosen, tmp_path, ("pdf",), "column")
        assert [path.name for path in written] == ["latency_rate.pdf"]
        read = written[0].read_bytes()
    assert read.startswith(b"%PDF")
    assert written[0].read_bytes() == read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Chosen(["latency"]), "latency_rate"),
        (Chosen(["latency_cdf"]), r"did you mean cdf\?"),
        (Chosen(["ttft_cdf"]), r"did you mean cdf --metric ttft\?"),
        (Chosen(["latency_rate"], ["p99_ttft_ms"]), "takes no --metric"),
        (Chosen(["gantt"]), "shows one run"),
        (Chosen(["cdf"], ["p99_ttft_ms"]), "one --metric"),
        (Chosen(["pareto"], ["p99_ttft_ms", "p99_tpot_ms"]), "one --metric against one --x"),
        (Chosen(["tuned"]), "is of no search"),
    ],
)
def test_figures_that_cannot_be_drawn_say_why(folder, tmp_path, chosen, message):
    with pytest.raises(SchedlabError, match=message):
        draw_chosen([folder], chosen, tmp_path)
    assert list(tmp_path.iterdir()) == []


FOUND = {
    "name": "capacity",
    "find": {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 1000}, "at_least": {}},
    "settings": [
        {
            "label": "fcfs", "mean": 5.0, "ci95": 0.5, "bound": None,
            "replications": [
                {"value": v, "breaks_at": v + 1,
                 "tried": [{"value": 2.0, "excess": {"p99_ttft_ms <= 1000": -400.0}},
                           {"value": 8.0, "excess": {"p99_ttft_ms <= 1000": 9000.0}}]}
                for v in (4.5, 5.5)
            ],
        }
    ],
}  # fmt: skip


def test_answers_show_mean_interval_and_seeds():
    (axes,) = answers(FOUND, "").axes
    seeds, mean, interval = axes.lines
    assert list(seeds.get_xdata()) == [4.5, 5.5]
    assert mean.get_xdata()[0] == 5.0
    assert list(interval.get_xdata()) == [4.5, 5.5]


def test_tried_gives_the_metric_back_from_its_excess():
    (axes,) = tried(FOUND, "").axes
    *seeds, bound = axes.lines
    assert [list(line.get_ydata()) for line in seeds] == [[600.0, 10_000.0]] * 2
    assert set(bound.get_ydata()) == {1000.0}


@pytest.mark.parametrize(
    ("bound", "arrow", "at"),
    [("at least", ">", 10.4), ("above", ">", 10.4), ("at most", "<", 9.6), ("below", "<", 9.6)],
)
def test_answer_beyond_what_was_tried_points_there_and_has_no_interval(bound, arrow, at):
    one = {
        "label": "a", "mean": 10.0, "ci95": 2.0, "bound": bound,
        "replications": [{"value": 9.0}, {"value": 11.0}],
    }  # fmt: skip
    (axes,) = answers(FOUND | {"settings": [one, one | {"label": "b", "bound": ""}]}, "").axes
    drawn = [(line.get_marker(), line.get_xdata().tolist(), list(line.get_ydata()))
             for line in axes.lines]  # fmt: skip
    assert (arrow, [pytest.approx(at)], [0]) in drawn
    assert [x for marker, x, _ in drawn if marker in "<>"] == [[pytest.approx(at)]]
    assert [(x, y) for _, x, y in drawn if len(x) == 2 and y[0] == y[1] and x == [8.0, 12.0]] == [
        ([8.0, 12.0], [1, 1])
    ]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]


def test_tuned_marks_what_breaks_a_bar_and_the_winner():
    trial = {"values": {"engine.max_num_seqs": 8.0}, "goals": [3.0, 5.0], "holds": True}
    broken = trial | {"values": {"engine.max_num_seqs": 64.0}, "holds": False}
    found = {
        "tune": {"maximize": "request_throughput", "over": {"engine.max_num_seqs": [8, 64]},
                 "at_most": {}, "at_least": {}},
        "tried": [trial, broken], "best_on_new_seeds": trial, "given_on_new_seeds": None,
    }  # fmt: skip
    (axes,) = tuned(found, "").axes
    assert [line.get_markerfacecolor() for line in axes.lines[:2]] == ["#0072B2", "white"]
    assert list(axes.lines[0].get_ydata()) == [4.0]
    assert "*" in [line.get_marker() for line in axes.lines]


def test_every_figure_by_name_has_a_caption_that_ends_as_a_sentence():
    assert all(kind.caption.endswith(".") for kind in FIGURES.values())


def test_refused_figure_leaves_no_folder(folder, tmp_path):
    with pytest.raises(SpecError, match="shows one run"):
        draw_chosen([folder], Chosen(["gantt"]), tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Plots:
    """Stands for the module of figures: a call is told by its name and what it is given."""

    def __getattr__(self, name):
        return lambda *given: (name, *given)


def results_of(*rows):
    """Return results whose runs are known by their row, and load as such."""
    runs = {row: SimpleNamespace(load=lambda row=row: Run(row)) for row in rows}
    return SimpleNamespace(rows=rows, runs=[runs[row] for row in rows], of=lambda row: [runs[row]])


class Run(str):
    """A run, by the name of its setting."""

    def observation(self):
        return f"all of {self}"


@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("lines", {}, (("a", "b"), "title", ("p99_ttft_ms", "p99_tpot_ms"), None, ())),
        ("lines", {"metrics": ["m"], "x": "x", "by": ["k"]},
         (("a", "b"), "title", ["m"], "x", ["k"])),
        ("throughput_p99", {}, ("throughput_against_p99", ("a", "b"), "title")),
        ("latency_rate", {}, ("latency_against_rate", ("a", "b"), "title")),
        ("slo_attainment", {}, ("attainment_against_rate", ("a", "b"), "title")),
        ("pareto", {}, ("pareto", ("a", "b"), "title", "output_throughput", "p99_ttft_ms")),
        ("pareto", {"metrics": ["m"], "x": "x"}, ("pareto", ("a", "b"), "title", "x", "m")),
        ("gpu_frontier", {}, ("gpu_frontier", ("a", "b"), "title", ["gpus of a", "gpus of b"])),
        ("heat_map", {}, ("heat_map", ["b"], "title at 3", DEFAULT_METRICS)),
        ("heat_map", {"metrics": ["m"]}, ("heat_map", ["b"], "title at 3", ["m"])),
        ("cdf", {}, ("latency_cdf", {"curve of b": "b"}, "title at 3", "ttft")),
        ("cdf", {"metrics": ["e2el"]}, ("latency_cdf", {"curve of b": "b"}, "title at 3", "e2el")),
        ("goodput_per_dollar", {}, ("goodput_per_dollar", "good b", "title at 3")),
    ],
)  # fmt: skip
def test_figure_by_name_is_handed_what_was_asked_for(monkeypatch, name, asked, told):
    both = results_of("a", "b")
    patches = {
        "plots": Plots(), "lines": lambda *given: given,
        "num_gpus": lambda run: f"gpus of {run.load()}",
        "shown_load": lambda rows: (list(rows[1:]), "at 3"),
        "curve_name": lambda row: f"curve of {row}",
        "good_requests_per_usd": lambda results, rows: f"good {' '.join(rows)}",
        "first_runs_in_words": lambda results, rows, title, load: f"{title} {load}",
    }  # fmt: skip
    for key, value in patches.items():
        monkeypatch.setattr(chosen_figures, key, value)
    assert FIGURES[name].draw(both, "title", Chosen(**asked)) == told
    if told[-1] == "title at 3" or told[2] == "title at 3":
        untitled = FIGURES[name].draw(both, "", Chosen(**asked, title=""))
        assert "" in untitled, "no title has no load either"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("time_series", ("time_series", "a", "t")), ("gantt", ("gantt", "a", "t")),
        ("engines_over_time", ("engines_over_time", "a", "t")),
        ("engine_shares", ("engine_shares", "all of a", "t")),
        ("transfers", ("transfers", "a", "t")),
    ],
)  # fmt: skip
def test_figure_of_one_run_is_of_one_setting(monkeypatch, name, shown):
    monkeypatch.setattr(chosen_figures, "plots", Plots())
    monkeypatch.setattr(chosen_figures, "one_run_in_words", lambda results, row: f"words of {row}")
    assert FIGURES[name].draw(results_of("a"), "t", Chosen(title="t")) == shown
    own = FIGURES[name].draw(results_of("a"), "t", Chosen())
    assert own == (*shown[:2], "t (words of a)"), "what nobody named says which run it is"
    with pytest.raises(SpecError, match="shows one run, and here are 2 settings: --filter one"):
        FIGURES[name].draw(results_of("a", "b"), "t", Chosen())


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Three seeds of each setting, from 7 on."""
    place = tmp_path_factory.mktemp("results") / "seeds"
    sweep = {"policy": ["fcfs", "static"], "workload.request_rate": [1, 4]}
    sl.run({**SWEPT, "seed": 7, "replications": 3, "sweep": sweep}, folder=place)
    return read_results(place)


def test_figures_of_one_run_of_several_say_which_in_their_titles(seeds):
    one = filtered(seeds, {"policy": ["static"], "request_rate": ["4"]})
    for name in ("gantt", "time_series", "cdf"):
        said = FIGURES[name].draw(one, "swept", Chosen()).axes[0].get_title(loc="left")
        assert said.startswith("swept (static, request_rate=4, seed 7, first of 3)"), name
    for drawing in figures.drawings(seeds):
        if drawing.name.endswith("_cdf"):
            said = drawing.draw().axes[0].get_title(loc="left")
            assert said == "swept at 4 requests/s, seed 7, first of 3"
    plot = accessor.Plots(seeds, still=True)
    said = plot.gantt("static, request_rate=4").axes[0].get_title(loc="left")
    assert said == "static, request_rate=4, seed 7, first of 3"


def test_title_of_a_run_without_seeds_and_settings_names_its_policy_alone():
    point = SimpleNamespace(label="one")
    row = Row("one", "fcfs", {}, 1, {})
    alone = SimpleNamespace(rows=[row], runs=[point], of=lambda row: [point])
    assert figures.one_run_in_words(alone, row) == "fcfs"


def test_figure_of_no_name_is_told_with_the_nearest():
    plot = accessor.Plots(SimpleNamespace())
    with pytest.raises(AttributeError, match=r"'latency_cfd' here; did you mean latency_cdf\?"):
        plot.latency_cfd  # noqa: B018
    assert not hasattr(plot, "_repr_html_")


def test_long_title_is_written_in_lines_above_the_legend():
    with paper("column"), house_style():
        axes = new_figure(8, 4).subplots()
        title_in_lines(axes, "word " * 20, over_legend=True)
        lines = axes.get_title(loc="left").split("\n")
        assert len(lines) > 1
        assert max(map(len, lines)) < 50
    above = axes.titleOffsetTrans.get_matrix()[1, 2]
    with house_style():
        title_in_lines(axes, "word")
    assert axes.titleOffsetTrans.get_matrix()[1, 2] < above


@pytest.mark.parametrize("into", [None, "out"])
def test_figures_go_where_they_are_asked_for_and_those_that_do_not_fit_are_told(
    monkeypatch, tmp_path, into
):
    def refused():
        raise SpecError("too wide")

    kinds = [
        Drawing("one", "c", lambda: "figure 1"), Drawing("two", "c", refused),
        Drawing("three", "c", lambda: "figure 3"),
    ]  # fmt: skip
    marked = []
    monkeypatch.setattr(chosen_figures, "_drawings", lambda folders, chosen: kinds)
    monkeypatch.setattr(
        chosen_figures, "save", lambda figure, place, formats: [place / f"{figure}.{formats[0]}"]
    )
    monkeypatch.setattr(
        chosen_figures, "add_to_marker", lambda place, names: marked.append((place, names))
    )
    first, output = tmp_path / "first", tmp_path / into if into else None
    place = output or first
    drawn = draw_chosen([first, tmp_path / "second"], Chosen(), output, ("svg",))
    assert drawn == (
        [place / "one" / "figure 1.svg", place / "three" / "figure 3.svg"], ["two: too wide"]
    )  # fmt: skip
    assert place.is_dir()
    assert marked == ([] if into else [(first, ["figure 1.svg", "figure 3.svg"])])
    # Asked for by name, or the only one, it is refused as a whole.
    with pytest.raises(SpecError, match=r"^two: too wide$"):
        draw_chosen([first], Chosen(figures=["two"]), output)
    monkeypatch.setattr(chosen_figures, "_drawings", lambda folders, chosen: kinds[1:2])
    with pytest.raises(SpecError, match=r"^two: too wide$"):
        draw_chosen([first], Chosen(), output)
    monkeypatch.setattr(chosen_figures, "_drawings", lambda folders, chosen: [])
    with pytest.raises(SchedlabError, match="first: one setting and no tables of its run"):
        draw_chosen([first, tmp_path / "second"], Chosen(), output)
    (tmp_path / "file").touch()
    monkeypatch.setattr(chosen_figures, "_drawings", lambda folders, chosen: kinds)
    with pytest.raises(SpecError, match="file is a file; figures are written into a folder"):
        draw_chosen([first], Chosen(), tmp_path / "file")


@pytest.mark.parametrize("title", [None, "", "mine"])
def test_figures_of_a_search_are_told_by_its_files_and_its_name(monkeypatch, tmp_path, title):
    (tmp_path / "find.json").write_text('{"name": "sought", "settings": []}')
    (tmp_path / "recommend.json").write_text("{}")
    kinds = {
        name: replace(kind, draw=lambda found, shown, name=name: (name, sorted(found), shown))
        for name, kind in chosen_figures.SEARCHES.items()
    }
    monkeypatch.setattr(chosen_figures, "SEARCHES", kinds)
    told = chosen_figures.search_drawings(tmp_path, title)
    named = "sought" if title is None else title
    assert [one.draw() for one in told] == [
        ("answers", ["name", "settings"], named), ("tried", ["name", "settings"], named),
        ("recommended", [], title or ""),
    ]  # fmt: skip
    assert [(one.name, one.caption) for one in told] == [
        (name, kinds[name].caption) for name in ("answers", "tried", "recommended")
    ]
    one = chosen_figures._drawings([tmp_path], Chosen(figures=["tried"], title=title))
    assert [found.name for found in one] == ["tried"]
    with pytest.raises(SpecError, match=r"has no tune\.json for tuned"):
        chosen_figures._drawings([tmp_path], Chosen(figures=["tried", "tuned"]))
    with pytest.raises(SpecError, match="is of a search: give one such folder"):
        chosen_figures._drawings([tmp_path, tmp_path], Chosen())
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SpecError, match="empty is of no search: tried shows what find and tune"):
        chosen_figures._drawings([empty], Chosen(figures=["tried", "answers"]))


@pytest.mark.parametrize("name", [*FIGURES, *chosen_figures.SEARCHES])
def test_misspelt_figure_of_runs_or_searches_names_the_nearest(tmp_path, name):
    given = f"{name}x"
    with pytest.raises(SpecError, match=f"no figure is called '{given}'; did you mean {name}"):
        chosen_figures._drawings([tmp_path], Chosen(figures=["lines", given]))


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(6.8, 6.0, 3.0), (6.8, 4.0, 2.3), (6.8, 1.3, 1.3)],
    ids=["in proportion", "not too low to read", "no higher than on a screen"],
)
def test_figure_for_a_column_is_lower_in_proportion_down_to_a_height(width, height, expected):
    with paper("column"):
        assert new_figure(width, height).get_size_inches() == pytest.approx([3.4, expected])
    assert new_figure(width, height).get_size_inches() == pytest.approx([width, height])


@pytest.mark.parametrize("still", [False, True])
def test_figures_as_methods_are_handed_rows_runs_and_titles(monkeypatch, still):
    rows = [
        SimpleNamespace(label=f"label {one}", name=one, settings={"policy": "set"}) for one in "ab"
    ]
    runs = [SimpleNamespace(label=f"label {one}", name=one, load=lambda one=one: Run(one),
                            folder=f"folder {one}") for one in "ab"]  # fmt: skip
    later = SimpleNamespace(load=lambda: "another seed", label="label of another")
    for run in runs:
        run.head = lambda: {"provenance": {"seed": 7}}
        run.replication = 0
    results = SimpleNamespace(
        rows=rows, runs=runs, name="title", of=lambda row: [runs[rows.index(row)], later]
    )
    loads = []
    patches = {
        "plots": Plots(), "shown": lambda figure, still: (figure, still),
        "num_gpus": lambda run: f"gpus of {run.label}",
        "shown_load": lambda some, rate: loads.append(rate) or (list(some[1:]), "at 3"),
        "good_requests_per_usd": lambda results, some: ("good", *some),
    }  # fmt: skip
    for key, value in patches.items():
        monkeypatch.setattr(accessor, key, value)
    monkeypatch.setattr(Plots, "curve_name", lambda self, row: f"curve of {row.name}",
                        raising=False)  # fmt: skip
    plot = accessor.Plots(results)
    plot = plot.matplotlib if still else plot
    two, title, first = ("ttft", "tpot"), "title at 3", "title (set, seed 7, first of 2)"
    for shown, told in [
        (plot.throughput_against_p99(), ("throughput_against_p99", rows, "title", two, None)),
        (
            plot.throughput_against_p99(("a", "b"), ["x"]),
            ("throughput_against_p99", rows, "title", ("a", "b"), ["x"]),
        ),
        (
            plot.latency_against_rate(("a", "b"), ["x"]),
            ("latency_against_rate", rows, "title", ("a", "b"), ["x"]),
        ),
        (
            plot.attainment_against_rate("m", 0.5, ["x"]),
            ("attainment_against_rate", rows, "title", "m", 0.5, ["x"]),
        ),
        (plot.pareto("p", "q"), ("pareto", rows, "title", "p", "q")),
        (
            plot.gpu_frontier(),
            ("gpu_frontier", rows, "title", ["gpus of label a", "gpus of label b"]),
        ),
        (plot.lines(x="p", by=["q"]), ("lines", rows, "title", ("p99_ttft_ms",), "p", ["q"])),
        (plot.lines("m"), ("lines", rows, "title", ("m",), None, ())),
        (plot.heat_map(["m"], 2.0), ("heat_map", rows[1:], title, ["m"])),
        (plot.latency_cdf("m", 3.0), ("latency_cdf", {"curve of b": "b"}, first, "m")),
        (
            plot.predictability(),
            ("predictability", {f"label {one}": [one, "another seed"] for one in "ab"}, "title"),
        ),
        (plot.time_series(), ("time_series", "a", "label a")),
        (plot.time_series("label b"), ("time_series", "b", "label b")),
        (plot.gantt("label b"), ("gantt", "b", "label b")),
        (
            plot.batching(),
            ("batching", {"curve of a": "a", "curve of b": "b"}, "title, seed 7, first of 2"),
        ),
        (plot.engines_over_time("label b"), ("engines_over_time", "b", "label b")),
        (plot.engine_shares("label b"), ("engine_shares", "all of b", "label b")),
        (plot.transfers("label b"), ("transfers", "b", "label b")),
        (plot.goodput_per_dollar(4.0), ("goodput_per_dollar", ("good", rows[1]), title)),
    ]:
        assert shown == (told, still)
    assert loads == [2.0, 3.0, 4.0]
    with pytest.raises(SpecError, match="no setting is called 'label c' here; did you mean lab"):
        plot.gantt("label c")
    monkeypatch.setattr("schedlab.experiments.specification.loading.load_spec", str)
    monkeypatch.setattr("schedlab.experiments.analysis.latencies.alone_s", "alone by {}".format)
    runs[0].folder, runs[1].folder = Path("first"), Path("second")
    told = "slowdown_against_length", {"curve of b": "b"}, "alone by second/spec.yaml", first
    assert plot.slowdown_against_length(5.0) == (told, still)
    assert loads[-1] == 5.0


@pytest.mark.parametrize(
    ("asked", "names", "title"),
    [
        (Chosen(), ["all of them"], "own"),
        (Chosen(title="t"), ["all of them"], "t"),
        (Chosen(metrics=["m"]), ["lines"], "own"),
        (Chosen(x="x"), ["lines"], "own"),
        (Chosen(by=["k"]), ["lines"], "own"),
        (Chosen(figures=["pareto", "cdf"], metrics=["m"], title="t"), ["pareto", "cdf"], "t"),
    ],
)
def test_figures_of_a_sweep_are_all_those_that_fit_or_what_the_options_ask_for(
    monkeypatch, asked, names, title
):
    seen = []
    monkeypatch.setattr(chosen_figures, "search_drawings", lambda folder, title: [])
    monkeypatch.setattr(chosen_figures, "read_results", lambda folder: folder)
    monkeypatch.setattr(chosen_figures, "merged", lambda some: SimpleNamespace(of=some))
    monkeypatch.setattr(chosen_figures, "filtered", lambda results, wanted: results)
    monkeypatch.setattr(
        chosen_figures,
        "relabelled",
        lambda results, names: SimpleNamespace(name="own", **vars(results)),
    )
    monkeypatch.setattr(
        chosen_figures, "drawings", lambda results, title: seen.append(title) or ["all of them"]
    )
    monkeypatch.setattr(
        chosen_figures, "_bound",
        lambda draw, results, title, chosen: seen.append(title) or (draw, results.of),
    )  # fmt: skip
    found = chosen_figures._drawings(["one", "two"], asked)
    assert set(seen) == {title}
    if names == ["all of them"]:
        assert found == names
        return
    assert [one.name for one in found] == names
    for one in found:
        assert one.draw == (FIGURES[one.name].draw, ["one", "two"])
        assert one.caption == FIGURES[one.name].caption


def rows_of(*settings, **metrics):
    """Return a row a setting, the nth of n times the metrics."""
    return [
        Row(
            str(n), one["policy"], one, 1,
            {key: Estimate(value * n, None) for key, value in metrics.items()},
        )
        for n, one in enumerate(settings, 1)
    ]  # fmt: skip


RATES = [
    {"policy": policy, "workload.request_rate": rate}
    for policy in ("fcfs", "sjf") for rate in ("1", "2")
]  # fmt: skip
MEASURED = {
    "p99_ttft_ms": 10.0, "p99_tpot_ms": 5.0, "median_tpot_ms": 3.0, "slo_attainment": 0.1,
    "request_throughput": 1.0, "mean_e2el_ms": 2.0, "output_throughput": 3.0,
}  # fmt: skip
OVER_RATES = ["throughput_p99", "latency_rate"]
CDFS = ["ttft_cdf", "e2el_cdf"]


@pytest.mark.parametrize(
    ("settings", "metrics", "names"),
    [
        (RATES, {}, [*OVER_RATES, "slo_attainment", "pareto", "gpu_frontier", "heat_map", *CDFS]),
        (RATES, {"slo_attainment": math.nan},
         [*OVER_RATES, "pareto", "gpu_frontier", "heat_map", *CDFS]),
        (RATES, {"median_tpot_ms": 0.0},
         [*OVER_RATES, "slo_attainment", "pareto", "heat_map", *CDFS]),
        (RATES, {"p99_ttft_ms": math.nan},
         [*OVER_RATES, "slo_attainment", "gpu_frontier", "heat_map"]),
        (RATES, {"p99_tpot_ms": math.nan},
         [*OVER_RATES, "slo_attainment", "pareto", "gpu_frontier", "heat_map", *CDFS]),
        ([{"policy": "fcfs"}, {"policy": "sjf"}], {}, ["pareto", "heat_map", *CDFS]),
        ([{"policy": "fcfs"}], {}, [*CDFS, "time_series", "gantt"]),
        ([{"policy": "rejects"}], {}, ["time_series", "gantt"]),
    ],
)  # fmt: skip
def test_figures_that_suit_results_are_those_that_have_something_to_show(
    monkeypatch, settings, metrics, names
):
    rows = rows_of(*settings, **{**MEASURED, **metrics})
    runs = {row.label: SimpleNamespace(load=lambda row=row: SimpleNamespace(
        policy=row.policy, engines=(), requests={
            "first_scheduled_ns": np.array([0]),
            "status": np.array([REJECTED if row.policy == "rejects" else FINISHED]),
        }
    )) for row in rows}  # fmt: skip
    results = SimpleNamespace(
        rows=rows, runs=[*runs.values()], of=lambda row: [runs[row.label]], name="n"
    )
    monkeypatch.setattr(figures, "fleet_drawings", lambda results: [])
    assert [one.name for one in figures.drawings(results)] == names


SHORT = {
    "policy": "policy", "engine.max_num_seqs": "engine.max_num_seqs",
    "max_num_seqs": "engine.max_num_seqs", "num_seqs": None, "seqs": None, "seed": None,
    "rate": ["workload.rate", "arrivals.rate"], "workload.rate": "workload.rate",
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_key_is_called_by_all_of_it_or_by_whole_words_of_its_end(name):
    keys = ("engine.max_num_seqs", "workload.rate", "arrivals.rate")
    rows = [Row("", "", {key: ""}, 1, {}) for key in (*keys, keys[0])]
    if isinstance(SHORT[name], str):
        assert swept_key(rows, name) == SHORT[name]
    else:
        said = "no key" if SHORT[name] is None else f"may be {' or '.join(SHORT[name])}: write"
        with pytest.raises(SpecError, match=said):
            swept_key(rows, name)


def folders_of(tmp_path, number):
    """Two results, with what each part of them says of its own."""
    for one in range(number):
        folder = tmp_path / f"place{one}" / "run"
        rows, runs = [], []
        for policy in ("fcfs", "sjf"):
            place = folder / policy
            place.mkdir(parents=True)
            spec = {"engine": {"block_size": 10 + one}, "seed": 0 if one else None}
            head = {"schedlab": {"schema": 1, "provenance": {"spec": spec}}}
            (place / "result.json").write_text(json.dumps(head))
            settings = {"policy": policy} | ({"seed": "7"} if one == 0 else {})
            rows.append(Row(policy, policy, settings, 1, {}))
            runs.append(PointMetrics(policy, settings, 0, policy, {"a": one}, folder=place))
        yield SavedResults(
            folder, f"name{one % 2}", rows, runs,
            [{"name": "both"}, {"name": f"model{one}"}], ["p", f"p{one}"], [f"w{one}", "w"],
        )  # fmt: skip


def test_several_results_are_one_that_lies_with_the_first_and_keeps_what_each_row_is_of(tmp_path):
    several = list(folders_of(tmp_path, 3))
    both = merged(several)
    assert (both.folder, both.name) == (several[0].folder, "name0 and name1")
    assert both.predictors == ["p", "p0", "p1", "p2"]
    assert both.warnings == ["w0", "w", "w1", "w2"]
    assert [one["name"] for one in both.cost_models] == ["both", "model0", "model1", "model2"]
    expected = [
        (f"place{i}/run: {policy}", policy,
         {"folder": f"place{i}/run", "policy": policy, "seed": "7" if i == 0 else "0"})
        for i in range(3) for policy in ("fcfs", "sjf")
    ]  # fmt: skip
    assert [(row.label, row.policy, row.settings) for row in both.rows] == expected
    assert [(run.label, run.policy, run.settings) for run in both.runs] == expected
    assert [run.metrics["a"] for run in both.runs] == [0, 0, 1, 1, 2, 2]
    assert merged(several[1:2]) is several[1]
    with pytest.raises(SpecError, match="run is named twice"):
        merged([several[0], several[0]])


def test_filter_keeps_rows_and_runs_that_have_one_of_the_values_of_every_key(tmp_path):
    both = merged(list(folders_of(tmp_path, 3)))
    for wanted, places in (
        ({"policy": ["sjf"]}, [1, 3, 5]), ({"seed": ["0"]}, [2, 3, 4, 5]),
        ({"policy": ["sjf"], "seed": ["7"]}, [1]), ({"policy": ["sjf", "fcfs"]}, range(6)),
        ({"folder": ["place2/run", "place0/run"], "policy": ["fcfs"]}, [0, 4]),
    ):  # fmt: skip
        some = filtered(both, wanted)
        assert some.rows == [both.rows[i] for i in places]
        assert some.runs == [both.runs[i] for i in places]
    for wanted, said in (
        ({"polcy": ["sjf"]}, "no key 'polcy' is swept here; did you mean policy"),
        ({"policy": ["fcfs", "sfj"]}, "no setting has policy=sfj; did you mean sjf"),
    ):
        with pytest.raises(SpecError, match=said):
            filtered(both, wanted)


def test_distribution_is_of_one_latency_by_its_short_name():
    for metrics in (["ttft", "tpot"], ["ttft", "tpot", "itl"], ["p99_ttft_ms"]):
        with pytest.raises(SpecError, match="cdf takes one --metric"):
            chosen_figures._cdf(None, "", Chosen(metrics=metrics))
