"""The comparison of both backends, on a model so small that it takes seconds."""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from schedlab.experiments.analysis.comparison import Compared, rank_agreement  # noqa: E402
from schedlab.experiments.comparing import compare as comparison_module  # noqa: E402
from schedlab.experiments.comparing.compare import (  # noqa: E402
    UnfinishedError,
    agreement,
    compare,
    markdown,
    write,
)
from schedlab.experiments.comparing.measured_runs import MeasuredRuns  # noqa: E402
from schedlab.experiments.specification.loading import make_spec  # noqa: E402
from schedlab.sim.errors import SpecError  # noqa: E402

SPEC = {
    "name": "tiny",
    "model": "schedlab-tiny",
    "hardware": "cpu",
    "engine": {
        "dtype": "fp32", "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "max_model_len": 64, "num_gpu_blocks_override": 12,
    },
    "workload": {
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 40},
        "output_tokens": {"distribution": "uniform", "low": 2, "high": 20},
        "num_requests": 12,
        "request_rate": "inf",
    },
    "real": {"repeats": 2},
    "sweep": {"policy": ["fcfs", "prefill_first", {"name": "static", "max_batch_size": 3}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    keep = tmp_path_factory.mktemp("keep") / "runs"
    spec = make_spec(SPEC)
    told = []
    found = compare(spec, lambda *what: told.append(what), keep=keep)
    return spec, found, told, keep


def test_compare_measures_forwards_then_backwards_and_decides_alike(compared):
    _, found, told, _ = compared
    measuring = [what for _, _, what in told if what.startswith("measuring")]
    assert [what.split()[1] for what in measuring] == [
        "fcfs", "prefill_first", "static", "static", "prefill_first", "fcfs",
    ]  # fmt: skip
    assert [done for done, _, _ in told] == list(range(12))
    assert {total for _, total, _ in told} == {12}
    for point in found:
        assert point.modelled_difference is None
        assert point.steps["num_steps"] == len(point.measured_ns) > 0
        assert (point.measured_ns > 0).all()


def test_compare_reports_error_spread_and_interval_of_every_metric(compared):
    _, found, _, _ = compared
    for point in found:
        rows = {row.metric: row for row in point.rows}
        assert len(rows) == 20
        mean = rows["mean_e2el_ms"]
        assert mean.low <= mean.measured <= mean.high
        assert mean.error == pytest.approx(mean.simulated / mean.measured - 1)
        assert mean.interval is not None
        assert mean.interval[0] <= mean.interval[1]
        # Memory decides who is preempted, not time: all at once, one order, the same count.
        assert rows["num_preemptions"].simulated == rows["num_preemptions"].measured


def test_write_makes_tables_json_and_figures(compared, tmp_path):
    spec, found, _, _ = compared
    write(found, spec, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"comparison.json", "comparison.md", "steps.png", "latency_cdf.png",
            "throughput_p99.png"} <= names  # fmt: skip
    data = json.loads((tmp_path / "comparison.json").read_text())
    assert [point["policy"] for point in data["points"]] == ["fcfs", "prefill_first", "static"]
    assert data["points"][0]["decisions"]["same_step_times"] == "identical"
    metric = data["points"][0]["metrics"][0]
    assert {"measured", "simulated", "error", "spread", "interval"} <= set(metric)
    text = markdown(found, spec)
    assert "Kendall tau" in text
    assert text.count("| request_throughput |") == 3
    assert agreement(found).keys() == {""}


def test_compare_takes_up_the_runs_that_were_kept(compared, monkeypatch):
    spec, found, _, keep = compared

    def no_measuring(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(comparison_module, "_measure", no_measuring)
    again = compare(spec, keep=keep)
    assert [point.rows for point in again] == [point.rows for point in found]
    assert [point.steps for point in again] == [point.steps for point in found]


def test_compare_that_runs_out_of_time_says_how_many_runs_are_left(tmp_path):
    spec = make_spec(SPEC)
    with pytest.raises(UnfinishedError, match="9 runs are left"):
        compare(spec, keep=tmp_path / "runs", max_s=-1.0)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["measurement.json"]


def test_measured_runs_of_another_experiment_are_not_taken(compared):
    _, _, _, keep = compared
    other = make_spec({**SPEC, "seed": 7})
    with pytest.raises(SpecError, match=r"another experiment, device or kernels"):
        compare(other, keep=keep)


def test_measured_runs_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(SpecError, match="something else"):
        MeasuredRuns(tmp_path, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def row(policy, measured, simulated):
    return Compared(
        policy, "p99_ttft_ms", measured, measured, measured, simulated,
        simulated / measured - 1, None,
    )  # fmt: skip


def test_rank_agreement_is_one_for_the_same_order_and_minus_one_for_the_opposite():
    same = [row("a", 1.0, 10.0), row("b", 2.0, 20.0), row("c", 3.0, 30.0)]
    assert rank_agreement(same)["p99_ttft_ms"] == pytest.approx(1.0)
    opposite = [replace(r, simulated=-r.simulated) for r in same]
    assert rank_agreement(opposite)["p99_ttft_ms"] == pytest.approx(-1.0)


def test_compared_holds_within_the_bar_or_inside_the_spread():
    inside = replace(row("a", 100.0, 130.0), low=90.0, high=140.0)
    assert inside.holds(0.05, 0.10)
    assert not row("a", 100.0, 130.0).holds(0.05, 0.10)
    assert row("a", 100.0, 109.0).holds(0.05, 0.10)
