"""Metrics that take parameters, or that only some want, of small runs: computed by hand."""

import math
from random import Random

import numpy as np
import pytest

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.registry import metric_named, names
from schedlab.sim.result import RunResult
from tests.hand_log import HandLog

MS = 1_000_000
NAN = float("nan")

# Times in ms. Two requests finish, one is rejected.
#
#   id  arrival  scheduled  tokens at            prompt  priority  targets (ttft, tpot, e2el)
#   0      0        10      100, 200, 300, 700     10       0      (100, 200, -)
#   1    100       150      300, 500               20       1      (-, 150, 450)
#   2    200        -       -                      30       1      (50, -, -)
TOKENS_MS = {0: [100, 200, 300, 700], 1: [300, 500], 2: []}
LOST = {
    "id": [0, 1],
    "evicted_ns": [320 * MS, 310 * MS],
    "resumed_ns": [620 * MS, 330 * MS],
}
STEPS = {
    "start_ns": np.array([0, 100, 150, 200]) * MS,
    "end_ns": np.array([100, 150, 200, 700]) * MS,
    "num_waiting": np.array([9, 1, 2, 6]),
    "kv_tokens": np.array([3, 3, 3, 3]),
    "kv_allocated_tokens": np.array([4, 4, 4, 4]),
}


def run_of(tokens_ms=TOKENS_MS, **changes):
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
    table = {name: np.asarray(column) for name, column in {**requests, **changes}.items()}
    tokens_ns = {number: np.array(times) * MS for number, times in tokens_ms.items()}
    return RunResult("small", "fcfs", table, HandLog(tokens_ns, STEPS, LOST), 100)


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
        ("tail_ratio", {"latency": "ttft"}, 199 / 150),  # of 100 and 200
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
        ("of_class", {"metric": "completed", "column": "priority", "value": 1}, 1),
        ("of_class", {"metric": "completed", "column": "priority", "value": "1"}, 1),
        ("of_class", {"metric": "completed", "column": "prompt_tokens", "low": 10, "high": 20}, 2),
        ("of_class", {"metric": "mean_ttft_ms", "column": "prompt_tokens", "high": 15}, 100),
        ("of_class", {"metric": "p99_itl_ms", "column": "priority", "low": 1}, 200),
    ],
    ids=str,
)
def test_metric_of_a_small_run_is_what_a_pencil_gives(name, knobs, expected):
    assert run_of().metric(name, **knobs) == pytest.approx(expected)


def test_queue_growth_weighs_steps_by_their_time():
    # In the second half of the arrivals (from 100 ms to 200 ms) the queue is 1, 2 and 6 at 0, 50
    # and 100 ms, in steps of 50, 50 and 500 ms. Their mean time is (2.5 + 50) / 0.6 = 87.5 ms, the
    # slope (50 * -87.5 * 1 + 50 * -37.5 * 2 + 500 * 12.5 * 6) / (50 * 87.5**2 + 50 * 37.5**2 +
    # 500 * 12.5**2) = 29,375 / 531,250 a millisecond.
    assert run_of().metric("queue_growth") == pytest.approx(1000 * 29_375 / 531_250)


def test_queue_growth_of_two_steps_is_the_line_through_them():
    # From 150 ms on, the median of the arrivals, the queue is 2 and then, at 200 ms, 6.
    arrivals_ms = np.array([120, 150, 200])
    assert run_of(arrival_ns=arrivals_ms * MS).metric("queue_growth") == pytest.approx(4 / 0.05)
    only = run_of(arrival_ns=np.array([120, 160, 200]) * MS)
    assert math.isnan(only.metric("queue_growth"))


@pytest.mark.parametrize(("end_ms", "missed"), [(400.0, 1), (399.9, 2)])
def test_deadline_at_the_very_end_of_an_answer_is_held(end_ms, missed):
    # Request 1 ends 400 ms after its arrival, and has no target for its tokens; 2 was rejected.
    result = run_of(slo_tpot_ms=[200.0, NAN, NAN], slo_e2el_ms=[NAN, end_ms, NAN])
    assert result.metric("deadline_misses") == pytest.approx(missed / 3)


def test_who_was_turned_away_holds_no_target():
    # Request 0 takes 200 ms a token, request 1 as well; 2 has no time per token, for it has none.
    result = run_of(slo_tpot_ms=[200.0, 150.0, 100.0])
    assert result.metric("tpot_slo_attainment") == pytest.approx(1 / 3)


def test_wait_for_the_first_token_is_no_stall():
    # Request 1 waits 200 ms for its first token and 100 ms for its second.
    result = run_of({**TOKENS_MS, 1: [300, 400]})
    assert result.metric("stall_free_goodput", ttft_ms=200, stall_ms=100) == pytest.approx(1 / 0.7)


