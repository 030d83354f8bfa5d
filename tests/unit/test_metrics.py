"""Every metric of a three-request run, computed by hand."""

import json
import math

import numpy as np
import pytest

from schedlab.sim.metrics.registry import every_run, metric_named
from schedlab.sim.result import RunResult
from tests.data_folder import data_folder
from tests.hand_log import HandLog

MS = 1_000_000
NAN = float("nan")

# Times in ms. One token a step where several requests decode together.
#
#   id  arrival  scheduled  tokens at                 prompt  targets (ttft, tpot, e2el)
#   0      0         0      100, 200, 300, 500          10    (100, 150, -)
#   1    100       150      300, 500                    20    (150, -, -)
#   2   1400      1400      1500                        30    (-, 50, 100)
#
#   TTFT: 100, 200, 100.  E2EL: 500, 400, 100.
#   TPOT: (500 - 100)/3 = 133.333, (400 - 200)/1 = 200, none (one token).
#   Gaps: 100, 100, 200 of request 0 and 200 of request 1 -> [100, 100, 200, 200].
#   Queue: 0, 50, 0.  E2EL per token: 125, 200, 100.


def columns(**changes):
    table = {
        "id": [0, 1, 2],
        "arrival_ns": [0, 100 * MS, 1400 * MS],
        "prompt_tokens": [10, 20, 30],
        "output_tokens": [4, 2, 1],
        "generated_tokens": [4, 2, 1],
        "first_scheduled_ns": [0, 150 * MS, 1400 * MS],
        "first_token_ns": [100 * MS, 300 * MS, 1500 * MS],
        "last_token_ns": [500 * MS, 500 * MS, 1500 * MS],
        "finish_ns": [500 * MS, 500 * MS, 1500 * MS],
        "num_preemptions": [0, 2, 0],
        "recomputed_tokens": [0, 35, 0],
        "prefix_hit_tokens": [0, 5, 10],
        "priority": [0, 1, 0],
        "predicted_tokens": [NAN, NAN, NAN],
        "slo_ttft_ms": [100.0, 150.0, NAN],
        "slo_tpot_ms": [150.0, NAN, 50.0],
        "slo_e2el_ms": [NAN, NAN, 100.0],
        "status": np.zeros(3, dtype=np.int8),
    }
    return {name: np.asarray(values) for name, values in {**table, **changes}.items()}


TOKENS_NS = {
    0: [100 * MS, 200 * MS, 300 * MS, 500 * MS],
    1: [300 * MS, 500 * MS],
    2: [1500 * MS],
}


def run_of(requests, tokens_ns=TOKENS_NS, steps_table=None):
    log = HandLog(tokens_ns, steps() if steps_table is None else steps_table)
    return RunResult("three", "fcfs", requests, log, kv_capacity_tokens=100)


def measured(**changes):
    return run_of(columns(**changes)).metrics()


EXPECTED = {
    "num_requests": 3,
    "completed": 3,
    "failed": 0,
    "total_input_tokens": 60,
    "total_output_tokens": 7,
    # First arrival 0, last finish 1.5 s.
    "duration_s": 1.5,
    "request_throughput": 2.0,
    "output_throughput": 7 / 1.5,
    "total_token_throughput": 67 / 1.5,
    # Two gaps in 1.4 s.
    "offered_request_rate": 2 / 1.4,
    "mean_ttft_ms": 400 / 3,
    "median_ttft_ms": 100.0,
    # Deviations -33.3, 66.7, -33.3: variance (1111.1 + 4444.4 + 1111.1)/3 = 2222.2.
    "std_ttft_ms": math.sqrt(20000 / 9),
    "p50_ttft_ms": 100.0,
    # Sorted 100, 100, 200: position 2 * 0.9 = 1.8 -> 100 + 0.8 * 100.
    "p90_ttft_ms": 180.0,
    "p95_ttft_ms": 190.0,
    "p99_ttft_ms": 198.0,
    # Two values: 133.333 and 200.
    "mean_tpot_ms": 500 / 3,
    "median_tpot_ms": 500 / 3,
    "std_tpot_ms": 100 / 3,
    "p90_tpot_ms": 400 / 3 + 0.9 * 200 / 3,
    "p99_tpot_ms": 400 / 3 + 0.99 * 200 / 3,
    "mean_itl_ms": 150.0,
    "median_itl_ms": 150.0,
    "std_itl_ms": 50.0,
    # Position 3 * 0.9 = 2.7, both neighbours 200.
    "p90_itl_ms": 200.0,
    "p50_itl_ms": 150.0,
    "p99_itl_ms": 200.0,
    "mean_e2el_ms": 1000 / 3,
    "median_e2el_ms": 400.0,
    # Deviations 166.7, 66.7, -233.3: (27777.8 + 4444.4 + 54444.4)/3 = 28888.9.
    "std_e2el_ms": math.sqrt(260000 / 9),
    # Sorted 100, 400, 500: position 1.8 -> 400 + 0.8 * 100.
    "p90_e2el_ms": 480.0,
    "p99_e2el_ms": 498.0,
    "mean_queue_time_ms": 50 / 3,
    "median_queue_time_ms": 0.0,
    "mean_normalized_latency_ms": 425 / 3,
    "median_normalized_latency_ms": 125.0,
    # Second 0 holds the tokens at 100, 200, 300, 300, 500, 500.
    "max_output_tokens_per_s": 6.0,
    # Requests 0 and 1 are there in second 0.
    "max_concurrent_requests": 2,
    # Request 0: TTFT 100 <= 100, TPOT 133 <= 150: met. Request 1: TTFT 200 > 150: missed.
    # Request 2: one token, so TPOT 0 <= 50, and E2EL 100 <= 100: met.
    "num_with_slo": 3,
    "num_slo_met": 2,
    "slo_attainment": 2 / 3,
    "ttft_slo_attainment": 1 / 2,
    "tpot_slo_attainment": 1.0,
    "e2el_slo_attainment": 1.0,
    "request_goodput": 2 / 1.5,
    "num_preemptions": 2,
    "num_preempted_requests": 1,
    "recomputed_tokens": 35,
    "prefix_hit_share": 15 / 60,
}


