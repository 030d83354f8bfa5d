"""Warm-up and cool-down: which requests count, which rates, and that a file remembers it."""

import math

import numpy as np
import pytest

from schedlab.experiments.analysis.latencies import latencies_s, measured_latencies
from schedlab.experiments.results.tables import warnings
from schedlab.experiments.running import run as running
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.window import Window, measured_window
from schedlab.sim.record.columns import pairs
from schedlab.sim.result import RunResult
from tests import laws
from tests.hand_log import HandLog

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


@pytest.mark.parametrize("nothing", [{}, {"warm_up_s": 0}, {"warm_up_requests": 0}])
def test_window_that_leaves_nothing_out_is_none(nothing):
    whole, same = measured(None), measured(nothing)
    assert same.window is None
    assert repr(same.metrics()) == repr(whole.metrics())  # some are not a number
    assert measured({"cool_down_s": 0}).window is not None


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


@pytest.mark.parametrize(
    ("left_out", "begins_s"), [(0, 1), (1, 2), (2, 7), (3, 7), (4, 7), (5, 9), (6, None)]
)
def test_window_after_requests_that_arrive_together_begins_with_the_next_that_is_later(
    left_out, begins_s
):
    arrival_ns = np.array([1, 2, 2, 2, 7, 9, 9]) * 10**9
    requests = {"arrival_ns": arrival_ns, "finish_ns": arrival_ns + 10**9}
    if begins_s is None:
        with pytest.raises(SpecError, match=r"warm_up_requests: 6 of 7 .* arrive with the last"):
            measured_window(requests, warm_up_requests=left_out)
        return
    window = measured_window(requests, warm_up_requests=left_out)
    assert window.begin_ns == begins_s * 10**9
    assert (~window.holds(arrival_ns)).sum() >= left_out


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({"request_rate": math.inf}, "all requests arrive at once"),
        ({"arrivals": "all_at_once"}, "all requests arrive at once"),
        ({"request_rate": 1.0, "num_requests": 20}, "20 of 20 requests leaves nothing to measure"),
    ],
)
def test_warm_up_that_leaves_no_request_is_refused_at_its_key(workload, said):
    asked = {"prompt_tokens": 9, "output_tokens": 2, "num_requests": 40, **workload}
    with pytest.raises(SpecError, match=rf"^measure\.warm_up_requests: {said}"):
        make_spec({"workload": asked, "measure": {"warm_up_requests": 20}})
    make_spec({"workload": {**asked, "num_requests": 40, "max_concurrency": 4},
               "measure": {"warm_up_requests": 20}})  # fmt: skip


def test_cut_that_leaves_nothing_of_known_arrivals_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(running, "open_backend", None)
    workload = {"prompt_tokens": 9, "output_tokens": 2, "num_requests": 4, "request_rate": 1.0}
    with pytest.raises(SpecError, match="nothing is left: requests arrive for"):
        run(make_spec({"workload": workload, "measure": {"warm_up_s": 1e6}}))


@pytest.mark.slow
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
    times, counts = pairs(whole.log.token_counts())
    tokens = counts[window.holds(times)].sum()
    assert metrics["output_throughput"] == tokens / window.duration_s
    gaps = np.concatenate([np.diff(whole.log.token_times(i)) for i in rows["id"][inside]]) / 1e6
    assert metrics["p99_itl_ms"] == pytest.approx(np.percentile(gaps, 99), rel=1e-12)
    assert metrics["mean_itl_ms"] == pytest.approx(gaps.mean(), rel=1e-9)
    starts = whole.log.steps()["start_ns"]
    assert metrics["num_steps"] == window.holds(starts).sum()


@pytest.mark.slow
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
    first_ns = part.requests["arrival_ns"].min()
    begin_s, end_s = ((at - first_ns) / 1e9 for at in (part.window.begin_ns, part.window.end_ns))
    assert line.startswith(f"measured from {begin_s:.4g} s to {end_s:.4g} s after the first arriv")
    (only,) = loaded.metrics_by("priority").values()
    assert only["num_requests"] == 250