def test_service_gap_counts_only_while_both_wait():
    # Tenants a and b have two requests each from 0 s on. Admissions at 1, 2, 3 and 4 s in the
    # order a a b b: both wait until 2 s, when the last of a is admitted. Until then a has two
    # prompts of 10 and a token at 1.5 s (weight 2), b nothing: 22. Priorities say nothing.
    result = run_of(
        {0: [1500], 1: [5000], 2: [5000], 3: [6000]},
        id=np.arange(4),
        tenant=np.array(["a", "a", "b", "b"]),
        priority=np.array([0, 1, 2, 3]),
        arrival_ns=np.zeros(4, dtype=np.int64),
        first_scheduled_ns=np.array([1000, 2000, 3000, 4000]) * MS,
        prompt_tokens=np.array([10, 10, 10, 10]),
    )
    assert result.metric("service_gap") == 22.0
    assert result.metric("service_gap(output_weight=0)") == 20.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant": ["a", "b", "c"]}, "two tenants, there are 3"),
        ({"tenant": ["a", "a", "a"]}, "two tenants, there are 1"),
        ({}, "names none"),
    ],
)
def test_service_gap_of_other_than_two_tenants_says_that_it_needs_two(changes, message):
    with pytest.raises(SpecError, match=message):
        run_of(first_scheduled_ns=[1, 1, 1], **changes).metric("service_gap")


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("largest", {"latency": "tttft"}, "did you mean ttft"),
        ("tail_ratio", {"latency": "tpt"}, "did you mean tpot"),
        ("explained_by_lengths", {"latency": "e2e"}, "did you mean e2el"),
        ("of_class", {"metric": "mean_ttft_ms", "column": "prio"}, "did you mean priority"),
        ("of_class", {"metric": "mean_tftt_ms", "column": "priority"}, "did you mean mean_ttft_ms"),
        ("preemption_loss_at_tail", {"latency": "itl"}, "choose from e2el, tpot"),
        ("of_class", {"metric": "busy_s", "column": "priority"}, "tells of the engine"),
        (
            "of_class",
            {"metric": "completed", "column": "priority", "value": "high"},
            "value: priority holds numbers, not 'high'",
        ),
    ],
    ids=str,
)
def test_metric_of_something_unknown_names_what_there_is(name, knobs, message):
    with pytest.raises(SpecError, match=message):
        run_of().metric(name, **knobs)


def test_class_of_requests_has_no_metric_but_those_of_requests():
    result, about = run_of(), set()
    for name in names():
        try:
            asked = metric_named(name)
        except SpecError:
            continue  # it takes parameters
        about.add(asked.about)
        if asked.about != "requests":
            with pytest.raises(SpecError, match=f"{name} tells of the engine that serves all"):
                result.metric("of_class", metric=name, column="priority")
    assert about == {"requests", "engine", "fleet", "sessions", "tiers"}


def test_worst_ratio_is_the_largest_over_the_median():
    # TTFT of the two that finished: 100 and 200 ms.
    assert run_of().metric("worst_ratio(latency=ttft)") == pytest.approx(200 / 150)


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
    run = run_of(
        arrival_ns=np.zeros(4, dtype=np.int64),
        finish_ns=np.array(finish_ms) * MS,
        first_scheduled_ns=np.zeros(4, dtype=np.int64),
        first_token_ns=np.ones(4, dtype=np.int64),
        prompt_tokens=np.array([10, 30, 10, 30]),
        generated_tokens=np.array([2, 2, 4, 4]),
        status=np.zeros(4, dtype=np.int8),
    )
    found = run.metric("explained_by_lengths", latency="e2el")
    assert found == pytest.approx(expected)
    assert math.isnan(run.metric("explained_by_lengths", latency="ttft"))


def test_time_to_finish_more_than_finished_is_nan():
    assert math.isnan(run_of().metric("time_to_finish", num_requests=3))


def widest_drift(tenants, arrivals, admissions, prompts, tokens):
    """Compute `service_gap` of weights 1 and 2 time by time, in units of which all are whole."""

    def waits(tenant, t):
        return any(
            one == tenant and start <= t < end
            for one, start, end in zip(tenants, arrivals, admissions, strict=True)
        )

    spans, last = [], max(admissions)
    for t in range(last):
        if waits("a", t) and waits("b", t):
            if spans and spans[-1][1] == t:
                spans[-1][1] = t + 1
            else:
                spans.append([t, t + 1])
    if not spans:
        return None
    first, end = max(spans, key=lambda span: span[1] - span[0])
    drift, drifts = 0, [0]
    for t in range(first, end + 1):
        for tenant, at, prompt, out in zip(tenants, admissions, prompts, tokens, strict=True):
            served = prompt * (at == t) + 2 * out.count(t)
            drift += served if tenant == "a" else -served
        drifts.append(drift)
    return max(drifts) - min(drifts)