@pytest.mark.parametrize("key", EXPECTED)
def test_metric_of_three_requests_equals_the_hand_computation(key):
    assert measured()[key] == pytest.approx(EXPECTED[key], rel=1e-12)


@pytest.mark.slow
def test_metrics_of_three_requests_hold_every_statistic():
    for name in ("ttft", "tpot", "itl", "e2el", "queue_time", "normalized_latency"):
        for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
            assert f"{statistic}_{name}_ms" in measured()


def test_metrics_leave_rejected_out_of_latency_but_not_of_attainment():
    metrics = measured(
        status=np.array([1, 0, 1], dtype=np.int8),
        finish_ns=np.array([-1, 500 * MS, -1]),
        first_token_ns=np.array([-1, 300 * MS, -1]),
        generated_tokens=np.array([0, 2, 0]),
        slo_ttft_ms=np.array([100.0, 300.0, NAN]),
    )
    assert (metrics["completed"], metrics["rejected"], metrics["failed"]) == (1, 2, 2)
    assert metrics["mean_ttft_ms"] == 200.0
    assert metrics["duration_s"] == 0.5
    assert metrics["total_input_tokens"] == 20
    assert metrics["max_concurrent_requests"] == 1
    # All three have a target; only request 1 (TTFT 200 <= 300) counts as met.
    assert (metrics["num_with_slo"], metrics["num_slo_met"]) == (3, 1)
    assert metrics["ttft_slo_attainment"] == 1 / 2
    assert metrics["e2el_slo_attainment"] == 0.0
    assert metrics["request_goodput"] == 2.0


def test_metrics_count_truncated_requests_as_completed():
    metrics = measured(status=np.array([3, 0, 0], dtype=np.int8))
    assert (metrics["completed"], metrics["truncated"]) == (3, 1)


def test_goodput_without_targets_is_undefined():
    none = np.full(3, NAN)
    metrics = measured(slo_ttft_ms=none, slo_tpot_ms=none, slo_e2el_ms=none)
    assert metrics["num_with_slo"] == 0
    assert math.isnan(metrics["request_goodput"])
    assert math.isnan(metrics["slo_attainment"])


def test_goodput_leaves_requests_without_a_target_out():
    none = np.full(3, NAN)
    metrics = measured(slo_ttft_ms=np.array([100.0, NAN, NAN]), slo_tpot_ms=none, slo_e2el_ms=none)
    assert (metrics["num_with_slo"], metrics["num_slo_met"]) == (1, 1)


def test_most_in_flight_counts_departures_before_arrivals_at_one_instant():
    arrival, finish = np.array([0, 10, 10]), np.array([10, 20, 20])
    changed = {
        "arrival_ns": arrival, "finish_ns": finish, "first_token_ns": finish,
        "first_scheduled_ns": arrival,
    }  # fmt: skip
    assert run_of(columns(**changed)).metric("most_in_flight") == 2
    assert measured(**changed)["max_concurrent_requests"] == 3


def test_concurrency_counts_in_each_second_all_who_are_there_at_any_time_of_it():
    # From the first arrival on: seconds 0, 0 to 1, 1 to 2.
    arrival = np.array([500, 1400, 1600]) * MS
    finish = np.array([600, 1500, 2600]) * MS
    metrics = measured(
        arrival_ns=arrival, finish_ns=finish, first_token_ns=finish, first_scheduled_ns=arrival
    )
    assert metrics["max_concurrent_requests"] == 2  # in second 0, and in second 1


