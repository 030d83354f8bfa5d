"""Every event of a trace for ui.perfetto.dev, written from a run by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.sim.record.perfetto import _MORE_STEPS, write_trace

STEPS = {
    "start_ns": [0, 1_000, 2_000, 5_000],
    "end_ns": [1_500, 3_000, 4_000, 9_000],
    "num_decodes": [1, 2, 3, 4],
    "num_prefills": [5, 6, 7, 8],
    "prefill_tokens": [9, 10, 11, 12],
    "padding_tokens": [13, 14, 15, 16],
    "overhead_ns": [17, 18, 19, 20],
    "kv_tokens": [21, 22, 23, 24],
    "kv_allocated_tokens": [25, 50, 75, 10],
    "num_running": [29, 30, 31, 32],
    "num_waiting": [33, 34, 35, 36],
    "num_preempted": [0, 2, 0, 0],
}
REQUESTS = {
    "id": [40, 41, 42],
    "arrival_ns": [900, 100, 500],
    "first_scheduled_ns": [1_000, 2_000, 700],
    "first_token_ns": [3_000, 4_000, -1],
    "finish_ns": [9_000, -1, -1],
    "status": [0, 0, 1],
    "prompt_tokens": [51, 52, 53],
    "generated_tokens": [61, 62, 63],
    "num_preemptions": [71, 72, 73],
    "recomputed_tokens": [81, 82, 83],
}
LOST = {"id": [40, 41, 40], "evicted_ns": [4_000, 4_100, 6_000], "resumed_ns": [5_000, -1, 7_500]}
LENGTHS = ("prompt_tokens", "generated_tokens", "num_preemptions", "recomputed_tokens")


def run(steps=(), requests=(), num_engines=1, engines=()):
    def table(columns):
        return {name: np.array(column) for name, column in columns.items()}

    log = SimpleNamespace(
        steps=lambda: table({**STEPS, **dict(steps)}), preemptions=lambda: table(LOST)
    )
    return SimpleNamespace(
        name="one", policy="fcfs", num_engines=num_engines, engines=engines, log=log,
        requests=table({**REQUESTS, **dict(requests)}), reject_reasons={42: "too long"},
        kv_capacity_tokens=100,
    )  # fmt: skip


def written(path, result, **most):
    write_trace(result, path / "trace.json", **most)
    return json.loads((path / "trace.json").read_text(encoding="utf-8"))


def named(events, name):
    return [event for event in events if event["name"] == name]


def span(event):
    return event["pid"], event["tid"], event["ts"], event["dur"], event["args"]


def step_args(i, share):
    names = ("num_decodes", "num_prefills", "prefill_tokens", "padding_tokens", "overhead_ns")
    return {**{name: STEPS[name][i] for name in names}, "kv_share": share}


def test_trace_says_what_it_is_of_and_how_much_is_in_it(tmp_path):
    whole = written(tmp_path, run())
    assert whole["displayTimeUnit"] == "ms"
    counts = {"requests_total": 3, "steps_total": 4}
    assert whole["otherData"] == {
        "name": "one", "policy": "fcfs", "requests_written": 3, "steps_written": 4, **counts,
    }  # fmt: skip
    part = written(tmp_path, run(), max_requests=2, max_steps=3)
    assert part["otherData"] == {
        "name": "one", "policy": "fcfs", "requests_written": 2, "steps_written": 3, **counts,
    }  # fmt: skip
    assert len(named(part["traceEvents"], "step")) == 3
    threads = [e["args"]["name"] for e in named(part["traceEvents"], "thread_name")]
    assert threads == ["steps", "request 41", "request 42"], "the first by arrival"


def test_trace_of_steps_has_a_span_two_counters_and_a_mark_where_somebody_was_preempted(tmp_path):
    events = written(tmp_path, run())["traceEvents"]
    assert [span(event) for event in named(events, "step")] == [
        (0, 0, 0.0, 1.5, step_args(0, 0.25)), (0, 0, 1.0, 2.0, step_args(1, 0.5)),
        (0, 0, 2.0, 2.0, step_args(2, 0.75)), (0, 0, 5.0, 4.0, step_args(3, 0.1)),
    ]  # fmt: skip
    assert {event["ph"] for event in named(events, "step")} == {"X"}
    (mark,) = [event for event in named(events, "preempted") if event["ph"] == "i"]
    assert (mark["ts"], mark["tid"], mark["s"]) == (1.0, 0, "t")
    assert mark["args"] == {"num_preempted": 2}
    counters = [(e["ph"], e["ts"], e["args"]) for e in named(events, "KV tokens")]
    assert counters == [
        ("C", start / 1e3, {"resident": resident, "held": held})
        for start, resident, held in zip(
            STEPS["start_ns"], STEPS["kv_tokens"], STEPS["kv_allocated_tokens"], strict=True
        )
    ]
    counters = [(e["ph"], e["ts"], e["args"]) for e in named(events, "requests")]
    assert counters == [
        ("C", start / 1e3, {"running": running, "waiting": waiting})
        for start, running, waiting in zip(
            STEPS["start_ns"], STEPS["num_running"], STEPS["num_waiting"], strict=True
        )
    ]


def test_trace_of_requests_has_the_spans_that_came_to_an_end(tmp_path):
    events = written(tmp_path, run())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in named(events, "thread_name")}
    assert threads == {0: "steps", 1: "request 41", 2: "request 42", 3: "request 40"}
    lengths = {
        number: {name: REQUESTS[name][i] for name in LENGTHS}
        for i, number in enumerate(REQUESTS["id"])
    }
    assert [span(event) for event in named(events, "queued")] == [
        (0, 1, 0.1, 1.9, lengths[41]), (0, 3, 0.9, 0.1, lengths[40]),
    ]  # fmt: skip
    assert [span(event) for event in named(events, "prefill")] == [
        (0, 1, 2.0, 2.0, lengths[41]), (0, 3, 1.0, 2.0, lengths[40]),
    ]  # fmt: skip
    assert [span(event) for event in named(events, "decode")] == [(0, 3, 3.0, 6.0, lengths[40])]
    away = [event for event in named(events, "preempted") if event["ph"] == "X"]
    assert [span(event) for event in away] == [(0, 3, 4.0, 1.0, {}), (0, 3, 6.0, 1.5, {})]
    (rejected,) = named(events, "rejected")
    assert (rejected["ts"], rejected["tid"], rejected["args"]) == (0.5, 2, {"reason": "too long"})
    assert not named(events, "KV transfer")


@pytest.mark.parametrize("told", [True, False])
def test_trace_of_a_fleet_has_a_process_for_each_engine(tmp_path, told):
    engines = [
        SimpleNamespace(pool=pool, kv_capacity_tokens=capacity)
        for pool, capacity in (("prompts", 50), ("answers", 1_000))
    ]
    requests = {
        "engine": [1, 0, 0], "prefill_engine": [0, -1, -1], "transfer_start_ns": [3_100, -1, -1],
        "transfer_end_ns": [3_600, -1, -1], "transferred_bytes": [7_000, 0, 0],
    }  # fmt: skip
    result = run({"engine": [0, 1, 0, 1]}, requests, num_engines=2, engines=engines if told else ())
    events = written(tmp_path, result)["traceEvents"]
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in named(events, "process_name")]
    second = "one (fcfs), engine 1 (answers)" if told else "one (fcfs), engine 1"
    assert names == [(0, 0, "one (fcfs)"), (1, 0, second)]
    assert {e["ph"] for e in named(events, "process_name")} == {"M"}
    shares = [0.5, 0.05, 1.5, 0.01] if told else [0.25, 0.5, 0.75, 0.1]
    assert [(e["pid"], e["tid"], e["args"]["kv_share"]) for e in named(events, "step")] == [
        (engine, 0, share) for engine, share in zip([0, 1, 0, 1], shares, strict=True)
    ]
    assert [e["pid"] for e in named(events, "requests")] == [0, 1, 0, 1]
    (transfer,) = named(events, "KV transfer")
    assert span(transfer) == (1, 3, 3.1, 0.5, {"from_engine": 0, "bytes": 7_000})
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in named(events, "thread_name")]
    assert threads == [
        (0, 0, "steps"), (1, 0, "steps"), (0, 1, "request 41"), (0, 2, "request 42"),
        (1, 3, "request 40"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prefill_end_ns", "took_us"),
    [
        pytest.param(2_400, 1.4, id="before the first token, which is told elsewhere"),
        pytest.param(5_000, 2.0, id="of a prompt computed again after it"),
        pytest.param(-1, 2.0, id="nothing was handed over"),
    ],
)
def test_prefill_in_a_trace_ends_with_the_prompt(tmp_path, prefill_end_ns, took_us):
    events = written(tmp_path, run({}, {"prefill_end_ns": [prefill_end_ns, -1, -1]}))
    ends = {e["tid"]: e["dur"] for e in named(events["traceEvents"], "prefill")}
    assert ends == {3: took_us, 1: 2.0}


def test_trace_of_a_pipeline_has_a_thread_for_each_batch_in_flight_of_its_engine(tmp_path):
    stages = {"stage_0_ns": [5, 0, 6, 7], "stage_1_ns": [8, 0, 9, 1], "stage_2_ns": [2, 0, 3, 4]}
    result = run({"engine": [1, 0, 1, 1], **stages, "micro_batch": [0] * 4}, num_engines=2)
    events = written(tmp_path, result)["traceEvents"]
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in named(events, "thread_name")]
    assert threads[:4] == [
        (0, 0, "steps"), (1, 0, "steps"),
        (1, _MORE_STEPS + 1, "steps (1 more in flight)"),
        (1, _MORE_STEPS + 2, "steps (2 more in flight)"),
    ]  # fmt: skip
    found = [
        (e["pid"], e["tid"], [value for key, value in e["args"].items() if "stage" in key])
        for e in named(events, "step")
    ]
    assert found == [
        (1, 0, [5, 8, 2]), (0, 0, []), (1, _MORE_STEPS + 1, [6, 9, 3]),
        (1, _MORE_STEPS + 2, [7, 1, 4]),
    ]  # fmt: skip
