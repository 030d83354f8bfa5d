"""Saving, loading and exporting a result, on a small fake log."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from schedlab.experiments.results import point_folder
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import replacing
from schedlab.sim.metrics.registry import every_session
from schedlab.sim.record.columns import pairs
from schedlab.sim.record.copies import Copies, TierFacts
from schedlab.sim.record.log import REQUEST_COLUMNS
from schedlab.sim.result import RunResult
from tests.hand_log import HandLog
from tests.unit.test_metrics import MS, TOKENS_NS, columns, steps

VLLM_KEYS = [
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
    *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el")
      for s in ("mean", "median", "std", "p99")),
    "schedlab",
]  # fmt: skip


LOST = {"id": [1], "evicted_ns": [350 * MS], "resumed_ns": [400 * MS]}


def result(**changes):
    fields = {
        "name": "three",
        "policy": "fcfs",
        "requests": dict.fromkeys(REQUEST_COLUMNS, np.zeros(3, dtype=np.int64)) | columns(),
        "log": HandLog(TOKENS_NS, steps(), LOST),
        "kv_capacity_tokens": 100,
        "reject_reasons": {7: "too long"},
        "provenance": {
            "model": "llama-3-8b", "backend": "sim", "request_rate": math.inf, "seed": 0,
            "cost_model": {"name": "roofline", "error": math.nan}, "count": np.int64(3),
        },
    }  # fmt: skip
    return RunResult(**{**fields, **changes})


@pytest.fixture(autouse=True)
def fixed_date(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


def test_result_has_the_metrics_of_what_there_was():
    # Sessions, if requests are of any; tiers and engines are facts of their own.
    of_sessions = {one.name for one in every_session()}
    assert of_sessions
    plain = result()
    assert not of_sessions & set(plain.metrics())
    names = np.array(["a", "a", "b"])
    turns = result(requests=dict(plain.requests) | {"session": names, "turn": np.array([1, 2, 1])})
    assert list(turns.metrics()) == list(plain.metrics()) + [o.name for o in every_session()]
    assert turns.metrics()["num_sessions"] == 2


def test_session_is_measured_with_its_first_request_and_with_no_other():
    names, turns = np.array(["a", "a", "b"]), np.array([1, 2, 1])
    run = result(requests=dict(result().requests) | {"session": names, "turn": turns}).observation()
    for chosen in product((True, False), repeat=3):
        found = run.only(np.array(chosen)).sessions["session"].tolist()
        assert found == [name for name, i in (("a", 0), ("b", 2)) if chosen[i]], chosen


def test_metrics_join_requests_and_steps():
    metrics = result().metrics()
    assert metrics["request_throughput"] == 2.0
    assert metrics["num_steps"] == 2


def test_metrics_that_were_changed_by_who_got_them_are_as_they_were_for_the_next():
    run = result()
    first = run.metrics()
    kept = dict(first)
    first["num_steps"] = -1.0
    first["mine"] = first.pop("completed")
    assert run.metrics() == kept
    assert list(run.metrics()) == list(kept)
    run.metrics().clear()
    assert run.metrics() == kept
    by_priority = run.metrics_by("priority")
    by_priority[0.0].clear()
    assert run.metrics_by("priority")[0.0]["completed"] == 2


def test_metrics_by_class_split_the_requests():
    by_priority = result().metrics_by("priority")
    assert {key: m["completed"] for key, m in by_priority.items()} == {0.0: 2, 1.0: 1}
    assert by_priority[1.0]["mean_ttft_ms"] == 200.0
    assert by_priority[1.0]["mean_itl_ms"] == 200.0
    assert "num_steps" not in by_priority[0.0]  # the engine serves both


def test_rates_of_classes_add_up_to_those_of_all():
    whole, parts = result().metrics(), result().metrics_by("priority").values()
    for name in ("request_throughput", "output_throughput", "total_token_throughput",
                 "request_goodput"):  # fmt: skip
        assert sum(part[name] for part in parts) == pytest.approx(whole[name])


def test_to_vllm_json_has_exactly_the_keys_of_vllm_and_ours():
    assert list(result().to_vllm_json()) == VLLM_KEYS


def test_to_vllm_json_values_are_plain_and_undefined_ones_null():
    exported = result().to_vllm_json()
    assert exported["date"] == "19700101-000000"
    assert exported["request_rate"] == "inf"
    assert exported["tokenizer_id"] is None
    assert exported["duration"] == 1.5
    assert exported["p99_itl_ms"] == 200.0
    ours = exported["schedlab"]
    assert ours["provenance"]["cost_model"] == {"name": "roofline", "error": None}
    assert ours["provenance"]["count"] == 3
    assert ours["reject_reasons"] == {"7": "too long"}
    json.dumps(exported, allow_nan=False)


def test_to_vllm_json_has_each_metric_under_its_own_name(monkeypatch):
    told = {name: float(i) for i, name in enumerate(result().metrics())}
    monkeypatch.setattr(RunResult, "metrics", lambda self: told)
    exported = result().to_vllm_json()
    other = {"num_prompts": "num_requests", "duration": "duration_s"}
    origin = {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id",
              "request_rate", "burstiness", "max_concurrency", "rtfx", "schedlab"}  # fmt: skip
    for key in exported.keys() - origin:
        assert exported[key] == told[other.get(key, key)], key


@pytest.mark.slow
def test_save_and_load_give_the_same_result(tmp_path):
    result().save(tmp_path / "run")
    loaded = RunResult.load(tmp_path / "run")
    assert loaded.metrics() == result().metrics()
    assert loaded.to_vllm_json() == result().to_vllm_json()
    assert loaded.reject_reasons == {7: "too long"}
    for name, data in columns().items():
        np.testing.assert_array_equal(loaded.requests[name], data)
        assert loaded.requests[name].dtype == data.dtype


def test_save_twice_gives_the_same_bytes_and_no_leftovers(tmp_path):
    result().save(tmp_path / "a")
    result().save(tmp_path / "b")
    tables = ("gaps", "preemptions", "requests", "steps", "stints", "tokens")
    names = sorted([*(f"{name}.parquet" for name in tables), "result.json"])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_loaded_result_has_the_token_times_of_single_requests(tmp_path):
    result().save(tmp_path)
    log = RunResult.load(tmp_path).log
    for number, times_ns in TOKENS_NS.items():
        assert log.token_times(number).tolist() == times_ns
    gaps_ns, counts = pairs(log.token_gaps(np.array([1])))
    assert (gaps_ns.tolist(), counts.tolist()) == ([200 * MS], [1])
    times_ns, tokens = pairs(log.token_counts(np.array([1, 2])))
    assert (times_ns.tolist(), tokens.tolist()) == ([300 * MS, 500 * MS, 1500 * MS], [1, 1, 1])


def test_loaded_result_without_token_times_says_so(tmp_path):
    result().save(tmp_path)
    (tmp_path / "stints.parquet").unlink()
    with pytest.raises(SchedlabError, match="token times of single requests"):
        RunResult.load(tmp_path).log.token_times(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("{}", "not a schedlab result"),
     ('{"schedlab": {"schema": 99}}', "this version reads 1")],
)  # fmt: skip
def test_load_of_something_else_names_the_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(SchedlabError, match=rf"result\.json: .*{message}"):
        RunResult.load(tmp_path)


def test_load_of_a_table_without_its_columns_names_the_first(tmp_path):
    result().save(tmp_path)
    table = pq.read_table(tmp_path / "requests.parquet")

    def told(gone):
        pq.write_table(table.drop_columns(gone), tmp_path / "requests.parquet")
        with pytest.raises(SchedlabError, match=r"requests\.parquet: (no )?column") as refused:
            RunResult.load(tmp_path)
        return str(refused.value)

    assert all(name in told([name]) for name in REQUEST_COLUMNS)
    # Those that a whole log of its own does not need are missed later, and in their order.
    later = [name for name in REQUEST_COLUMNS if "is missing" in told([name])]
    assert len(later) > 1
    for i, name in enumerate(later):
        assert f"column {name} is missing" in told(later[i:])


@pytest.mark.parametrize("head", [[], [1], "text", 3, None])
def test_load_of_a_head_that_is_no_mapping_says_whose_it_is_not(tmp_path, head):
    (tmp_path / "result.json").write_text(json.dumps({"schedlab": head}))
    for load in (RunResult.load, point_folder._head):
        with pytest.raises(SchedlabError, match=r"result\.json: not a schedlab result"):
            load(tmp_path)


def test_load_with_a_missing_table_names_it(tmp_path):
    result().save(tmp_path)
    (tmp_path / "requests.parquet").unlink()
    with pytest.raises(SchedlabError, match=r"requests\.parquet: no such file"):
        RunResult.load(tmp_path)


def test_perfetto_shows_steps_and_the_spans_of_each_request(tmp_path):
    path = tmp_path / "trace.json"
    result().to_perfetto(path)
    trace = json.loads(path.read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in spans if e["tid"] == 0] == [(0.0, 0.1), (0.15, 0.3)]
    # Request 1: arrival 100 ms, scheduled 150, first token 300, finish 500; in microseconds.
    assert [(e["name"], e["ts"], e["dur"]) for e in spans if e["tid"] == 2] == [
        ("queued", 100_000.0, 50_000.0),
        ("prefill", 150_000.0, 150_000.0),
        ("decode", 300_000.0, 200_000.0),
        ("preempted", 350_000.0, 50_000.0),
    ]
    counters = [e["args"] for e in trace["traceEvents"] if e["name"] == "KV tokens"]
    assert counters == [{"resident": 10, "held": 16}, {"resident": 30, "held": 48}]


def test_perfetto_is_bounded_and_says_what_it_left_out(tmp_path):
    path = tmp_path / "trace.json"
    result().to_perfetto(path, max_requests=1, max_steps=1)
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {
        "name": "three", "policy": "fcfs", "requests_written": 1, "requests_total": 3,
        "steps_written": 1, "steps_total": 2,
    }  # fmt: skip
    assert {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"} == {0, 1}


def test_perfetto_marks_rejected_and_stops_where_a_request_did(tmp_path):
    requests = columns(
        status=np.array([1, 2, 2], dtype=np.int8),
        first_scheduled_ns=np.array([-1, 150 * MS, -1]),
        first_token_ns=np.array([-1, -1, -1]),
        finish_ns=np.array([-1, -1, -1]),
    )
    path = tmp_path / "trace.json"
    log = HandLog(TOKENS_NS, steps())
    result(requests=requests, log=log, reject_reasons={0: "too long"}).to_perfetto(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("tid", 0) > 0]
    assert [e["args"] for e in events if e["ph"] == "i"] == [{"reason": "too long"}]
    assert [(e["tid"], e["name"]) for e in events if e["ph"] == "X"] == [(2, "queued")]


def test_replacing_keeps_the_old_file_if_writing_fails(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_table_of_requests_without_a_column_is_refused_with_its_name(tmp_path):
    result().save(tmp_path)
    table = pq.read_table(tmp_path / "requests.parquet")
    pq.write_table(table.drop_columns("prefix_hit_tokens"), tmp_path / "requests.parquet")
    with pytest.raises(SchedlabError, match=r"requests\.parquet: column prefix_hit_tokens is mis"):
        RunResult.load(tmp_path)


def test_tables_of_tiers_are_those_of_copies_and_of_waits(tmp_path):
    kept = Copies()
    tables = {
        "copies": {name: np.zeros(2, dtype=np.int64) for name in kept.columns()},
        "copy_waits": {name: np.arange(3) for name in kept.wait_columns()},
    }
    result(tiers=(TierFacts("cpu", 7, 100, 4),), **tables).save(tmp_path)
    for name, written in tables.items():
        found = pq.read_table(tmp_path / f"{name}.parquet").to_pydict()
        assert found == {key: column.tolist() for key, column in written.items()}


@pytest.mark.parametrize("path", [".", "/"])
def test_file_that_would_be_called_like_a_folder_is_refused_as_one(path):
    with pytest.raises(IsADirectoryError, match="Is a directory"), replacing(Path(path)):
        pass