def test_metrics_of_no_requests_are_empty_not_an_error():
    empty = {name: data[:0] for name, data in columns().items()}
    no_steps = {name: data[:0] for name, data in steps().items()}
    metrics = run_of(empty, {}, no_steps).metrics()
    assert (metrics["completed"], metrics["duration_s"]) == (0, 0.0)
    assert (metrics["max_concurrent_requests"], metrics["max_output_tokens_per_s"]) == (0, 0.0)
    assert math.isnan(metrics["mean_itl_ms"])
    assert math.isnan(metrics["p99_ttft_ms"])
    assert math.isnan(metrics["request_throughput"])
    assert (metrics["num_steps"], metrics["max_batch_size"]) == (0, 0)
    assert math.isnan(metrics["kv_utilization"])


def steps():
    # Two steps with a pause: [0, 100) and [150, 450) ns.
    table = {
        "start_ns": [0, 150],
        "end_ns": [100, 450],
        "num_decodes": [1, 2],
        "num_prefills": [1, 0],
        "prefill_tokens": [7, 0],
        "padding_tokens": [0, 2],
        "num_running": [2, 2],
        "num_waiting": [4, 0],
        "kv_tokens": [10, 30],
        "kv_allocated_tokens": [16, 48],
        "kv_reserved_unused_tokens": [0, 8],
        "kv_fragmentation_tokens": [6, 10],
        "num_preempted": [0, 0],
        "recomputed_tokens": [0, 0],
        "prefix_hit_tokens": [0, 0],
        "overhead_ns": [20, 20],
        "swapped_bytes": [0, 5],
    }
    return {name: np.array(values) for name, values in table.items()}


STEP_EXPECTED = {
    "num_steps": 2,
    "busy_s": 400e-9,
    "idle_s": 50e-9,
    "busy_share": 400 / 450,
    "overhead_share": 40 / 400,
    # Weights 1/4 and 3/4.
    "mean_batch_size": 0.25 * 2 + 0.75 * 2,
    "max_batch_size": 2,
    "mean_num_running": 2.0,
    "mean_num_waiting": 1.0,
    "computed_tokens": 12,  # 1 + 7 + 2 and 2 of padding
    "padding_share": 2 / 12,
    "kv_utilization": (0.25 * 10 + 0.75 * 30) / 100,
    "kv_allocated_share": (0.25 * 16 + 0.75 * 48) / 100,
    "max_kv_allocated_share": 0.48,
    "kv_reserved_unused_share": 6 / 40,
    "kv_fragmentation_share": (0.25 * 6 + 0.75 * 10) / 40,
    "swapped_bytes": 5,
}


@pytest.mark.parametrize("key", STEP_EXPECTED)
def test_step_metric_of_two_steps_equals_the_hand_computation(key):
    assert measured()[key] == pytest.approx(STEP_EXPECTED[key], rel=1e-12)


def test_step_metrics_are_all_checked():
    assert {one.name for one in every_run() if one.about == "engine"} == set(STEP_EXPECTED)


# Mean, P50, P90, P95, P99 that vLLM 0.19 itself printed for two real runs of 300 requests.
VLLM_PRINTED = {
    "RTX4090": {
        "ttft": (65456.6, 60110.9, 121121.7, 122739.2, 137356.3),
        "tpot": (32.4, 30.8, 38.1, 48.1, 56.0),
        "e2el": (86578.3, 83413.3, 141600.9, 148977.6, 153627.5),
    },
    "RTXPRO6000": {
        "ttft": (7097.2, 9442.7, 16852.7, 18397.9, 19755.3),
        "tpot": (32.5, 33.4, 36.5, 36.9, 37.3),
        "e2el": (28200.7, 29615.6, 35450.7, 36617.4, 37638.8),
    },
}


@pytest.mark.parametrize("hardware", VLLM_PRINTED)
def test_metrics_of_a_real_vllm_run_are_those_vllm_printed(hardware):
    path = data_folder() / "vllm_ground_truth" / hardware / "Llama-3.1-8B/vllm/requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    start = min(row["queued_ts"] for row in rows)

    def ns(key):
        return np.array([round((row[key] - start) * 1e9) for row in rows])

    none, zero = np.full(len(rows), NAN), np.zeros(len(rows), dtype=np.int64)
    observed = run_of({
        "arrival_ns": ns("queued_ts"),
        "prompt_tokens": np.array([row["input_toks"] for row in rows]),
        "generated_tokens": np.array([row["output_toks"] for row in rows]),
        "first_scheduled_ns": ns("scheduled_ts"),
        "first_token_ns": ns("first_token_ts"),
        "finish_ns": ns("last_token_ts"),
        "num_preemptions": zero, "recomputed_tokens": zero, "status": zero,
        "prefix_hit_tokens": zero,
        "slo_ttft_ms": none, "slo_tpot_ms": none, "slo_e2el_ms": none,
    }).observation()  # fmt: skip
    for name, printed in VLLM_PRINTED[hardware].items():
        statistics = ("mean", "p50", "p90", "p95", "p99")
        ours = [metric_named(f"{s}_{name}_ms").of(observed) for s in statistics]
        assert ours == pytest.approx(printed, abs=0.051)
