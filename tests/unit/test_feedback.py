"""Quanta used up in the course of several steps: as if each step had been charged by itself."""

import pytest

from schedlab.policies.feedback import Standing, charge, least_left_ns
from schedlab.sim.core.plan import FOREVER, BatchPlan
from schedlab.sim.request import RequestState
from schedlab.sim.rng import stream
from tests.laws import arrival

QUANTUM_NS = 100


def plan_of(decodes, chunks=(), start_ns=0):
    """Have a plan that lists its decodes, or not."""
    return BatchPlan(
        decodes, chunks, (), (), (), (), 0, "leave", False, 1, FOREVER, start_ns, tuple
    )


class Queues:
    """Lets who used up a quantum drop to the front of the next level, with a quantum of its own."""

    def __init__(self):
        self.front = 0
        self.dropped = []

    def drop(self, place):
        self.front -= 1
        place.level, place.position = place.level + 1, self.front
        place.left_ns = QUANTUM_NS << place.level
        self.dropped.append(place)


def standings(rng, states):
    found = {}
    for position, state in enumerate(states):
        level = int(rng.integers(0, 3))
        found[state] = Standing(level, int(rng.integers(1, 120)), position, 0)
        found[state].owes_token = bool(rng.integers(0, 4) == 0)
    return found


def told(places):
    return [
        (p.level, p.position, p.left_ns, p.last_ran_ns, p.output_tokens, p.owes_token)
        for p in places.values()
    ]


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_steps_charged_at_once_leave_all_where_single_steps_do(seed, listed):
    rng = stream(seed, "quanta")
    states = [RequestState(arrival(i).request) for i in range(6)]
    # The same twice; of the last request nobody keeps anything.
    at_once, by_step = (standings(stream(seed, "places"), states[:5]) for _ in range(2))
    durations_ns = [int(ns) for ns in rng.integers(1, 90, int(rng.integers(2, 9)))]
    decodes = tuple(states) if listed else None
    queues, stepwise = Queues(), Queues()
    charge(plan_of(decodes, start_ns=1_000), states, durations_ns, 1_000 + sum(durations_ns),
           at_once, queues.drop)  # fmt: skip
    now_ns = 1_000
    for ns in durations_ns:
        plan, now_ns = plan_of(decodes, start_ns=now_ns), now_ns + ns
        charge(plan, states, [ns], now_ns, by_step, stepwise.drop)
    assert told(at_once) == told(by_step)
    assert len(queues.dropped) == len(stepwise.dropped) > 0


def test_who_ran_is_charged_for_the_step_and_who_did_not_is_left_alone():
    ran, rested, gone = (RequestState(arrival(i).request) for i in range(3))
    places = {state: Standing(1, 500, 7, 30) for state in (ran, rested)}
    charge(plan_of((ran, gone), start_ns=1_000), [ran, rested], [120], 1_120, places, Queues().drop)
    assert told(places) == [(1, 7, 380, 1_120, 1, False), (1, 7, 500, 30, 0, False)]


def test_prompt_under_way_owes_a_token_and_drops_once_it_is_there():
    state = RequestState(arrival(0, prompt=9).request)
    places, queues = {state: Standing(0, 100, 3, 0)}, Queues()
    state._computed = 4
    charge(plan_of((), ((state, 4),), 0), [state], [150], 150, places, queues.drop)
    # Its quantum is used up, but it goes on to its first token.
    assert told(places) == [(0, 3, -50, 150, 0, True)]
    assert least_left_ns([state], places) is None
    state._computed, state._generated = 9, 1
    charge(plan_of((), ((state, 5),), 150), [state], [70], 220, places, queues.drop)
    assert told(places) == [(1, -1, 200, 220, 1, False)]
    assert least_left_ns([state], places) == 200


def test_those_who_drop_in_one_step_keep_their_order_prompts_behind_decodes():
    states = [RequestState(arrival(i, prompt=5).request) for i in range(4)]
    places = {s: Standing(0, 10, 5 - s.id, 0) for s in states}
    places[states[0]].level = 1
    states[3]._computed, states[3]._generated = 5, 1  # its prompt is done with this step
    queues = Queues()
    chunks = ((states[3], 5),)
    charge(plan_of(tuple(states[:3]), chunks, 0), states, [10], 10, places, queues.drop)
    # By level and position: 2, 1, then 0 of the level behind, then the prompt.
    order = sorted(places, key=lambda s: (places[s].level, places[s].position))
    assert [s.id for s in order] == [2, 1, 3, 0]
    assert queues.dropped == [places[states[i]] for i in (3, 0, 1, 2)]


def test_least_left_is_that_of_the_first_quantum_to_be_used_up():
    states = [RequestState(arrival(i).request) for i in range(3)]
    places = {s: Standing(0, left, 0, 0) for s, left in zip(states, (70, 30, 50), strict=True)}
    assert least_left_ns(states, places) == 30
    assert least_left_ns(states[::2], places) == 50
    assert least_left_ns([], places) == FOREVER
    places[states[2]].owes_token = True
    assert least_left_ns(states, places) is None


def test_drafts_are_counted_as_the_tokens_that_came():
    state = RequestState(arrival(0).request)
    state._generated = 7
    places = {state: Standing(0, 500, 0, 0)}
    charge(plan_of((state,)), [state], [10], 10, places, Queues().drop, drafts=True)
    assert places[state].output_tokens == 7
    charge(plan_of((state,)), [state], [10, 10], 20, places, Queues().drop)
    assert places[state].output_tokens == 9
