"""Each clause of the laws of routers, broken alone: in one field, one request, one engine."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from schedlab.policies.routers import registry
from schedlab.policies.routers.router import Router
from schedlab.sim.config import EngineConfig
from schedlab.sim.request import Refinement, Request, Slo
from schedlab.testing import check_router
from schedlab.testing import router as laws
from schedlab.testing.cases import Case
from tests.laws import arrival

LIMITS = EngineConfig(num_blocks=40, max_model_len=60, block_size=4, max_num_seqs=2)
CASE = Case(tuple(arrival(i, 900 * i, 9 + i, 12 - i) for i in range(4)), LIMITS)


class Fixed(Router):
    """Sends everybody to the first engine."""

    def route(self, request, engines):
        return 0


OTHERS = {  # compiled fields take values of their type alone
    "slo": Slo(1.0), "application": "x", "session": "x", "tenant": "x", "prompt": "x",
    "prefix_hash_ids": (1, 2), "refinement": Refinement(3, (1.0,)),
}  # fmt: skip


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", [field.name for field in fields(Request)])
def test_router_that_writes_one_field_of_one_request_is_told_which(name, number, monkeypatch):
    """Of the first or the last."""
    monkeypatch.setattr(laws, "_run", ask_all)

    class Writes(Router):
        def route(self, request, engines):
            if request.id == number and engines == "engines of 3":
                setattr(request, name, OTHERS.get(name, 77))
            return request.id

    law = rf"^route\(\) changes {name} of request {number} from "
    with pytest.raises(AssertionError, match=law):
        laws.changes_no_request(Writes, CASE)
    laws.changes_no_request(Fixed, CASE)


def ask_all(router, case, size):
    """Ask a router about every request, and keep the answers."""
    sent = [replace(one.request) for one in case.workload]
    places = [router.route(request, f"engines of {size}") for request in sent]
    assert places in ([0, 1, 2, 3], [0] * 4), "an answer is handed on"


@pytest.mark.parametrize("wrong", [None, 1, 2, 5])
@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [1, 1, 2, 3], []])
def test_every_request_leaves_fleets_of_one_two_and_five_engines_once(wrong, ids, monkeypatch):
    asked, made = [], []

    def run(router, case, size):
        asked.append((router, case, size))
        told = ids if size == wrong else [0, 1, 2, 3]
        return SimpleNamespace(requests=lambda: {"id": np.array(told)})

    monkeypatch.setattr(laws, "_run", run)

    def make():
        made.append(len(made))
        return made[-1]

    if wrong is None:
        laws.names_an_engine(make, CASE)
        assert asked == [(0, CASE, 1), (1, CASE, 2), (2, CASE, 5)]
        return
    with pytest.raises(AssertionError, match=r"^not every request left the fleet once$"):
        laws.names_an_engine(make, CASE)
    assert asked[-1] == (len(made) - 1, CASE, wrong)


@pytest.mark.parametrize("row", [None, 0, 1, 2, 3])
def test_same_engines_are_chosen_again_for_every_request(row, monkeypatch):
    asked = []

    def run(router, case, size):
        assert (case, size) == (CASE, 3)
        engines = np.array([0, 1, 2, 1])
        if row is not None and asked:
            engines[row] += 1
        asked.append(router)
        return SimpleNamespace(requests=lambda: {"engine": engines})

    monkeypatch.setattr(laws, "_run", run)
    if row is None:
        laws.draws_from_its_stream_alone(object, CASE)
    else:
        with pytest.raises(AssertionError, match=r"^\[0, 1, 2, 1\], then \["):
            laws.draws_from_its_stream_alone(object, CASE)
    assert len({id(router) for router in asked}) == 2


@pytest.mark.parametrize("name", ["engine", "finish_ns", "rate", None])
@pytest.mark.parametrize("row", range(3))
def test_all_that_is_told_of_requests_is_the_same_step_by_step(name, row, monkeypatch):
    asked = []
    nan = float("nan")

    def run(router, case, size):
        columns = {
            "engine": np.array([0, 1, 2]), "finish_ns": np.array([5, 6, 7]),
            "rate": np.array([1.0, nan, nan]), "tenant": np.array(["a", "b", None], dtype=object),
        }  # fmt: skip
        if asked and name is not None:
            columns[name][row] = 9
        asked.append((router, case, size))
        return SimpleNamespace(requests=lambda: columns)

    monkeypatch.setattr(laws, "_run", run)
    if name is None:
        laws.sees_what_is_there_step_by_step(object, CASE)
    else:
        with pytest.raises(AssertionError, match=f"^{name} differs with fast_forward off$"):
            laws.sees_what_is_there_step_by_step(object, CASE)
    slow = replace(CASE, limits=replace(LIMITS, fast_forward=False))
    assert [one[1:] for one in asked] == [(CASE, 3), (slow, 3)]
    assert asked[0][0] is not asked[1][0]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(("place", "number"), [(0, 0), (1, 0), (2, 0), (0, 3), (2, 3)])
def test_router_that_looks_at_any_engine_for_any_request_has_to_say_so(looks, place, number):
    seen = []

    class Peeps(Router):
        looks_at_engines = looks

        def route(self, request, engines):
            seen.append((request.id, [engine.index for engine in engines]))
            return engines[place].num_running if request.id == number else 0

    if looks:
        laws.looks_only_if_it_says_so(Peeps, CASE)
        assert seen == []
        return
    with pytest.raises(AssertionError, match=r"^it asked an engine for num_running, and looks_at_"):
        laws.looks_only_if_it_says_so(Peeps, CASE)
    assert seen == [(i, [0, 1, 2]) for i in range(number + 1)]


def test_what_a_blind_router_writes_is_written_to_a_request_of_its_own():
    class Shortens(Router):
        looks_at_engines = False

        def route(self, request, engines):
            request.prompt_tokens = 1
            return 0

    laws.looks_only_if_it_says_so(Shortens, CASE)
    assert [one.request.prompt_tokens for one in CASE.workload] == [9, 10, 11, 12]


@pytest.mark.parametrize(("engines", "caches"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("place", [0, 1])
def test_cache_of_any_engine_is_hidden_from_who_says_that_it_does_not_look(
    engines, caches, place, monkeypatch
):
    asked = []

    def run(router, case, size):
        asked.append((case, size))
        two = [SimpleNamespace(index=i, cached_tokens=lambda _: 5, num=i + 3) for i in range(2)]
        assert router.route(case.workload[0].request, two) == 9

    class Asks(Router):
        looks_at_engines = engines
        looks_at_caches = caches
        peeps = True

        def route(self, request, engines):
            if self.peeps:
                engines[place].cached_tokens(request)
            assert [engine.num for engine in engines] == [3, 4]
            return 9

    class AsksNot(Asks):
        peeps = False

    monkeypatch.setattr(laws, "_run", run)
    laws.asks_caches_only_if_it_says_so(AsksNot, CASE)
    assert asked == ([(CASE, 2)] if engines and not caches else [])
    if engines and not caches:
        with pytest.raises(
            AssertionError, match=r"^it asked for cached_tokens, and looks_at_caches"
        ):
            laws.asks_caches_only_if_it_says_so(Asks, CASE)
    else:
        laws.asks_caches_only_if_it_says_so(Asks, CASE)


@pytest.mark.parametrize(("place", "fault"), [
    (0, None), (1, None), (2, "^place 2 of 2 engines$"), (-1, "^place -1 of 2 engines$"),
])  # fmt: skip
@pytest.mark.parametrize("caches", [False, True])
def test_place_is_one_in_the_list_that_was_given(place, fault, caches, monkeypatch):
    offered = []

    def run(router, case, size):
        assert (case, size, router.looks_at_caches) == (CASE, 3, caches)
        engine = [router.route(one.request, ["a", "b", "c"]) for one in case.workload]
        return SimpleNamespace(requests=lambda: {"engine": np.array(engine)})

    class Places(Router):
        looks_at_caches = caches

        def route(self, request, engines):
            offered.append((request.id, engines))
            return place

    monkeypatch.setattr(laws, "_run", run)
    if fault is None:
        laws.minds_the_index_not_the_place(Places, CASE)
        assert offered == [(i, ["b", "c"]) for i in range(4)]
    else:
        with pytest.raises(AssertionError, match=fault):
            laws.minds_the_index_not_the_place(Places, CASE)


@pytest.mark.parametrize("row", range(3))
def test_no_request_is_sent_to_the_engine_that_was_not_offered(row, monkeypatch):
    engine = np.array([1, 2, 1])
    told = SimpleNamespace(requests=lambda: {"engine": engine})
    monkeypatch.setattr(laws, "_run", lambda router, case, size: told)
    laws.minds_the_index_not_the_place(Fixed, CASE)
    engine[row] = 0
    with pytest.raises(AssertionError, match="engine that was not offered was sent request"):
        laws.minds_the_index_not_the_place(Fixed, CASE)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_fleet_is_of_engines_that_are_proved_after_every_step(size, monkeypatch):
    seen, router = [], Fixed()
    monkeypatch.setattr(laws, "check_conservation", lambda engine: seen.append(engine))
    real = laws.simulate_cluster

    def simulate(engines, given, sent):
        assert given is router
        assert len({id(engine) for engine in engines}) == size == len(engines)
        for engine in engines:
            assert engine.config is LIMITS
            assert type(engine.policy).__name__ == "ContinuousBatching"
        assert len({id(engine.policy) for engine in engines}) == size
        assert len({id(engine.executor) for engine in engines}) == size
        assert sent == [*CASE.workload] or repr(sent) == repr([*CASE.workload])
        assert not any(a.request is b.request for a, b in zip(sent, CASE.workload, strict=True))
        return real(engines, given, sent)

    monkeypatch.setattr(laws, "simulate_cluster", simulate)
    log = laws._run(router, CASE, size)
    assert log.requests()["id"].tolist() == [0, 1, 2, 3]
    assert len(seen) > 4


def test_router_is_made_of_a_class_a_name_or_a_function_for_all_cases_and_laws(monkeypatch):
    tried = []
    monkeypatch.setattr(
        laws, "verdicts",
        lambda name, make, known, cases, only: tried.append(
            (name, make(), make(), known, [*cases], [*cases], only)
        ) or (),
    )  # fmt: skip
    check_router(Fixed, only="one", cases=[CASE])
    check_router("random", only=["two"], cases=())
    check_router(lambda: Fixed())
    names = [name for name, *_ in tried]
    assert names == ["router Fixed", "router random", "router <lambda>"]
    for _, one, other, known, cases, again, _ in tried:
        assert one is not other
        assert type(one) is type(other)
        assert known is laws.ROUTER_LAWS
        assert repr(cases) == repr(again), "also for the next law"
        draws = [router.rng.integers(1 << 30, size=4).tolist() for router in (one, other)]
        assert draws[0] == draws[1]
    assert type(tried[1][1]) is type(registry.make("random"))
    assert [repr(cases) for _, _, _, _, cases, *_ in tried] == [
        repr([CASE]), "[]", repr([*laws.fleet_cases()]),
    ]  # fmt: skip
    assert len([*laws.fleet_cases()]) == 10
    assert [only for *_, only in tried] == ["one", ["two"], None]
    assert [*laws.ROUTER_LAWS] == [
        "looks_only_if_it_says_so", "changes_no_request", "names_an_engine",
        "draws_from_its_stream_alone", "sees_what_is_there_step_by_step",
        "asks_caches_only_if_it_says_so", "minds_the_index_not_the_place",
    ]  # fmt: skip
