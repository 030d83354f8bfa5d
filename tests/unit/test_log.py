"""The log of an engine: every number of a request in its column, and tables that grow."""

import numpy as np
import pytest

from schedlab.sim.record import log as logs
from schedlab.sim.record.columns import REJECTED, TRUNCATED
from schedlab.sim.record.log import RunLog
from schedlab.sim.record.segment_row import SegmentRow
from schedlab.sim.request import RequestState, Slo
from tests.laws import arrival

FIELDS = {
    "num_preemptions": 3, "recomputed_tokens": 4, "cached_tokens": 5, "prefix_hit_tokens": 6,
    "queued_ns": 107, "first_scheduled_ns": 108, "first_token_ns": 109, "last_token_ns": 110,
}  # fmt: skip


def segment(start_ns, num_steps, num_decodes=1):
    return SegmentRow(start_ns, num_steps, num_decodes, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.fixture(params=["in memory", "on disk"])
def log(request, monkeypatch):
    if request.param == "on disk":
        monkeypatch.setattr(logs, "MOST_NUMBERS_IN_MEMORY", 1)
    return RunLog(block_size=4, grows=True)


def test_log_has_each_number_of_a_request_in_its_column_in_order_of_ids(log):
    state = RequestState(
        arrival(9, 101, 12, priority=-2, predicted_tokens=2.5, slo=Slo(11.0, 12.0, 13.0)).request
    )
    state._generated = 7
    for name, value in FIELDS.items():
        setattr(state, name, value)
    log.add_request(state, 8, 111, TRUNCATED)
    bare = RequestState(arrival(4, 55, 66, slo=Slo(tpot_ms=3.0)).request)
    log.reject(bare, 99, "too long")
    log.add_request(RequestState(arrival(6, 1, 2).request), 3, 4, 0)
    found = {name: np.asarray(column).tolist() for name, column in log.requests().items()}
    assert found["id"] == [4, 6, 9]
    last = {name: column[2] for name, column in found.items()}
    assert last == {
        "id": 9, "arrival_ns": 101, "prompt_tokens": 12, "output_tokens": 8, "generated_tokens": 7,
        "finish_ns": 111, "priority": -2, "status": TRUNCATED, "predicted_tokens": 2.5,
        "slo_ttft_ms": 11.0, "slo_tpot_ms": 12.0, "slo_e2el_ms": 13.0, **FIELDS,
    }  # fmt: skip
    first = {name: column[0] for name, column in found.items()}
    assert (first["status"], first["finish_ns"], first["output_tokens"]) == (REJECTED, -1, 99)
    assert (first["arrival_ns"], first["prompt_tokens"], first["slo_tpot_ms"]) == (55, 66, 3.0)
    assert np.isnan([first[f] for f in ("predicted_tokens", "slo_ttft_ms", "slo_e2el_ms")]).all()
    assert [np.isnan(found["slo_tpot_ms"][i]) for i in range(3)] == [False, True, False]
    assert log.reject_reasons == {4: "too long"}


def test_log_tells_tokens_of_what_has_come_whenever_it_is_asked(log):
    log.add_segment(segment(1_000, 3), [10, 20, 30], [0, 0, 0])  # steps end at 1010, 1030, 1060
    assert log.token_times(5).tolist() == []
    log.add_stint(5, 900, 0, 2)
    assert log.token_times(5).tolist() == [900, 1_010, 1_030]
    log.add_stint(6, -1, 1, 3)  # with no further step
    assert log.token_times(6).tolist() == [1_030, 1_060]
    log.add_segment(segment(2_000, 1), [5], [0])
    log.add_segment(segment(3_000, 1, num_decodes=0), [7], [0])  # nobody decodes there
    log.add_segment(segment(4_000, 1), [8], [0])
    log.add_stint(5, -1, 3, 5)
    log.add_stint(7, -1, 4, 4)  # of no token at all
    log.add_stint(8, 3_007, 4, 4)  # of the one of its prompt
    assert log.token_times(5).tolist() == [900, 1_010, 1_030, 2_005, 4_008]
    assert log.token_times(7).tolist() == []
    assert log.token_times(8).tolist() == [3_007]
    assert log.num_steps == 6
    assert log.steps()["end_ns"].tolist() == [1_010, 1_030, 1_060, 2_005, 3_007, 4_008]
    gaps = log.token_gaps(np.array([5]))
    assert sorted(np.repeat(gaps["gap_ns"], gaps["count"]).tolist()) == [20, 110, 975, 2_003]


def test_log_pairs_each_eviction_with_the_next_time_it_ran_again(log):
    for request_id, ns in ((7, 100), (2, 150), (7, 300), (4, 320), (7, 500)):
        log.add_eviction(request_id, ns)
    for request_id, ns, tokens in ((2, 160, 31), (7, 200, 32), (7, 400, 33)):
        log.add_resumption(request_id, ns, tokens)
    assert {name: column.tolist() for name, column in log.preemptions().items()} == {
        "id": [2, 4, 7, 7, 7], "evicted_ns": [150, 320, 100, 300, 500],
        "resumed_ns": [160, -1, 200, 400, -1], "resumed_tokens": [31, 0, 32, 33, 0],
    }  # fmt: skip


def test_log_writes_stints_of_a_batch_as_one_by_one(log):
    states = []
    for number, (entry_ns, first) in enumerate([(-1, 0), (700, 2), (-1, 5), (800, 5)]):
        state = RequestState(arrival(number).request)
        state._entry_ns, state._stint_start = entry_ns, first
        states.append(state)
    log.add_segment(segment(0, 20), [1] * 20, [0] * 20)
    log.add_stints(states, 10, 5)
    assert log.token_times(0).tolist() == [11, 12, 13, 14, 15]
    assert log.token_times(1).tolist() == [700, 13, 14, 15]
    assert log.token_times(2).tolist() == []
    assert log.token_times(3).tolist() == [800]