def test_service_gap_of_any_requests_is_what_counting_time_by_time_gives():
    draw, num_told = Random(4), 0
    for _ in range(60):
        num = draw.randrange(2, 9)
        tenants = ["a", "b", *(draw.choice("ab") for _ in range(num - 2))]
        arrivals = [draw.randrange(6) for _ in range(num)]
        admissions = [at + draw.randrange(1, 6) for at in arrivals]
        prompts = [draw.randrange(1, 9) for _ in range(num)]
        tokens = [sorted(draw.sample(range(at, 15), 3)) for at in admissions]
        expected = widest_drift(tenants, arrivals, admissions, prompts, tokens)
        if expected is None:
            continue
        num_told += 1
        result = run_of(
            dict(enumerate(tokens)),
            id=np.arange(num),
            tenant=np.array(tenants),
            arrival_ns=np.array(arrivals) * MS,
            first_scheduled_ns=np.array(admissions) * MS,
            prompt_tokens=np.array(prompts),
        )
        assert result.metric("service_gap") == expected
    assert num_told > 40


def test_service_gap_counts_who_is_admitted_at_the_beginning_and_nobody_who_never_was():
    # Request 0 is admitted as it comes, at the very beginning; request 3 was turned away.
    result = run_of(
        {0: [1], 1: [9], 2: [9], 3: []},
        id=np.arange(4),
        tenant=np.array(["a", "b", "a", "c"]),
        arrival_ns=np.zeros(4, dtype=np.int64),
        first_scheduled_ns=np.array([0, 5 * MS, 3 * MS, -1]),
        prompt_tokens=np.array([7, 10, 4, 90]),
    )
    # a: 7 at 0 ms, 2 at 1 ms and 4 at 3 ms.
    assert result.metric("service_gap") == 13.0


@pytest.mark.parametrize(("stay_ns", "index"), [((1, 1), 1.0), ((1, 2), 0.9), ((0, 1), 1.0)])
def test_fairness_takes_speeds_of_answers_that_took_a_nanosecond_as_they_are(stay_ns, index):
    result = run_of(
        id=[0, 1], arrival_ns=[5, 5], finish_ns=[5 + ns for ns in stay_ns],
        generated_tokens=[4, 4], status=[0, 0],
    )  # fmt: skip
    assert result.metric("jain_fairness") == pytest.approx(index)


def test_loss_at_the_tail_is_of_the_slowest_hundredth():
    # Answers of two tokens, 1 to 201 ms apart: three are at or above the 99th percentile, 199 ms.
    num = 201
    number = np.arange(num)[::-1]  # rows in another order than ids
    first_ns = np.full(num, MS)
    result = run_of(
        {i: [1, 2 + i] for i in range(num)},
        id=number, arrival_ns=np.zeros(num, dtype=np.int64), first_token_ns=first_ns,
        finish_ns=first_ns + (1 + number) * MS, generated_tokens=np.full(num, 2),
        status=np.zeros(num, dtype=np.int8),
    )  # fmt: skip
    lost = {
        "id": [196, 197, 198, 200], "evicted_ns": [2 * MS] * 4,
        "resumed_ns": [2 * MS + n * MS for n in (64, 32, 3, 6)],
    }  # fmt: skip
    result.log._preemptions = lost
    assert result.metric("preemption_loss_at_tail") == pytest.approx(9 / (199 + 200 + 201))


def test_loss_at_the_tail_where_evictions_begin_before_the_first_token_is_of_decode_time():
    # The first token of request 0 comes at 100 ms, its last at 700 ms: 50 of 600 ms, and none of
    # the absence before.
    result = run_of()
    result.log._preemptions = {
        "id": [0, 0, 1], "evicted_ns": [20 * MS, 90 * MS, 120 * MS],
        "resumed_ns": [60 * MS, 150 * MS, 130 * MS],
    }  # fmt: skip
    assert result.metric("preemption_loss_at_tail", latency="e2el") == pytest.approx(50 / 600)


def test_total_throughput_counts_prompts_of_those_who_were_answered():
    # Prompts of 10 and 20 tokens, six tokens of answers, 0.7 s; 30 tokens were turned away.
    assert run_of().metric("total_token_throughput") == pytest.approx(36 / 0.7)


def test_tokens_within_a_time_count_from_the_first_arrival_measured():
    # Tokens at 100, 200, 300 (two), 500 and 700 ms; of the second class at 300 and 500 ms.
    def told(ms, only):
        run = run_of(arrival_ns=[50 * MS, 100 * MS, 200 * MS]).observation()
        if only is not None:
            run = run.only(run.column("id") == only)
        return metric_named(f"tokens_within(seconds={ms / 1e3})").of(run)

    assert [told(ms, None) for ms in (49, 50, 250, 449, 450, 650)] == [0, 1, 4, 4, 5, 6]
    assert [told(ms, 1) for ms in (199, 200, 399, 400)] == [0, 1, 1, 2]
