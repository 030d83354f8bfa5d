import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.sim.core.waiting_queue import WaitingQueue
from schedlab.sim.request import RequestState
from tests.laws import arrival


def state(request_id, at_ns=0, priority=0):
    return RequestState(arrival(request_id, at_ns, priority=priority).request)


def by_priority(s, now_ns):
    return s.request.priority


def test_queue_orders_by_key_then_arrival_then_id():
    queue = WaitingQueue(by_priority)
    for s in (state(0, 5, 1), state(1, 5, 0), state(2, 3, 1), state(3, 5, 1)):
        queue.add(s, 0)
    assert [s.id for s in queue] == [1, 2, 0, 3]
    assert queue.head.id == 1


def test_queue_against_a_sorted_list_stays_equal():
    random = Random(0)
    queue, model = WaitingQueue(by_priority), []
    for i in range(5_000):
        if model and random.random() < 0.5:
            gone = model.pop(0 if random.random() < 0.7 else random.randrange(len(model)))
            queue.remove(gone, 0)
        else:
            model.append(state(i, random.randrange(50), random.randrange(3)))
            queue.add(model[-1], 0)
            model.sort(key=lambda s: (s.request.priority, s.request.arrival_ns, s.id))
        assert len(queue) == len(model)
        if i % 97 == 0:
            assert [s.id for s in queue] == [s.id for s in model]


def test_queue_without_anybody_left_holds_nobody_who_was_in_it():
    queue, waits = WaitingQueue(by_priority), [state(0), state(1)]
    before = [sys.getrefcount(one) for one in waits]
    for one in waits:
        queue.add(one, 0)
    for one in waits:
        queue.remove(one, 0)
    del one
    assert [sys.getrefcount(one) for one in waits] == before


def test_queue_remove_when_absent_raises():
    queue = WaitingQueue(by_priority)
    queue.add(state(0), 0)
    with pytest.raises(ValueError, match="not waiting"):
        queue.remove(state(1), 0)


def test_queue_head_when_empty_raises():
    with pytest.raises(IndexError, match="empty"):
        _ = WaitingQueue(by_priority).head


def test_queue_with_drifting_key_is_put_in_order_by_sort():
    queue = WaitingQueue(lambda s, now_ns: abs(s.request.arrival_ns - now_ns))
    early, late = state(0, 0), state(1, 100)
    queue.add(early, 0)
    queue.add(late, 0)
    assert [s.id for s in queue] == [0, 1]
    queue.sort(100)
    assert [s.id for s in queue] == [1, 0]
    queue.remove(early, 40)  # its key changed since the sort
    assert [s.id for s in queue] == [1]


@pytest.mark.slow
@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    changes=st.dictionaries(st.integers(0, 14), st.integers(0, 5)),
    taken=st.integers(0, 3),
)
def test_rekeying_some_requests_gives_the_order_of_sorting_all(keys, changes, taken):
    now = dict(enumerate(keys))
    states = [RequestState(arrival(i, prompt=1).request) for i in range(15)]
    queues = [WaitingQueue(lambda state, _: now[state.id]) for _ in range(2)]
    for queue in queues:
        for state in states[: len(keys)]:
            queue.add(state, 0)
        for _ in range(min(taken, len(keys) - 1)):
            queue.remove(queue.head, 0)
    now.update(changes)
    queues[0].rekey([states[i] for i in changes], 0)
    queues[1].sort(0)
    assert list(queues[0]) == list(queues[1])
    for state in list(queues[0]):
        queues[0].remove(state, 0)
    assert len(queues[0]) == 0
