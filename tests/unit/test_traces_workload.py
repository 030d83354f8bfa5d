import numpy as np
import pytest

from schedlab.sim.errors import TraceError
from schedlab.sim.request import Request, Slo
from schedlab.traces import Trace, stream, workload
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.workload import CHUNK_ROWS, CHUNK_ROWS_WITH_PREFIXES

MS = 1_000_000


def make_trace(num_requests=3, **columns) -> Trace:
    base = {
        "arrival_ns": np.arange(num_requests) * 100 * MS,
        "prompt_tokens": np.arange(num_requests) + 10,
        "output_tokens": np.arange(num_requests) + 1,
    }
    return Trace(**{**base, **columns})


def test_workload_of_plain_trace_gives_requests_in_order():
    arrivals = list(workload(make_trace(), max_model_len=100, first_id=7))
    assert [a.request.id for a in arrivals] == [7, 8, 9]
    assert [a.request.arrival_ns for a in arrivals] == [0, 100 * MS, 200 * MS]
    assert [a.ready_ns for a in arrivals] == [0, 100 * MS, 200 * MS]
    assert [a.output_tokens for a in arrivals] == [1, 2, 3]
    assert [a.request.max_tokens for a in arrivals] == [90, 89, 88]
    assert type(arrivals[0].request.prompt_tokens) is int


def test_request_of_any_trace_cannot_hold_the_true_output_length():
    assert not {name for name in Request.__dataclass_fields__ if "output" in name}
    values = np.array([777_777] * 3)
    for arrival in workload(make_trace(output_tokens=values), max_model_len=10**6):
        fields = [getattr(arrival.request, name) for name in Request.__dataclass_fields__]
        assert 777_777 not in fields


def test_workload_with_declared_max_tokens_uses_it_where_declared():
    trace = make_trace(max_tokens=np.array([5, 0, 7]))
    assert [a.request.max_tokens for a in workload(trace, max_model_len=100)] == [5, 89, 7]


def test_workload_with_prompt_beyond_model_passes_it_on_with_one_token():
    trace = make_trace(prompt_tokens=np.array([10, 500, 12]))
    requests = [a.request for a in workload(trace, max_model_len=100)]
    assert (requests[1].prompt_tokens, requests[1].max_tokens) == (500, 1)


def test_workload_with_predictor_delays_readiness_not_arrival():
    predicted = np.array([1.5, np.nan, 3.0])
    arrivals = list(
        workload(
            make_trace(), max_model_len=100, predicted_tokens=predicted, predictor_latency_s=0.005
        )
    )
    assert [a.request.predicted_tokens for a in arrivals] == [1.5, None, 3.0]
    assert [a.ready_ns - a.request.arrival_ns for a in arrivals] == [5 * MS] * 3
    per_row = np.array([0.001, 0.002, 0.003])
    arrivals = list(workload(make_trace(), max_model_len=100, predictor_latency_s=per_row))
    assert [a.ready_ns - a.request.arrival_ns for a in arrivals] == [MS, 2 * MS, 3 * MS]


def test_workload_slo_of_row_takes_precedence_by_dimension():
    trace = make_trace(
        deadline_s=np.array([2.0, np.nan, np.nan]), slo_ttft_ms=np.array([np.nan, 50.0, np.nan])
    )
    default = Slo(ttft_ms=100.0, tpot_ms=20.0)
    slos = [a.request.slo for a in workload(trace, max_model_len=100, slo=default)]
    assert slos == [Slo(100.0, 20.0, 2000.0), Slo(50.0, 20.0, None), default]
    slos = [a.request.slo for a in workload(trace, max_model_len=100)]
    assert slos == [Slo(None, None, 2000.0), Slo(50.0, None, None), None]


def test_workload_with_block_size_converts_prefix_hashes():
    trace = make_trace(
        prompt_tokens=np.array([40, 20, 32]), prefix=PrefixHashes.from_rows([[5, 6], [5], [5]], 32)
    )
    given = [a.request.prefix_hash_ids for a in workload(trace, max_model_len=100)]
    assert given == [(5, 6), (5,), (5,)]
    fine = [
        a.request.prefix_hash_ids for a in workload(trace, max_model_len=100, hash_block_tokens=16)
    ]
    assert fine == [(10, 11), (10,), (10, 11)]


