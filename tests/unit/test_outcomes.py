"""Frames of outcomes, row by row, around stand-ins with every field another."""

import math
import sys
from collections import UserList
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedlab.experiments.outcomes import Comparison, Findings, Measurement, Results
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.experiments.statistics import Change
from schedlab.sim.errors import SpecError


class Frame(UserList):
    """Rows of a pandas.DataFrame: given as rows or as columns, in the order of its columns."""

    def __init__(self, given=()):
        if isinstance(given, dict):
            given = [
                dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)
            ]
        super().__init__(given)

    def insert(self, place, name, value):
        for i, row in enumerate(self.data):
            pairs = list(row.items())
            self.data[i] = dict([*pairs[:place], (name, value), *pairs[place:]])


@pytest.fixture(autouse=True)
def pandas(monkeypatch):
    def concat(frames, ignore_index):
        assert ignore_index
        return Frame([row for frame in frames for row in frame])

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame, concat=concat))


def point(i, policy, settings, replication):
    """Stand in for a saved run: every number is one of this run."""
    run = SimpleNamespace(
        requests={"id": [0, 1], "finish_ns": [10 * i, 10 * i + 1]},
        log=SimpleNamespace(steps=lambda: {"end_ns": [100 * i], "num_decodes": [100 * i + 1]}),
    )
    metrics = {"p99_ttft_ms": 0.5 + i}
    return SimpleNamespace(
        policy=policy, settings=settings, replication=replication, metrics=metrics, load=lambda: run
    )


# Neither by policy, nor by setting, nor by replication in any order but this.
POINTS = [
    point(1, "vtc", {"rate": "2"}, 1),
    point(2, "vtc", {"rate": "2"}, 0),
    point(3, "fcfs", {"rate": "9"}, 0),
    point(4, "fcfs", {"rate": "high"}, 3),
]
KEYS = [
    {"policy": "vtc", "rate": 2.0, "replication": 1},
    {"policy": "vtc", "rate": 2.0, "replication": 0},
    {"policy": "fcfs", "rate": 9.0, "replication": 0},
    {"policy": "fcfs", "rate": "high", "replication": 3},
]
ROWS = [
    Row("b", "vtc", {"rate": "2"}, 2, {"x": Estimate(1.5, 0.25), "y": Estimate(7.0, None)}),
    Row("a", "fcfs", {"rate": "high"}, 1, {"x": Estimate(3.5, None)}),
]


def results():
    saved = SimpleNamespace(name="many", folder=Path("there"), runs=POINTS, rows=ROWS)
    return Results(saved)


def columns(frame):
    return [list(row.items()) for row in frame]


def test_frame_of_settings_has_a_row_each_in_their_order_with_intervals_of_several_seeds():
    assert columns(results().to_frame()) == [
        [
            ("label", "b"), ("policy", "vtc"), ("rate", 2.0),
            ("x", 1.5), ("x_ci95", 0.25), ("y", 7.0), ("y_ci95", None),
        ],
        [("label", "a"), ("policy", "fcfs"), ("rate", "high"), ("x", 3.5)],
    ]  # fmt: skip


def test_frame_of_runs_has_settings_and_metrics_of_the_same_run():
    assert columns(results().to_frame("runs")) == [
        [*key.items(), ("p99_ttft_ms", 0.5 + i)] for i, key in enumerate(KEYS, 1)
    ]


def test_frames_of_requests_and_steps_begin_with_the_settings_of_their_run():
    assert columns(results().to_frame("requests")) == [
        [*key.items(), ("id", j), ("finish_ns", 10 * i + j)]
        for i, key in enumerate(KEYS, 1)
        for j in (0, 1)
    ]
    assert columns(results().to_frame("steps")) == [
        [*key.items(), ("end_ns", 100 * i), ("num_decodes", 100 * i + 1)]
        for i, key in enumerate(KEYS, 1)
    ]
    with pytest.raises(SpecError, match="choose from settings, runs, requests, steps"):
        results().to_frame("setting")


def test_results_give_the_first_run_and_all_of_them_in_order():
    one = results()
    assert (one.name, one.folder, one.rows) == ("many", Path("there"), ROWS)
    assert one.run is POINTS[0].load()
    assert one.runs == [point.load() for point in POINTS]
    assert one.run is one.runs[0]


