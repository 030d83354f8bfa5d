"""Who is served whole by an engine for answers, and what becomes of engines chosen beforehand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from schedlab.experiments.running.run import run as run_experiment
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.routers.least_outstanding_requests import LeastOutstandingRequests
from schedlab.sim.drive import local_prefill
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.local_prefill import LocalPrefill
from schedlab.sim.errors import SpecError
from tests.laws import arrival
from tests.unit.test_disaggregation import CACHING, CONFIG, NAMES, cases, run
from tests.workloads import share


class World:
    """Engines 0 and 1 for prompts, 2 and 3 for answers, of which the router names the last."""

    def __init__(self, monkeypatch, **plan):
        self.told = []
        self.members = [self.member(index) for index in range(4)]
        self.roles = {("decode",): self.members[2:], ("prefill", "mixed"): self.members[:2]}
        self.fleet = SimpleNamespace(
            members=self.members, serving=lambda *roles: self.roles[roles],
            arrivals={7: SimpleNamespace(request="request 7")}, on_request_gone=None,
            settle_soon=lambda member: self.told.append(("settle", member.index)),
        )  # fmt: skip
        monkeypatch.setattr(local_prefill, "chosen", lambda router, request, known: known[-1].index)
        monkeypatch.setattr(
            local_prefill, "note_sent",
            lambda request, live, known: self.told.append(("sent", request.id, known.index)),
        )  # fmt: skip
        self.local = LocalPrefill(self.fleet, Disaggregation((), "router", **plan))

    def member(self, index):
        live = SimpleNamespace(
            cached_tokens=lambda request: 16,
            count=lambda request, sign: self.told.append(("count", request, index, sign)),
        )
        known = SimpleNamespace(index=index, backlog_tokens=100 * index + 50, num_waiting=index + 2)
        return SimpleNamespace(index=index, live=live, known=known)


@pytest.mark.parametrize(
    ("prompt_tokens", "keys", "is_local"),
    [
        (20, {"local_prompt_tokens": 20}, True),
        (21, {"local_prompt_tokens": 20}, False),
        (21, {"local_queue_tokens": 50}, False),
        (21, {"local_queue_tokens": 49}, True),  # the least of 50 and 150
        (21, {"local_queue_requests": 5}, False),
        (21, {"local_queue_requests": 4}, True),  # two and three
        (36, {"local_uncached_tokens": 20}, True),
        (37, {"local_uncached_tokens": 20}, False),
    ],
)
def test_prompt_that_is_short_or_cached_or_would_wait_is_computed_where_it_is_answered(
    monkeypatch, prompt_tokens, keys, is_local
):
    world = World(monkeypatch, **keys)
    request = SimpleNamespace(id=7, prompt_tokens=prompt_tokens)
    assert world.fleet.stays_local(request) is (world.members[3] if is_local else None)
    world.roles["prefill", "mixed"] = []
    assert world.fleet.stays_local(request) is world.members[3], "nobody else computes prompts"
    world.roles["decode",] = []
    assert world.fleet.stays_local(request) is None


def test_engine_that_is_to_go_on_counts_a_request_until_that_is_withdrawn(monkeypatch):
    world = World(monkeypatch, local_uncached_tokens=20)
    request = SimpleNamespace(id=7, prompt_tokens=90)
    assert world.local.choose(request) is None
    assert world.told == [("sent", 7, 3)]
    assert world.local.choose(request) is None, "it lost the engine of its prompt"
    withdrawn = [("count", "request 7", 3, -1), ("settle", 3)]
    assert world.told == [("sent", 7, 3), *withdrawn, ("sent", 7, 3)]
    world.told.clear()
    world.fleet.on_request_gone(7)
    world.fleet.on_request_gone(7)
    assert world.told == withdrawn
    assert world.local.take(7) is None


def test_engine_that_was_to_go_on_and_died_is_forgotten(monkeypatch):
    world = World(monkeypatch, local_uncached_tokens=20)
    world.local.choose(SimpleNamespace(id=7, prompt_tokens=90))
    world.local.died(world.members[2])
    assert world.local.has_promised(7)
    world.local.died(world.members[3])
    assert not world.local.has_promised(7)
    assert world.told == [("sent", 7, 3)], "there is nobody to count it less"


def test_request_whose_prompt_is_mostly_cached_is_served_whole_there():
    work = [arrival(0, 0, 20, 3, **NAMES), arrival(1, 50_000, 20, 3, **NAMES)]
    for most, engine_of_prompt in ((3, 0), (4, -1)):
        log = run(work, configs=[CONFIG, CACHING], local_uncached_tokens=most)
        requests = log.requests()
        assert requests["prefill_engine"].tolist() == [0, engine_of_prompt]
        assert requests["prefix_hit_tokens"].tolist() == [0, 16 if most == 4 else 0]


def test_request_goes_on_where_it_was_promised_to_whoever_is_freer_then():
    # When the second comes the first is counted at engine 1; when its prompt is done at none.
    roles, configs = ("prefill", "decode", "decode"), [CONFIG, CACHING, CACHING]
    work = [arrival(0, 0, 20, 2), arrival(1, 100, 40, 2), arrival(2, 200, 8, 2)]
    log = run(work, roles, configs, local_uncached_tokens=0)
    assert log.requests()["engine"].tolist() == [1, 2, 1]


def disaggregated(**cluster):
    return make_spec(
        {
            "workload": {"trace": "azure-conv", "num_requests": 30, "request_rate": 20},
            "cluster": {"pools": {"p": {"role": "prefill"}, "d": {"role": "decode"}}, **cluster},
        }
    )


def test_number_of_requests_that_wait_decides_in_an_experiment():
    whole = [
        (run_experiment(disaggregated(local=local)).requests["prefill_engine"] < 0).sum()
        for local in ({"max_queued_requests": 0}, {"max_queued_requests": 1000})
    ]
    assert whole[0] > whole[1]


def test_key_about_caches_that_no_engine_has_is_refused():
    with pytest.raises(SpecError, match=r"local\.max_uncached_tokens: .*pools\.d\.engine\.enable"):
        run_experiment(disaggregated(local={"max_uncached_tokens": 100}))


def test_unknown_key_of_prompts_that_stay_is_told_with_the_nearest():
    with pytest.raises(SpecError, match=r"did you mean max_uncached_tokens"):
        disaggregated(local={"max_uncached_token": 100})


class Remembering(LeastOutstandingRequests):
    """Sends requests where the fewest are, and keeps the engines that it was shown."""

    def route(self, request, engines):
        self.shown = {engine.index: engine for engine in engines}
        return super().route(request, engines)


@given(cases())
@settings(max_examples=share(0.3))
def test_nobody_is_counted_anywhere_when_all_are_answered(case):
    router = Remembering()
    run(**case | {"decode_router": router, "local_uncached_tokens": 5, "staleness_ns": 0})
    for engine in getattr(router, "shown", {}).values():
        counts = engine.num_in_flight, engine.prompt_tokens_in_flight, engine.num_waiting
        assert counts == (0, 0, 0)


@pytest.mark.parametrize("staleness_ns", [0, 3_000])
def test_requests_that_are_promised_an_engine_are_counted_there_once(staleness_ns):
    small = replace(CACHING, num_blocks=30)
    work = [arrival(i, 300 * i, 12 + 4 * (i % 4), 1 + i % 5) for i in range(12)]
    log = run(
        work, ("prefill", "decode", "decode"), [CONFIG, small, small], local_uncached_tokens=15,
        staleness_ns=staleness_ns,
    )  # fmt: skip
    assert log.requests()["generated_tokens"].tolist() == [a.output_tokens for a in work]
