"""Each law of routers has one that breaks it, and is asked of a fleet by its very words."""

import re
from itertools import count

import numpy as np
import pytest

from schedlab.policies.routers import registry
from schedlab.policies.routers.router import Router
from schedlab.sim.config import EngineConfig
from schedlab.testing import LawBroken, check_router
from schedlab.testing import router as router_laws
from schedlab.testing.cases import Case
from schedlab.testing.router import ROUTER_LAWS, _with_prefixes, fleet_cases
from tests.laws import arrival

LIMITS = EngineConfig(
    num_blocks=40, max_model_len=60, block_size=4, max_num_seqs=2, max_num_batched_tokens=16
)
PLAIN = Case(tuple(arrival(i, 900 * i, 9 + i, 12 - i) for i in range(5)), LIMITS)
CASE = _with_prefixes(PLAIN)


class Fair(Router):
    """Looks at counts and caches, draws a number, and says so."""

    looks_at_caches = True

    def route(self, request, engines):
        loads = [(e.num_in_flight, -e.cached_tokens(request), self.rng.random()) for e in engines]
        return self.least(loads)


class Blind(Router):
    looks_at_engines = False

    def route(self, request, engines):
        return (request.id + engines[0].index) % len(engines)


class Beyond(Router):
    def route(self, request, engines):
        return len(engines)


class Remembers(Router):
    numbers = count()

    def __init__(self):
        self.number = next(self.numbers)  # which one it is of those ever made

    def route(self, request, engines):
        return self.number % len(engines)


class CountsPlans(Router):
    def route(self, request, engines):
        return sum(engine._engine.num_plans for engine in engines) % len(engines)


class Peeps(Router):
    looks_at_engines = False

    def route(self, request, engines):
        return self.least([engine.num_running for engine in engines])


class AsksCaches(Router):
    def route(self, request, engines):
        return self.least([-engine.cached_tokens(request) for engine in engines])


class PeepsAmongMany(Router):
    looks_at_engines = False

    def route(self, request, engines):
        return self.least([engine.num_waiting for engine in engines]) if len(engines) > 1 else 0


class AsksCachesOfOthers(Router):
    def route(self, request, engines):
        return self.least([0, *(-engine.cached_tokens(request) for engine in engines[1:])])


class NamesTheIndex(Router):
    def route(self, request, engines):
        return engines[-1].index


class NamesNone(Router):
    def route(self, request, engines):
        return -1 if engines[0].index else 0


class Shortens(Router):
    def route(self, request, engines):
        request.prompt_tokens = 1
        return request.id % len(engines)


BREAKERS = [
    (Shortens, "changes_no_request", r"changes prompt_tokens of request 0 from 2 to 1"),
    (Beyond, "names_an_engine", r"returned 1, and there are engines 0 to 0"),
    (Remembers, "draws_from_its_stream_alone", r"\], then \["),
    (CountsPlans, "sees_what_is_there_step_by_step", "differs with fast_forward off"),
    (Peeps, "looks_only_if_it_says_so", "asked an engine for num_running, and looks_at_engines is"),
    (AsksCaches, "asks_caches_only_if_it_says_so", "cached_tokens, and looks_at_caches is False"),
    (PeepsAmongMany, "looks_only_if_it_says_so", "asked an engine for num_waiting, and looks_at"),
    (AsksCachesOfOthers, "asks_caches_only_if_it_says_so", "and looks_at_caches is False"),
    (NamesTheIndex, "minds_the_index_not_the_place", "place 2 of 2 engines"),
    (NamesNone, "minds_the_index_not_the_place", "place -1 of 2 engines"),
]


@pytest.mark.parametrize(
    ("router", "law", "why"), BREAKERS, ids=lambda x: getattr(x, "__name__", "")
)
def test_router_that_breaks_a_law_is_caught_by_that_law_and_its_words(router, law, why):
    with pytest.raises(LawBroken) as caught:
        check_router(router, only=law, cases=[CASE])
    assert caught.value.law == law
    assert re.search(why, str(caught.value)), str(caught.value)
    assert f"router {router.__name__}" in str(caught.value)


def test_what_a_router_writes_under_one_law_does_not_hide_it_from_the_next():
    with pytest.raises(LawBroken, match="prompt_tokens of request 0") as caught:
        check_router(Shortens, cases=[CASE])
    assert caught.value.law == "changes_no_request"
    assert [a.request.prompt_tokens for a in CASE.workload] == [9, 10, 11, 12, 13]


def test_every_law_of_routers_has_one_that_breaks_it():
    assert {law for _, law, _ in BREAKERS} == set(ROUTER_LAWS)


@pytest.mark.parametrize("router", [Fair, Blind, "random", "round_robin", "prefix_aware"])
def test_router_that_keeps_all_laws_breaks_none(router):
    check_router(router, cases=[CASE])


def test_router_is_made_anew_with_a_stream_of_its_own_for_every_run():
    made = []

    def make():
        made.append(Fair())
        return made[-1]

    check_router(make, only="draws_from_its_stream_alone", cases=[CASE])
    assert len(made) == 2
    states = [one.rng.bit_generator.state["state"] for one in made]
    assert states[0] == states[1] != np.random.default_rng(0).bit_generator.state["state"]
    assert registry.make("random").rng is not None


def test_laws_of_routers_are_asked_of_every_case():
    class NotTheThird(Router):
        def route(self, request, engines):
            assert request.prompt_tokens != 33, "it was asked"
            return 0

    cases = [CASE, CASE, Case((arrival(0, 0, 33, 2),), LIMITS)]
    with pytest.raises(LawBroken, match="it was asked"):
        check_router(NotTheThird, only="names_an_engine", cases=cases)


def test_prompts_share_two_blocks_with_every_third_and_sessions_with_every_fourth():
    work = tuple(arrival(i, 0, length, 2) for i, length in enumerate([3, 4, 8, 21, 19]))
    found = _with_prefixes(Case(work, LIMITS))
    assert [a.request.prefix_hash_ids for a in found.workload] == [
        (),
        (1000,),
        (2000, 2001),
        (0, 1, 400_000, 400_001, 400_002),
        (1000, 1001, 500_000, 500_001),
    ]
    sessions = [a.request.session for a in found.workload]
    assert sessions == [f"session {i}" for i in (0, 1, 2, 3, 0)]
    assert found.limits.enable_prefix_caching
    assert [a.output_tokens for a in found.workload] == [2] * 5


def test_router_is_tried_with_sessions_and_prefixes_unless_cases_are_given(monkeypatch):
    tried = []
    monkeypatch.setattr(
        router_laws, "verdicts", lambda name, make, laws, cases, only: tried.append(cases) or ()
    )
    check_router(Fair)
    check_router(Fair, cases=[PLAIN])
    assert repr(tried) == repr([list(fleet_cases()), [PLAIN]])
    requests = [one.request for case in tried[0] for one in case.workload]
    assert all(request.session for request in requests)
    assert any(request.prefix_hash_ids for request in requests)
    assert all(case.limits.enable_prefix_caching for case in tried[0])


def test_field_of_a_request_that_is_not_even_itself_is_unchanged_if_it_is_the_same():
    work = tuple(arrival(i, 0, 5, 3, predicted_tokens=float("nan")) for i in range(2))
    check_router(Blind, only="changes_no_request", cases=[Case(work, LIMITS)])
