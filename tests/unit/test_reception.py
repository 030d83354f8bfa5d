"""Seats and memory of a request whose KV comes from another engine, count by count."""

from dataclasses import replace

import pytest

from schedlab.policies import ContinuousBatching
from schedlab.sim.config import EngineConfig
from schedlab.sim.core import reception
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.request import RequestState, Status, Turn
from tests.laws import LinearCost, arrival

CONFIG = EngineConfig(
    num_blocks=20, max_model_len=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=64
)


class Hears(ContinuousBatching):
    """First come, first served; notes who came."""

    def __init__(self):
        self.came = []

    def on_arrival(self, state, now_ns):
        self.came.append((state.id, now_ns, state.status))


def engine_with(number=3):
    """Have an engine where a request of 20 prompt tokens, with one of its answer, goes on."""
    engine = Engine(CONFIG, Hears(), SimExecutor(Pricing(LinearCost())))
    sent = replace(arrival(number, 100, 20, 6), turn=Turn((), 0))
    state = RequestState(sent.request)
    state._generated = 1
    reception.reserve(engine.requests, state, sent, 18, 700)
    return engine, state, sent


def counts(engine):
    requests = engine.requests
    names = (
        "num_arrived", "num_handed_over", "num_events", "num_turnovers", "num_seats_given",
        "resident_tokens", "num_in_flight", "num_seated",
    )  # fmt: skip
    held = requests.kv.num_blocks - requests.kv.free_blocks
    return {name: getattr(requests, name) for name in names} | {"held_blocks": held}


def test_request_whose_kv_is_awaited_has_seat_and_memory_and_does_not_run():
    engine, state, sent = engine_with()
    requests = engine.requests
    assert counts(engine) == {
        "num_arrived": 1, "num_handed_over": 0, "num_events": 1, "num_turnovers": 0,
        "num_seats_given": 0, "resident_tokens": 18, "num_in_flight": 1, "num_seated": 1,
        "held_blocks": 5,
    }  # fmt: skip
    assert (state.status, state.num_computed_tokens) == (Status.RUNNING, 18)
    assert state._seated_ns == 700
    assert requests.fetching == {3: state}
    assert requests.turns == {3: sent.turn}
    assert not requests.is_plain
    assert requests.running == {}
    assert engine.policy.came == []
    assert engine.executor.output_tokens(sent.request) == 6
    check_conservation(engine)


def test_request_that_gets_more_kv_takes_blocks_as_they_are_opened():
    engine, state, _ = engine_with()
    before = counts(engine)
    reception.extend(engine.requests, state, 2)  # the fifth block has room for two
    assert counts(engine) == {
        **before, "num_events": 2, "resident_tokens": 20,
    }  # fmt: skip
    reception.extend(engine.requests, state, 1)
    assert counts(engine) == {
        **before, "num_events": 3, "resident_tokens": 21, "held_blocks": 6,
    }  # fmt: skip
    assert state.num_computed_tokens == 21
    check_conservation(engine)


def test_request_whose_kv_does_not_come_gives_all_of_it_back():
    engine, state, sent = engine_with()
    reception.call_off(engine.requests, state)
    assert counts(engine) == {
        "num_arrived": 1, "num_handed_over": 1, "num_events": 2, "num_turnovers": 0,
        "num_seats_given": 0, "resident_tokens": 0, "num_in_flight": 0, "num_seated": 0,
        "held_blocks": 0,
    }  # fmt: skip
    assert state.status is Status.FINISHED
    with pytest.raises(KeyError):
        engine.executor.output_tokens(sent.request)
    check_conservation(engine)


