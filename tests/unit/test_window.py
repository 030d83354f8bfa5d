"""Warm-up and cool-down: which requests count, which rates, and that a file remembers it."""

import numpy as np
import pytest

from schedlab.experiments.results.tables import warnings
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.window import Window, measured_window
from schedlab.sim.result import RunResult

WORKLOAD = {"trace": "azure-conv", "num_requests": 300, "request_rate": 3.0}


def measured(measure, **keys):
    return run(
        make_spec({"workload": WORKLOAD, "slo": {"ttft_ms": 200}, "measure": measure, **keys})
    )


def test_window_cuts_both_ends_by_hand():
    requests = {
        "arrival_ns": np.array([1, 2, 3, 9, 10]) * 10**9,
        "finish_ns": np.array([4, 5, 6, 12, 20]) * 10**9,
    }
    window = measured_window(requests, warm_up_s=1.5, cool_down_s=1.0)
    assert window == Window(2_500_000_000, 9_000_000_000)
    assert measured_window(requests, warm_up_requests=2).begin_ns == 3 * 10**9
    assert measured_window(requests).end_ns == 20 * 10**9 + 1


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ({"warm_up_s": 10}, "nothing is left: requests arrive for 9 s only"),
        ({"warm_up_s": 5, "cool_down_s": 5}, "nothing is left"),
        ({"warm_up_requests": 2}, "2 of 2 requests leaves nothing"),
    ],
)
def test_window_that_leaves_nothing_raises(cut, message):
    requests = {"arrival_ns": np.array([0, 9]) * 10**9, "finish_ns": np.array([1, 10]) * 10**9}
    with pytest.raises(SpecError, match=message):
        measured_window(requests, **cut)


def test_metrics_are_of_the_requests_that_arrive_inside_and_of_what_happens_inside():
    whole, part = measured(None), measured({"warm_up_s": 20, "cool_down_s": 30})
    rows, window = whole.requests, part.window
    inside = window.holds(rows["arrival_ns"])
    metrics = part.metrics()
    assert 0 < inside.sum() < 300
    assert metrics["num_requests"] == metrics["completed"] == inside.sum()
    ttft = (rows["first_token_ns"] - rows["arrival_ns"])[inside] / 1e6
    assert metrics["mean_ttft_ms"] == pytest.approx(ttft.mean(), rel=1e-12)
    assert metrics["slo_attainment"] == (ttft <= 200).mean()
    finished = window.holds(rows["finish_ns"])
    assert metrics["duration_s"] == window.duration_s
    assert metrics["request_throughput"] == finished.sum() / window.duration_s
    times, counts = whole.log.token_counts()
    tokens = counts[window.holds(times)].sum()
    assert metrics["output_throughput"] == tokens / window.duration_s
    gaps = np.concatenate([np.diff(whole.log.token_times(i)) for i in rows["id"][inside]]) / 1e6
    assert metrics["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99), rel=1e-12)
    assert metrics["mean_itl_ms"] == pytest.approx(gaps.mean(), rel=1e-9)
    starts = whole.log.steps()["start_ns"]
    assert metrics["num_steps"] == window.holds(starts).sum()


def test_window_of_the_whole_run_changes_nothing_but_its_name():
    whole, part = measured(None).metrics(), measured({}).metrics()
    assert part == pytest.approx(whole, rel=1e-9, nan_ok=True)


def test_window_survives_saving_and_is_told(tmp_path):
    part = measured({"warm_up_requests": 50})
    part.save(tmp_path)
    loaded = RunResult.load(tmp_path)
    assert loaded.window == part.window
    assert loaded.metrics() == pytest.approx(part.metrics(), rel=1e-12, nan_ok=True)
    assert len(loaded.requests["id"]) == 300
    (line,) = warnings(part)
    assert "250 of 300 requests arrived then" in line
    (only,) = loaded.metrics_by("priority").values()
    assert only["num_requests"] == 250


def test_both_warm_ups_raise():
    with pytest.raises(SpecError, match="warm_up_s or warm_up_requests"):
        measured({"warm_up_s": 1, "warm_up_requests": 1})
