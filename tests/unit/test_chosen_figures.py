"""Figures by name, of what was asked for: names, filters, axes, several folders, sizes, formats."""

import json

import pytest

import schedlab as sl
from schedlab.experiments.figures import plots
from schedlab.experiments.figures.chosen import FIGURES, Chosen, draw_chosen
from schedlab.experiments.figures.lines import lines
from schedlab.experiments.figures.searches import answers, tried, tuned
from schedlab.experiments.figures.style import SIZES, new_figure, paper
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import read_results
from schedlab.experiments.results.selection import filtered, merged, num_gpus, relabelled
from schedlab.sim.errors import SchedlabError, SpecError

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
    head = {"schedlab": {"provenance": {"spec": spec}}}
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
    head = {"schedlab": {"provenance": {"spec": spec}}}
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
        (Chosen(["latency_rate"], ["p99_ttft_ms"]), "takes no --metric"),
        (Chosen(["gantt"]), "shows one run"),
        (Chosen(["cdf"], ["p99_ttft_ms"]), "one --metric"),
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
