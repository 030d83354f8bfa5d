"""How long a policy is held to its promise: of an engine whose every answer is set by the test."""

from types import SimpleNamespace

import pytest

from schedlab.sim.core.plan import BatchPlan
from schedlab.sim.core.promise import PromiseCheck, difference
from schedlab.sim.errors import PolicyLied
from schedlab.sim.request import RequestState
from tests.laws import arrival


class Answers:
    """An engine that promised three steps until 50 ns, and then decides otherwise."""

    def __init__(self):
        self.now_ns = 10
        self.said, self.part = "first", 0
        self.kv = SimpleNamespace(
            free_blocks=6, grows=True, num_evictions=4, rollback=lambda: None,
            blocks_before_eviction=lambda: self.blocks_before_eviction,
        )  # fmt: skip
        self.blocks_before_eviction = 5
        self.tokens, self.need = 7, 2
        decodes = SimpleNamespace(
            tokens_next_step=lambda: self.tokens, blocks_next_step=lambda: self.need
        )
        self.requests = SimpleNamespace(num_events=8, decodes=decodes)
        self.view = SimpleNamespace(looked_at_cache=False)
        self.chooses_drafts_next = False
        self.planned = {"chunks": (), "admitted": (), "preempted": (), "rejected": ()}
        self.evicts = 0

    def make_plan(self):
        self.kv.num_evictions += self.evicts
        said = tuple(self.said if place == self.part else () for place in range(9))
        return SimpleNamespace(decision=lambda: said, max_steps=3, until_ns=50, **self.planned)

    def blame(self, what):
        return f"policy Stub: {what}"


def is_held(engine, check):
    """Let the engine decide otherwise, and return whether that is refused."""
    engine.said = "second"
    try:
        check.make_plan()
    except PolicyLied:
        return True
    return False


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({}, True),
        ({"now_ns": 49}, True),
        ({"now_ns": 50}, False),
        ({"tokens": 6}, False),
        ({"tokens": 8}, False),
        ({"need": 6}, True),
        ({"need": 7}, False),
        ({"need": 7, "kv.grows": False}, True),
        ({"need": 5, "view.looked_at_cache": True}, True),
        ({"need": 6, "view.looked_at_cache": True}, False),
        ({"need": 6, "view.looked_at_cache": True, "blocks_before_eviction": 9}, True),
        ({"requests.num_events": 9}, False),
        ({"requests.num_events": 7}, False),
    ],
)
def test_promise_is_held_to_until_time_events_or_memory_end_it(change, held):
    engine = Answers()
    check = PromiseCheck(engine)
    check.make_plan()
    for name, value in change.items():
        part, _, leaf = name.rpartition(".")
        setattr(getattr(engine, part) if part else engine, leaf, value)
    assert is_held(engine, check) is held


@pytest.mark.parametrize("part", range(9))
def test_promise_is_of_each_part_of_a_decision(part):
    engine = Answers()
    engine.part = part
    check = PromiseCheck(engine)
    check.make_plan()
    assert is_held(engine, check)


@pytest.mark.parametrize(("kept", "held"), [(0, True), (1, True), (2, False)])
def test_promise_of_three_steps_is_held_to_for_two_more(kept, held):
    engine = Answers()
    check = PromiseCheck(engine)
    for _ in range(1 + kept):
        check.make_plan()
    assert is_held(engine, check) is held


@pytest.mark.parametrize("what", ["chunks", "admitted", "preempted", "rejected"])
def test_plan_that_does_more_than_decode_promises_nothing(what):
    engine = Answers()
    engine.planned[what] = (1,)
    check = PromiseCheck(engine)
    check.make_plan()
    engine.planned[what] = ()
    assert not is_held(engine, check)


@pytest.mark.parametrize(
    ("looks", "evicts", "held"),
    [(False, 0, True), (False, 1, True), (True, 0, True), (True, 1, False)],
)
def test_plan_that_looked_at_a_cache_and_evicts_of_it_promises_nothing(looks, evicts, held):
    engine = Answers()
    engine.view.looked_at_cache, engine.evicts = looks, evicts
    check = PromiseCheck(engine)
    check.make_plan()
    assert is_held(engine, check) is held


def test_difference_of_decisions_names_each_part_that_differs():
    first, second = tuple("abcdefghi"), tuple("aBcDEFGHI")
    assert difference("it", first, second) == (
        "it: admitted: b then B; swapped: d then D; rejected: e then E; padding: f then F; "
        "finished: g then G; pad_finished: h then H; loading: i then I"
    )


def test_decision_of_a_plan_is_all_that_it_does_and_nothing_that_it_promises():
    states = [RequestState(arrival(i, prompt=9).request) for i in range(4)]
    one, two, *_ = states
    given = {
        "decodes": (one,), "chunks": ((two, 5),), "admitted": (two,), "preempted": (states[2],),
        "swapped": (), "rejected": ((states[3], "a reason"),), "padding_tokens": 3,
        "finished": "leave", "pad_finished": False, "max_steps": 1, "until_ns": 7, "start_ns": 2,
        "list_decodes": lambda: (one,), "trimmed": (), "loading": ((two, ((0, (1, 2)),)),),
    }  # fmt: skip

    def decided(**changes):
        return BatchPlan(**{**given, **changes}).decision()

    same = decided()
    for name, other in (
        ("decodes", (two,)), ("decodes", (one, states[3])), ("chunks", ((two, 6),)),
        ("chunks", ((states[3], 5),)), ("admitted", ()), ("admitted", (one,)),
        ("preempted", (one,)), ("swapped", (states[2],)), ("rejected", ()),
        ("rejected", ((states[3], "another"),)), ("rejected", ((one, "a reason"),)),
        ("padding_tokens", 4), ("finished", "hold"), ("pad_finished", True),
        ("loading", ((two, ((0, (1, 2, 3)),)),)), ("loading", ((one, ((0, (1, 2)),)),)),
        ("loading", ()), ("trimmed", ((states[3], 1),)),
    ):  # fmt: skip
        assert decided(**{name: other}) != same, (name, other)
    for name, other in (
        ("decodes", None), ("max_steps", 9), ("until_ns", 8), ("start_ns", 3),
        ("loading", ((two, ((0, (1,)), (1, (2,)))),)),
    ):  # fmt: skip
        assert decided(**{name: other}) == same, (name, other)