def test_frontier_keeps_rows_that_no_other_is_better_than_in_both_directions():
    def row(label, ttft_ms, throughput):
        metrics = {"p99_ttft_ms": ttft_ms, "request_throughput": throughput}
        return Row(label, label, {}, 1, {k: Estimate(v, None) for k, v in metrics.items()})

    rows = [row("worse", 3.0, 1.0), row("fast", 1.0, 2.0), row("much", 2.0, 5.0)]
    one = Results(SimpleNamespace(rows=rows))
    assert [r.label for r in one.frontier("p99_ttft_ms", "request_throughput")] == ["fast", "much"]
    assert [r.label for r in one.frontier("p99_ttft_ms")] == ["fast"]
    assert [r.label for r in one.frontier("request_throughput")] == ["much"]
    with pytest.raises(SpecError, match="num_steps is neither"):
        one.frontier("p99_ttft_ms", "num_steps")


def test_frame_of_verdicts_has_the_means_of_both_and_the_change_between_them():
    def verdict(i):
        change = Change(i + 0.1, i + 0.2, i + 0.3, i + 0.4, i + 5, i + 0.8)
        return SimpleNamespace(
            setting=f"s{i}", metric=f"m{i}", of=f"o{i}", against=f"a{i}",
            means=(i + 0.6, i + 0.7), change=change, verdict=f"v{i}",
        )  # fmt: skip

    compared = Comparison([verdict(20), verdict(10)], ["one that failed"])
    assert columns(compared.to_frame()) == [
        [
            ("setting", f"s{i}"), ("metric", f"m{i}"), ("of", f"o{i}"), ("against", f"a{i}"),
            ("mean", i + 0.6), ("mean_against", i + 0.7), ("change", i + 0.1), ("low", i + 0.2),
            ("high", i + 0.3), ("effect_size", i + 0.4), ("num_pairs", i + 5),
            ("p_value", i + 0.8), ("verdict", f"v{i}"),
        ]
        for i in (20, 10)
    ]  # fmt: skip
    assert (len(compared), [one.of for one in compared]) == (2, ["o20", "o10"])
    assert repr(compared).splitlines()[-1] == "left out: one that failed"


def test_frame_of_answers_counts_the_seeds_of_each_setting_from_zero():
    def bracket(i):
        return SimpleNamespace(value=float(i), breaks_at=i + 0.5)

    found = [
        SimpleNamespace(label="b", bound="", brackets=[bracket(7), bracket(3)]),
        SimpleNamespace(label="a", bound="at least", brackets=[bracket(5)]),
        SimpleNamespace(label="none", bound="", brackets=[]),
    ]
    asked = SimpleNamespace(find=SimpleNamespace(key="workload.request_rate"))
    key, frame = "workload.request_rate", Findings(asked, found, []).to_frame()
    assert columns(frame) == [
        [("setting", s), ("replication", i), ("bound", bound), (key, v), ("breaks_at", v + 0.5)]
        for s, i, bound, v in (("b", 0, None, 7), ("b", 1, None, 3), ("a", 0, "at least", 5))
    ]


def test_measurement_tells_each_metric_of_each_point_and_signs_errors():
    def measured(i):
        return {
            "label": f"l{i}", "policy": f"p{i}", "load": f"r{i}",
            "decisions": {"same_step_times": f"{i} of 9", "other": "no"},
            "cost_error_by_step": {"mape": i / 100, "bias": -i / 200},
            "metrics": [
                {"metric": "p99_ttft_ms", "error": i / 50, "measured": i},
                {"metric": "mean_e2el_ms", "error": None, "measured": math.nan},
            ],
        }  # fmt: skip

    ranking = {"r1": {"p99_ttft_ms": 0.5}}
    points = [measured(8), measured(4)]
    data = {"name": "m", "points": points, "rank_agreement_kendall_tau": ranking}
    one = Measurement(data)
    assert (one.name, one.points, one.ranking) == ("m", points, ranking)
    told = [list(row.values())[:5] for row in one.to_frame()]
    assert told[:2] == [
        ["l8", "p8", "r8", "p99_ttft_ms", 0.16],
        ["l8", "p8", "r8", "mean_e2el_ms", None],
    ]
    assert len(told) == 4
    *_, first, second, _, note = (line.split() for line in repr(one).splitlines())
    assert first == ["l8", "8", "of", "9", "8.0%", "-4.0%", "-", "-", "+16.0%", "-", "-"]
    assert second == ["l4", "4", "of", "9", "4.0%", "-2.0%", "-", "-", "+8.0%", "-", "-"]
    assert note[0] == "errors:"
