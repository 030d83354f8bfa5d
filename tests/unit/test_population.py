"""Who an engine's requests are counted as, and what their memory, told apart by distinct counts."""

import pytest

from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.pipeline import BatchInFlight
from schedlab.sim.core.plan import FOREVER
from schedlab.sim.core.population import Population
from schedlab.sim.core.tiering import Tiering
from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.kv.paged import PagedKVCache
from schedlab.sim.record.copies import Copies
from schedlab.sim.request import RequestState, Status
from tests.laws import arrival

TIERED = {"enable_prefix_caching": True, "swap_space_blocks": 9, "kv_block_bytes": 100}


def some(first, count):
    return {i: RequestState(arrival(i).request) for i in range(first, first + count)}


def population(**keys):
    """Have 1 wait, 2 held back, 4 without a seat, and 8, 16, .. of each kind with one."""
    config = EngineConfig(num_blocks=9, max_model_len=9, **keys)
    found = Population(config, WaitingQueue(), PagedKVCache(9, 1))
    found.waiting.add(RequestState(arrival(0).request), 0)
    found.intake.requests = list(some(10, 2).values())
    found.holding = some(20, 4)
    found.running = some(100, 8)
    found.held = some(200, 16)
    found.leaving = list(some(300, 32).values())
    found.fetching = some(400, 64)
    found.loading = some(600, 128)
    found.in_pipeline.enter(BatchInFlight(some(1_000, 256), {}, None, {}, []))
    found.kept = some(2_000, 1)  # nobody counts who has been answered
    found.handed_over = some(2_100, 1)
    return found


@pytest.mark.parametrize("holds_back", ["async_scheduling", "arrivals_between_steps"])
def test_population_counts_each_kind_of_request_where_it_belongs(holds_back):
    found = population(**{holds_back: True})
    assert not found.is_plain
    assert found.num_waiting == 1 + 2 + 4
    assert found.num_running == 8 + 64 + 128 + 256
    assert found.num_seated == 8 + 16 + 32 + 64 + 128 + 256
    assert found.num_known == 1 + 4 + found.num_seated  # who is held back is not known yet


def test_plain_population_counts_its_queue_and_who_runs():
    found = Population(
        EngineConfig(num_blocks=9, max_model_len=9), WaitingQueue(), PagedKVCache(9, 1)
    )
    found.waiting.add(RequestState(arrival(0).request), 0)
    found.running = some(100, 8)
    assert found.is_plain
    assert (found.num_waiting, found.num_running, found.num_seated, found.num_known) == (1, 8, 8, 9)


