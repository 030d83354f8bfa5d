"""Measures of small runs, computed by hand."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.measures import MEASURES
from schedlab.sim.metrics.metrics import metric_names

MS = 1_000_000
NAN = float("nan")

# Times in ms. Two requests finish, one is rejected.
#
#   id  arrival  scheduled  tokens at            prompt  priority  targets (ttft, tpot, e2el)
#   0      0        10      100, 200, 300, 700     10       0      (100, 200, -)
#   1    100       150      300, 500               20       1      (-, 150, 450)
#   2    200        -       -                      30       1      (50, -, -)
TOKENS = {0: [100, 200, 300, 700], 1: [300, 500], 2: []}


class Log:
    def token_times(self, request_id):
        return np.array(TOKENS[request_id], dtype=np.int64) * MS

    def token_gaps(self):
        return np.array([100, 400, 200]) * MS, np.array([2, 1, 1])

    def token_counts(self):
        return np.array([100, 200, 300, 500, 700]) * MS, np.array([1, 1, 2, 1, 1])

    def preemptions(self):
        lost = {
            "id": [0, 1],
            "evicted_ns": [320 * MS, 310 * MS],
            "resumed_ns": [620 * MS, 330 * MS],
        }
        return {name: np.array(column) for name, column in lost.items()}

    def steps(self):
        return {
            "start_ns": np.array([0, 100, 150, 200]) * MS,
            "end_ns": np.array([100, 150, 200, 700]) * MS,
            "num_waiting": np.array([9, 1, 2, 3]),
        }


def run_of(**changes):
    requests = {
        "id": [0, 1, 2],
        "arrival_ns": [0, 100 * MS, 200 * MS],
        "prompt_tokens": [10, 20, 30],
        "generated_tokens": [4, 2, 0],
        "first_scheduled_ns": [10 * MS, 150 * MS, -1],
        "first_token_ns": [100 * MS, 300 * MS, -1],
        "finish_ns": [700 * MS, 500 * MS, -1],
        "num_preemptions": [1, 1, 0],
        "recomputed_tokens": [0, 0, 0],
        "prefix_hit_tokens": [0, 0, 0],
        "priority": [0, 1, 1],
        "slo_ttft_ms": [100.0, NAN, 50.0],
        "slo_tpot_ms": [200.0, 150.0, NAN],
        "slo_e2el_ms": [NAN, 450.0, NAN],
        "status": [0, 0, 1],
    }
    metrics = {
        "p99_ttft_ms": 300.0,
        "median_ttft_ms": 150.0,
        "kv_utilization": 0.3,
        "kv_allocated_share": 0.4,
        "num_preempted_requests": 2,
        "num_requests": 3,
        "duration_s": 0.7,
    }
    return SimpleNamespace(
        requests={name: np.asarray(column) for name, column in {**requests, **changes}.items()},
        log=Log(),
        metrics=lambda: metrics,
    )


@pytest.mark.parametrize(
    ("name", "knobs", "expected"),
    [
        ("finished_within", {"seconds": 0.5}, 1),  # request 1, at 500 ms
        ("finished_within", {"seconds": 0.7}, 2),
        ("tokens_within", {"seconds": 0.3}, 4),
        ("time_to_finish", {"num_requests": 1}, 0.5),
        ("time_to_finish", {"num_requests": 2}, 0.7),
        ("largest", {"latency": "itl"}, 400),
        ("largest", {"latency": "ttft"}, 200),
        ("largest", {"latency": "e2el"}, 700),
        ("largest", {"latency": "queue_time"}, 50),
        ("largest", {"latency": "tpot"}, 200),  # (700 - 100) / 3 and (500 - 300) / 1
        ("largest", {"latency": "normalized_latency"}, 200),  # 700 / 4 and 400 / 2
        ("tail_ratio", {"latency": "ttft"}, 2),
        ("mean_max_waiting", {}, (0.4 + 0.2) / 2),  # gap 300 -> 700; TTFT 200 = gap 200
        ("stall_free_goodput", {"ttft_ms": 200, "stall_ms": 200}, 1 / 0.7),  # request 1 only
        ("stall_free_goodput", {"ttft_ms": 200, "stall_ms": 400}, 2 / 0.7),
        ("slot_utilization", {"slots": 4}, 6 / (4 * 5)),
        ("kv_waste", {}, 0.25),
        ("preempted_share", {}, 2 / 3),
        # Above the 99th percentile of E2EL is request 0: 300 ms of the 600 it decoded for.
        ("preemption_loss_at_tail", {"latency": "e2el"}, 0.5),
        # Both decode at 200 ms a token: 320 ms of 600 + 200.
        ("preemption_loss_at_tail", {}, 0.4),
        # Request 0 misses its last token (due at 100 + 3 * 200 = 700: held) - no: it holds all.
        # Request 1 misses its second token (due at 200 + 150 after arrival, came at 400).
        # Request 2 was rejected.
        ("deadline_misses", {}, 2 / 3),
        ("of_class", {"metric": "completed", "column": "priority", "low": 1}, 1),
        ("of_class", {"metric": "mean_ttft_ms", "column": "prompt_tokens", "high": 15}, 100),
    ],
    ids=str,
)
def test_measure_of_a_small_run_is_what_a_pencil_gives(name, knobs, expected):
    assert MEASURES[name](run_of(), **knobs) == pytest.approx(expected)


def test_queue_growth_weighs_steps_by_their_time():
    # In the second half of the arrivals (from 100 ms to 200 ms) the queue is 1, 2 and 3 at 100,
    # 150 and 200 ms: 20 requests a second, whatever the weights.
    assert MEASURES["queue_growth"](run_of()) == pytest.approx(20.0)


def test_service_gap_counts_only_while_both_wait():
    # Tenants A (priority 0) and B (1) have two requests each from 0 s on. Admissions at 1, 2, 3
    # and 4 s in the order A A B B: both wait until 2 s, when A's last is admitted. Until then A has
    # two prompts of 10 and a token at 1.5 s (weight 2), B nothing: 22.
    tokens = {0: [1500], 1: [5000], 2: [5000], 3: [6000]}
    result = SimpleNamespace(
        requests={
            "id": np.arange(4),
            "priority": np.array([0, 0, 1, 1]),
            "arrival_ns": np.zeros(4, dtype=np.int64),
            "first_scheduled_ns": np.array([1000, 2000, 3000, 4000]) * MS,
            "prompt_tokens": np.array([10, 10, 10, 10]),
        },
        log=SimpleNamespace(token_times=lambda i: np.array(tokens[i], dtype=np.int64) * MS),
    )
    assert MEASURES["service_gap"](result) == 22.0
    assert MEASURES["service_gap"](result, input_weight=1.0, output_weight=0.0) == 20.0


def test_service_gap_of_three_tenants_says_that_it_needs_two():
    with pytest.raises(SpecError, match="two tenants, there are 1"):
        MEASURES["service_gap"](run_of(priority=[0, 0, 0]))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("largest", {"latency": "tttft"}, "did you mean ttft"),
        ("tail_ratio", {"latency": "tpt"}, "did you mean tpot"),
        ("explained_by_lengths", {"latency": "e2e"}, "did you mean e2el"),
        ("of_class", {"metric": "mean_ttft_ms", "column": "prio"}, "did you mean priority"),
        ("of_class", {"metric": "mean_tftt_ms", "column": "priority"}, "did you mean mean_ttft_ms"),
        ("preemption_loss_at_tail", {"latency": "itl"}, "tpot or e2el"),
    ],
    ids=str,
)
def test_measure_of_something_unknown_names_what_there_is(name, knobs, message):
    with pytest.raises(SpecError, match=message):
        MEASURES[name](run_of(), **knobs)


def test_worst_ratio_is_the_largest_over_the_median():
    # TTFT of the two that finished: 100 and 200 ms; the run's median is given as 150.
    assert MEASURES["worst_ratio"](run_of(), latency="ttft") == pytest.approx(200 / 150)


@pytest.mark.parametrize(
    ("finish_ms", "expected"),
    [
        # Exactly 10 ms a prompt token and 100 an output token.
        ([300, 500, 500, 700], 1.0),
        # The same, but for one that waited: by lstsq by hand residuals are 25, -25, -25, 25.
        ([300, 500, 500, 800], 1 - 2500 / 127500),
    ],
)
def test_lengths_explain_what_they_explain(finish_ms, expected):
    run = SimpleNamespace(
        requests={
            "arrival_ns": np.zeros(4, dtype=np.int64),
            "finish_ns": np.array(finish_ms, dtype=np.int64) * MS,
            "first_scheduled_ns": np.zeros(4, dtype=np.int64),
            "first_token_ns": np.ones(4, dtype=np.int64),
            "prompt_tokens": np.array([10, 30, 10, 30]),
            "generated_tokens": np.array([2, 2, 4, 4]),
            "status": np.zeros(4, dtype=np.int64),
        }
    )
    found = MEASURES["explained_by_lengths"](run, latency="e2el")
    assert found == pytest.approx(expected)
    assert math.isnan(MEASURES["explained_by_lengths"](run, latency="ttft"))


def test_time_to_finish_more_than_finished_is_nan():
    assert math.isnan(MEASURES["time_to_finish"](run_of(), num_requests=3))


def test_measures_and_metrics_have_different_names_and_are_documented():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    assert not set(MEASURES) & set(metric_names())
    for name, measure in MEASURES.items():
        assert f"`{name}" in page, name
        for knob in list(inspect.signature(measure).parameters)[1:]:
            assert knob in page, (name, knob)