@pytest.mark.parametrize(("seconds", "requests"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_both_warm_ups_raise(seconds, requests):
    with pytest.raises(SpecError, match="warm_up_s or warm_up_requests"):
        measured({"warm_up_s": seconds, "warm_up_requests": requests})


def test_window_is_half_open_its_begin_is_held_and_its_end_is_not():
    assert Window(10, 20).holds(np.array([9, 10, 19, 20])).tolist() == [False, True, True, False]


def test_window_holds_neither_arrivals_nor_departures_nor_steps_nor_tokens_at_its_end():
    s = 10**9
    requests = {
        "id": np.arange(4),
        "arrival_ns": np.array([0, 1, 2, 3]) * s,
        "first_scheduled_ns": np.array([0, 1, 2, 3]) * s,
        "first_token_ns": np.array([1, 2, 3, 4]) * s,
        "finish_ns": np.array([1, 2, 3, 4]) * s,
        "prompt_tokens": np.ones(4, dtype=np.int64),
        "generated_tokens": np.ones(4, dtype=np.int64),
        "status": np.zeros(4, dtype=np.int8),
    }
    steps = {"start_ns": np.arange(4) * s, "end_ns": np.arange(1, 5) * s}
    log = HandLog({i: [(i + 1) * s] for i in range(4)}, steps)
    part = RunResult("part", "fcfs", requests, log, 1, window=Window(1 * s, 3 * s))
    # Requests 1 and 2 arrive inside, 0 and 1 leave inside with a token each; steps 1 and 2 start.
    assert part.metric("num_requests") == 2
    assert part.metric("request_throughput") == 2 / 2
    assert part.metric("output_throughput") == 2 / 2
    assert part.metric("num_steps") == 2


def test_metrics_with_parameters_are_of_the_window_too():
    # They come faster than they are served: the last ones, which are cut off, wait longest.
    workload = {"trace": "azure-conv", "num_requests": 200, "request_rate": 30.0}
    spec = {"workload": workload, "slo": {"ttft_ms": 200}, "measure": {"cool_down_s": 5.0}}
    part = run(make_spec(spec))
    rows, window = part.requests, part.window
    ttft_ms = (rows["first_token_ns"] - rows["arrival_ns"]) / 1e6
    inside = window.holds(rows["arrival_ns"])
    assert 1 < inside.sum() < 200
    assert ttft_ms[inside].max() < ttft_ms.max()
    largest = part.metric("largest(latency=ttft)")
    assert largest == ttft_ms[inside].max()
    assert part.metric("worst_ratio(latency=ttft)") == largest / np.median(ttft_ms[inside])
    gaps_ms = [np.diff(part.log.token_times(i)).max(initial=0) / 1e6 for i in rows["id"][inside]]
    assert part.metric("largest(latency=itl)") == max(gaps_ms)
    assert part.metric("mean_max_waiting") * 1e3 == pytest.approx(
        np.maximum(ttft_ms[inside], gaps_ms).mean()
    )
    assert part.metric("deadline_misses") == (ttft_ms[inside] > 200).mean()
    assert part.metric("finished_within(seconds=1e9)") == inside.sum()
    assert part.metric("preempted_share") == (rows["num_preemptions"][inside] > 0).mean()
    of_class = part.metric("of_class(metric=num_requests, column=prompt_tokens, high=500)")
    assert of_class == (rows["prompt_tokens"][inside] <= 500).sum()


def test_latencies_of_figures_and_comparisons_are_of_the_window_and_stay_in_place():
    part = measured({"warm_up_s": 20, "cool_down_s": 30})
    inside = part.window.holds(part.requests["arrival_ns"])
    ttft_s = latencies_s(part, "ttft")
    assert np.isnan(ttft_s).tolist() == (~inside).tolist()
    assert np.nanmean(ttft_s) * 1e3 == pytest.approx(part.metric("mean_ttft_ms"))
    twice = measured_latencies(part).e2el
    assert np.nanmean(twice) == pytest.approx(part.metric("mean_e2el_ms"))


def test_metrics_of_a_window_without_any_step_are_nothing():
    log = laws.run(registry.make("fcfs"), [laws.arrival(0, 0, 4, 2), laws.arrival(1, 99_000, 4, 2)],
                   EngineConfig(num_blocks=9, max_model_len=9, block_size=4))  # fmt: skip
    result = RunResult("idle", "fcfs", log.requests(), log, 36, window=Window(50_000, 90_000))
    metrics = result.metrics()
    nothing = ("num_steps", "max_batch_size", "swapped_bytes", "computed_tokens", "busy_s")
    assert [metrics[name] for name in nothing] == [0, 0, 0, 0, 0.0]
    assert np.isnan([metrics[name] for name in ("overhead_share", "mean_batch_size")]).all()


def test_metrics_of_targets_are_nothing_where_nobody_has_one_measured_or_not():
    log = laws.run(registry.make("fcfs"), [laws.arrival(i, 900 * i, 4, 2) for i in range(6)],
                   EngineConfig(num_blocks=9, max_model_len=9, block_size=4))  # fmt: skip
    names = ("slo_attainment", "ttft_slo_attainment", "tpot_slo_attainment", "e2el_slo_attainment",
             "request_goodput", "deadline_misses")  # fmt: skip
    for window in (None, Window(1_000, 4_000)):
        result = RunResult("nobody", "fcfs", log.requests(), log, 36, window=window)
        assert result.metric("num_with_slo") == 0
        assert np.isnan([result.metric(name) for name in names]).all(), window