def test_requests_whose_kv_has_come_run_from_the_next_plan_on_in_that_order():
    engine, first, _ = engine_with(3)
    requests = engine.requests
    second = RequestState(arrival(1, 150, 8, 5).request)
    second._generated = 2
    reception.reserve(requests, second, arrival(1, 150, 8, 5), 9, 800)
    reception.extend(requests, first, 2)
    events = requests.num_events
    reception.arrive(requests, second, 900)
    reception.arrive(requests, first, 950)
    assert requests.num_events == events + 2
    assert requests.arrived == [second, first]
    assert engine.policy.came == [(1, 900, Status.RUNNING), (3, 950, Status.RUNNING)]
    assert requests.running == {}
    reception.seat_arrived(requests)
    assert (requests.arrived, requests.fetching) == ([], {})
    assert list(requests.running.values()) == [second, first]
    assert list(requests.paused.values()) == [second, first]
    assert [second._seat, first._seat] == [0, 1]
    assert (requests.num_seats_given, requests.num_turnovers) == (2, 0)
    assert requests.num_seated == 2
    check_conservation(engine)


def test_request_whose_last_prompt_token_is_to_be_computed_is_in_prefill():
    engine, decoding, _ = engine_with(3)
    requests = engine.requests
    reception.extend(requests, decoding, 2)
    prompt = RequestState(arrival(1, 150, 8, 5).request)
    reception.reserve(requests, prompt, arrival(1, 150, 8, 5), 7, 800)
    for state in (prompt, decoding):
        reception.arrive(requests, state, 900)
    reception.seat_arrived(requests)
    assert list(requests.running.values()) == [prompt, decoding]
    assert (list(requests.prefilling), list(requests.paused)) == ([1], [3])
    check_conservation(engine)


def test_token_that_comes_with_kv_is_told_when_it_is_there():
    engine, _, _ = engine_with(3)
    requests, sent = engine.requests, arrival(1, 150, 8, 5)
    state = RequestState(sent.request)
    reception.reserve(requests, state, sent, 8, 800)
    reception.tell_token(requests, state, 900)
    assert (state.num_output_tokens, state.first_token_ns) == (1, 900)
    reception.tell_token(requests, state, 950)  # after its engine was lost, the next one
    assert (state.num_output_tokens, state.first_token_ns) == (2, 900)
    assert engine.log.token_times(1).tolist() == [900, 950]


def test_request_that_comes_back_goes_on_where_its_kv_was_held():
    engine, state, sent = engine_with()
    requests = engine.requests
    reception.extend(requests, state, 2)
    reception.arrive(requests, state, 800)
    reception.seat_arrived(requests)
    requests.withdraw(state, 900)  # it is to go on elsewhere, which fails
    before = counts(engine)
    assert requests.handed_over == {3: state}
    assert (before["num_handed_over"], before["num_in_flight"]) == (1, 0)
    engine.policy.came.clear()
    reception.take_back(requests, state, sent, 1_000)
    assert requests.handed_over == {}
    assert (state.status, state._entry_ns, state._seated_ns) == (Status.RUNNING, -1, 1_000)
    assert requests.fetching == {3: state}
    assert requests.arrived == [state]
    assert engine.policy.came == [(3, 1_000, Status.RUNNING)]
    assert engine.executor.output_tokens(sent.request) == 6
    assert counts(engine) == {
        **before, "num_handed_over": 0, "num_in_flight": 1, "num_seated": 1,
        "num_events": before["num_events"] + 1,
    }  # fmt: skip
    check_conservation(engine)


@pytest.mark.parametrize("cached", [0, 8])
def test_request_is_noted_as_resumed_only_where_it_was_evicted(cached):
    engine = Engine(CONFIG, Hears(), SimExecutor(Pricing(LinearCost())))
    requests, log = engine.requests, engine.log
    first = RequestState(arrival(5, 0, 20, 6).request)
    requests._note_scheduled(first, False, cached, 300)
    assert (first.first_scheduled_ns, first.prefix_hit_tokens) == (300, cached)
    log.add_eviction(5, 400)
    requests._note_scheduled(first, True, cached + 4, 500)
    assert (first.first_scheduled_ns, first.prefix_hit_tokens) == (300, cached)
    log.add_eviction(5, 600)
    # It lost its engine, and begins anew on this one: no eviction of this one ends.
    requests._note_scheduled(first, False, cached, 700)
    assert {name: column.tolist() for name, column in log.preemptions().items()} == {
        "id": [5, 5], "evicted_ns": [400, 600], "resumed_ns": [500, -1],
        "resumed_tokens": [20, 0],
    }  # fmt: skip
