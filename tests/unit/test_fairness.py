"""Fairness and starvation by hand, and classes that add up to the whole."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from schedlab.experiments.analysis import by_class
from schedlab.experiments.analysis.by_class import class_rows
from schedlab.experiments.commands.app import app
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.statistics import Estimate, with_interval
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.fairness import jain_index
from schedlab.sim.record.columns import FINISHED, REJECTED, TRUNCATED
from schedlab.sim.result import RunResult


@pytest.mark.parametrize(
    ("shares", "index"), [([3, 3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42)]
)
def test_jain_index_by_hand(shares, index):
    assert jain_index(shares) == pytest.approx(index)


def test_jain_index_of_nothing_is_nan():
    assert np.isnan(jain_index([0.0, 0.0]))


def result(**columns):
    rows = {name: np.array(values) for name, values in columns.items()}
    return RunResult("r", "fcfs", rows, log=None, kv_capacity_tokens=1)


def test_stay_of_no_time_counts_as_one_of_a_nanosecond():
    same = result(
        arrival_ns=[7, 7], finish_ns=[7, 8], generated_tokens=[3, 3], status=[FINISHED] * 2
    )
    assert same.metric("jain_fairness") == 1.0


def test_jain_fairness_compares_speeds_not_times():
    s = 10**9
    even = result(
        arrival_ns=[0, 0, 5 * s], finish_ns=[10 * s, 20 * s, 6 * s], generated_tokens=[10, 20, 1],
        status=[FINISHED] * 3, priority=[0, 0, 1],
    )  # fmt: skip
    assert even.metric("jain_fairness") == pytest.approx(1.0)
    half = result(
        arrival_ns=[0, 0], finish_ns=[10 * s, -1], generated_tokens=[10, 3],
        status=[FINISHED, REJECTED], priority=[0, 1],
    )  # fmt: skip
    assert half.metric("jain_fairness") == pytest.approx(0.5)
    assert half.metric("jain_fairness(column=priority)") == pytest.approx(0.5)
    with pytest.raises(SpecError, match="did you mean priority"):
        half.metric("jain_fairness", column="prioritty")


def test_longest_wait_does_not_count_who_was_turned_away():
    s = 10**9
    rows = {
        "arrival_ns": np.array([0, s, 2 * s]),
        "first_scheduled_ns": np.array([4 * s, 9 * s, -1]),
        "first_token_ns": np.array([5 * s, 10 * s, -1]),
        "finish_ns": np.array([6 * s, 12 * s, -1]),
        "generated_tokens": np.array([2, 2, 0]),
        "status": np.array([FINISHED, TRUNCATED, REJECTED]),
    }
    assert result(**rows).metric("longest_wait") == 8.0
    nobody = result(**{**rows, "status": np.full(3, REJECTED)})
    assert np.isnan(nobody.metric("longest_wait"))


def test_classes_of_requests_with_and_without_a_target_are_two(tmp_path, recwarn):
    classes = {"a": {"share": 1, "slo": {"ttft_ms": 100}}, "b": {"share": 1}}
    spec = make_spec({"workload": {
        "num_requests": 20, "request_rate": 20, "prompt_tokens": 50, "output_tokens": 5,
        "classes": classes,
    }})  # fmt: skip
    run(spec).save(tmp_path)
    by_target = {row.name: row.metrics for row in class_rows(tmp_path, "slo_ttft_ms")}
    by_tenant = {row.name: row.metrics for row in class_rows(tmp_path, "tenant")}
    assert list(by_target) == ["100", "none", "all"]
    assert str(by_target["none"]) == str(by_tenant["b"])  # with NaN for what nobody has
    jain = by_target["all"]["jain_fairness"].mean
    assert jain == by_tenant["all"]["jain_fairness"].mean == pytest.approx(1.0, abs=0.2)
    assert not [w for w in recwarn if w.category is RuntimeWarning]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of priority, on a server that is too small."""
    path = tmp_path_factory.mktemp("classes")
    arrivals = np.arange(60) * 0.05
    lines = ["arrival_s,prompt_tokens,output_tokens,priority"]
    lines += [f"{arrivals[i]:.2f},400,40,{i % 3 == 0:d}" for i in range(60)]
    (path / "t.csv").write_text("\n".join(lines) + "\n")
    spec = make_spec(
        {
            "workload": {"trace": str(path / "t.csv")},
            "policy": "priority",
            "engine": {"max_num_seqs": 4},
            "slo": {"ttft_ms": 1000, "tpot_ms": 50},
        }
    )
    done = run(spec)
    (path / "out").mkdir()
    done.save(path / "out")
    return path / "out"


def test_classes_add_up_to_the_whole(folder):
    *classes, whole = class_rows(folder)
    assert [row.name for row in classes] == ["0", "1"]
    for name in ("num_requests", "request_goodput"):
        total = sum(row.metrics[name].mean for row in classes)
        assert total == pytest.approx(whole.metrics[name].mean)
    urgent, patient = (row.metrics["ttft_slo_attainment"].mean for row in classes)
    assert urgent > patient
    assert whole.metrics["longest_wait"].mean == classes[1].metrics["longest_wait"].mean
    assert 0.5 < whole.metrics["jain_fairness"].mean < 1.0


def test_by_class_command_prints_a_row_a_class(folder):
    done = CliRunner().invoke(app, ["by-class", str(folder)])
    assert done.exit_code == 0, done.output
    assert "TTFT met" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.split()[:1] == ["-"]] == [
        "0", "1", "all"
    ]  # fmt: skip
    wrong = CliRunner().invoke(app, ["by-class", str(folder), "--column", "prioritty"])
    assert wrong.exit_code == 2
    assert "did you mean priority" in wrong.output


def test_table_of_classes_is_headed_by_its_metrics_and_leaves_out_what_nobody_has(monkeypatch):
    names = {"a": "num_requests", "b(x=1)": "own(x=1)", "c": "p99_ttft_ms", "d": "longest_wait"}
    metrics = {
        "num_requests": Estimate(3.0, None),
        "own(x=1)": Estimate(4.0, 0.5),
        "p99_ttft_ms": Estimate(math.nan, None),
    }
    rows = [by_class.ClassRow("", "gold", metrics), by_class.ClassRow("k=2", "all", metrics)]
    asked = []
    monkeypatch.setattr(by_class, "class_rows", lambda *given: asked.append(given) or rows)
    monkeypatch.setattr(
        by_class, "metric_named", lambda name: SimpleNamespace(name=names.get(name, name))
    )
    header, lines = by_class.class_table(Path("here"), "plan", tuple(names))
    assert asked == [(Path("here"), "plan", tuple(names))]
    assert header == ["setting", "plan", "requests", "own(x=1)"]
    cells = [with_interval(3.0, None), with_interval(4.0, 0.5)]
    assert lines == [["-", "gold", *cells], ["k=2", "all", *cells]]
    assert by_class.class_table(Path("here"))[0] == ["setting", "class", "requests"]