def test_workload_of_more_prompts_than_are_named_at_once_gives_each_its_own_names():
    rows = [[i, i + 1] for i in range(2 * CHUNK_ROWS_WITH_PREFIXES + 3)]
    trace = make_trace(
        arrival_ns=np.arange(len(rows)), prompt_tokens=np.full(len(rows), 32),
        output_tokens=np.ones(len(rows), dtype=int), prefix=PrefixHashes.from_rows(rows, 16),
    )  # fmt: skip
    given = list(workload(trace, max_model_len=100))
    assert [list(a.request.prefix_hash_ids) for a in given] == rows
    assert [a.request.id for a in given] == list(range(len(rows)))


def test_workload_of_lengths_only_needs_arrivals():
    trace = make_trace(arrival_ns=None)
    with pytest.raises(TraceError, match="no arrival times"):
        workload(trace, max_model_len=100)
    arrivals = workload(trace, max_model_len=100, arrival_ns=np.array([1, 2, 3]))
    assert [a.request.arrival_ns for a in arrivals] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrival_ns": np.array([1, 2])}, "arrival_ns has 2 values for 3 requests"),
        ({"arrival_ns": np.array([3, 2, 1])}, "runs backwards at row 1"),
        ({"arrival_ns": np.array([0.5, 1, 2])}, "must be integer nanoseconds"),
        ({"predicted_tokens": np.ones(4)}, "predicted_tokens has 4 values for 3"),
        ({"predictor_latency_s": -1.0}, "predictor_latency_s must be >= 0"),
        ({"max_model_len": 1}, "max_model_len must be >= 2"),
    ],
)
def test_workload_with_wrong_argument_raises_before_the_first_request(options, message):
    with pytest.raises(TraceError, match=message):
        workload(make_trace(), **{"max_model_len": 100, **options})


@pytest.mark.slow
def test_workload_of_stream_equals_workload_of_whole(tmp_path):
    num_requests = 2 * CHUNK_ROWS + 17
    path = tmp_path / "t.csv"
    rows = "\n".join(f"{i / 8},{i % 50 + 1},{i % 9 + 1}" for i in range(num_requests))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    predicted = np.arange(float(num_requests))
    options = {
        "max_model_len": 100, "predicted_tokens": predicted, "predictor_latency_s": predicted / 1e3,
    }  # fmt: skip
    whole, pieces = (
        [
            (a.request.id, a.request.arrival_ns, a.request.predicted_tokens, a.output_tokens,
             a.ready_ns)
            for a in workload(trace, **options)
        ]
        for trace in (Trace.concat(list(stream(path))), stream(path, chunk_rows=1000))
    )  # fmt: skip
    assert whole[2] == (2, 250_000_000, 2.0, 3, 252_000_000)
    assert pieces == whole
    assert len(whole) == num_requests


def test_workload_of_stream_with_short_array_raises(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,1,1\n2,1,1\n")
    arrivals = workload(stream(path, chunk_rows=2), max_model_len=9, predicted_tokens=np.ones(2))
    with pytest.raises(TraceError, match="has only 2 values"):
        list(arrivals)
    arrivals = workload(stream(path, chunk_rows=2), max_model_len=9, predicted_tokens=np.ones(4))
    with pytest.raises(TraceError, match="has 4 values for 3 requests"):
        list(arrivals)


@pytest.mark.parametrize(("times_ns", "row"), [([-1, 0, 5], 0), ([0, 5, 4], 2), ([3, 2, 9], 1)])
def test_times_before_zero_or_before_the_row_above_are_refused_with_their_row(times_ns, row):
    with pytest.raises(TraceError, match=f"arrival_ns runs backwards at row {row}"):
        list(workload(make_trace(), max_model_len=100, arrival_ns=np.array(times_ns)))