@pytest.mark.parametrize(
    "keys",
    [
        {"arrivals_between_steps": True},
        {"async_scheduling": True},
        {"pipeline_parallel_size": 2},
        {"overrun_at_stop": True, "async_scheduling": True},
        {**TIERED, "kv_tiers": (KVTier("cpu", 9, 1e9, 1e9),)},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_population_is_not_plain_where_a_request_may_be_elsewhere(keys):
    config = EngineConfig(num_blocks=9, max_model_len=9, **keys)
    assert not Population(config, WaitingQueue(), PagedKVCache(9, 1)).is_plain


def test_population_has_in_flight_who_came_less_who_left_in_any_way():
    found = population()
    found.num_arrived, found.num_finished = 1_000, 100
    found.num_rejected, found.num_handed_over = 20, 3
    assert found.num_in_flight == 1_000 - 100 - 20 - 3


def test_population_lists_those_with_a_seat_by_their_admission():
    found = Population(
        EngineConfig(num_blocks=9, max_model_len=9), WaitingQueue(), PagedKVCache(9, 1)
    )
    found.running = dict(reversed(some(0, 3).items()))
    assert [state.id for state in found.seated()] == [2, 1, 0], "the order of who runs is that"
    found.leaving = list(some(10, 2).values())
    found.in_pipeline.enter(BatchInFlight(some(20, 2), {}, None, {}, []))
    found.held, found.loading = some(30, 1), some(40, 1)
    seats = {0: 6, 1: 5, 2: 0, 10: 4, 11: 1, 20: 3, 21: 2}
    for state in (*found.running.values(), *found.leaving, *found.in_pipeline):
        state._seat = seats[state.id]
    assert [state.id for state in found.seated()] == [2, 11, 21, 20, 10, 1, 0]


@pytest.mark.parametrize(
    ("num_tiers", "somebody", "sees_copies"),
    [
        (1, None, False),  # nobody here would be given what a copy brings
        (1, "waits", True),
        (1, "is loaded", True),
        (2, None, True),  # then it is copied on
        (1, "runs", False),
    ],
)
def test_population_plans_when_a_copy_is_done_only_where_somebody_sees_it(
    num_tiers, somebody, sees_copies
):
    tiers = tuple(KVTier(f"tier {i}", 9, 1e9, 1e9) for i in range(num_tiers))
    config = EngineConfig(num_blocks=9, max_model_len=90, kv_tiers=tiers, **TIERED)
    found = Population(config, WaitingQueue(), PagedKVCache(9, 16))
    assert found.next_event_ns == found.next_seen_ns == FOREVER
    found.kept_until_ns = {1: 950, 2: 900, 3: 990}
    assert found.next_event_ns == found.next_seen_ns == 900
    found.tiers = Tiering(config, lambda shape, k: 1, Copies())
    assert found.next_event_ns == 900
    state = RequestState(arrival(0, prompt=32).request)
    found.tiers.store(state, (7, 8))  # 200 bytes, a byte a nanosecond
    if somebody == "waits":
        found.waiting.add(state, 0)
    elif somebody is not None:
        (found.loading if somebody == "is loaded" else found.running)[0] = state
    assert found.next_event_ns == 200
    assert found.next_seen_ns == (200 if sees_copies else 900)
    found.kept_until_ns = {1: 150}
    assert found.next_event_ns == found.next_seen_ns == 150
    found.kept_until_ns = {}
    assert found.next_event_ns == 200
    assert found.next_seen_ns == (200 if sees_copies else FOREVER)


@pytest.mark.parametrize("granted", [0, 1, 4])
@pytest.mark.parametrize(
    ("case", "unnamed"),
    [
        ("plans no step ahead", 0),
        ("its prompt was computed by the last step", "granted, one at most"),
        ("took part in two steps", 1),
        ("took part in the last step, its first here, behind a prompt", 1),
        ("took part in the last step, its first here, known before", "granted, one at most"),
        ("joined the batch after the last step", 0),
        ("is in no batch", 0),
        ("the last step had no decodes", 0),
        ("has ended", 1),
        ("runs on though it has ended", 1),
    ],
)
def test_population_counts_the_token_in_flight_as_unnamed(case, unnamed, granted):
    now_ns = 500
    config = EngineConfig(
        num_blocks=9, max_model_len=90, async_scheduling=case != "plans no step ahead"
    )
    found = Population(config, WaitingQueue(), PagedKVCache(9, 16))
    state, other = (RequestState(arrival(i, prompt=8).request) for i in range(2))
    for one in (state, other):
        one.status, one._computed, one._generated, one._entry_ns = Status.RUNNING, 8, 1, 300
    found.decodes.join(other)
    found.step_decoded = case != "the last step had no decodes"
    found.decodes.advance(1)
    if case != "is in no batch":
        found.decodes.join(state)
    if case != "joined the batch after the last step":
        found.decodes.advance(1)
    if case in ("took part in two steps", "has ended", "runs on though it has ended"):
        found.decodes.advance(1)
    if case == "its prompt was computed by the last step":
        state._entry_ns = now_ns
    if case.endswith("known before"):
        state._entry_ns = -1
    if case.startswith("has ended"):
        found.step_decoded, state.status = False, Status.FINISHED
    if case.startswith("runs on"):
        found.step_decoded, found.overrun[0] = False, state
    wanted = unnamed if isinstance(unnamed, int) else min(granted, 1)
    assert found.unnamed_tokens(state, granted, now_ns) == wanted
