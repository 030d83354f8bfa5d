"""Laws of fleets, over what hypothesis draws: limits that differ by engine, routers, clients."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.router import Router
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.offer import cached_tokens, loads
from tests import laws
from tests.laws import LinearCost
from tests.workloads import configs, share, workloads

POLICIES = ("fcfs", "sjf", "static", "srtf", "vtc", "fastserve")


@st.composite
def fleets(draw):
    """Draw a workload and the engines, each with limits and a policy, that share it."""
    size = draw(st.integers(1, 4))
    return {
        "workload": draw(workloads()),
        "limits": [draw(configs()) for _ in range(size)],
        "policies": [draw(st.sampled_from(POLICIES)) for _ in range(size)],
        "slowness": [draw(st.sampled_from((1, 1, 3))) for _ in range(size)],
        "router": draw(st.sampled_from(routers.names())),
        "staleness_ns": draw(st.sampled_from((0, 0, 1_500, 50_000))),
        "max_concurrency": draw(st.sampled_from((None, None, 1, 3))),
    }


def run(workload, limits, policies, slowness, router, staleness_ns, max_concurrency, fast=True):
    engines = [
        Engine(
            config if fast else laws.slow(config),
            registry.make(policy),
            SimExecutor(Pricing(LinearCost(1000 * slow, 10 * slow, slow))),
            check_conservation,
        )
        for config, policy, slow in zip(limits, policies, slowness, strict=True)
    ]
    made = router if isinstance(router, Router) else routers.make(router)
    log = simulate_cluster(engines, made, workload, max_concurrency, staleness_ns=staleness_ns)
    for engine in engines:
        assert engine.kv.free_blocks == engine.kv.num_blocks, "the run ended with blocks held"
    return log


@given(fleets())
@settings(max_examples=share(0.8))
def test_requests_leave_one_engine_once_and_every_engine_keeps_the_laws(fleet):
    log = run(**fleet)
    requests = log.requests()
    assert requests["id"].tolist() == [a.request.id for a in fleet["workload"]]
    in_their_own_time = {a.request.id: a for a in fleet["workload"]}
    for own, limits, policy in zip(log.of_engines, fleet["limits"], fleet["policies"], strict=True):
        rows = own.requests()
        if not len(rows["id"]):
            continue
        share = [
            # In a closed loop the clock of a request starts when it is sent.
            sent_at(in_their_own_time[i], sent)
            for i, sent in zip(rows["id"].tolist(), rows["arrival_ns"].tolist(), strict=True)
        ]
        kind = registry.policy_class(policy)
        config = limits.for_policy(kind.pauses, kind.seats_loaded)
        laws.check(own, share, config, may_wait=True)


class AsksTwice(Router):
    """Compares what is kept of engines with what each says when it is asked itself."""

    def route(self, request, engines):
        assert loads(engines, said) == [said(engine) for engine in engines]
        assert cached_tokens(engines, request) == [e.cached_tokens(request) for e in engines]
        return int(self.rng.random() * len(engines))


def said(engine):
    return (
        engine.num_in_flight, engine.num_waiting, engine.num_running, engine.used_blocks,
        engine.prompt_tokens_in_flight, engine.backlog_tokens, engine.first_waiting_blocks,
        engine.waiting_blocks,
    )  # fmt: skip


@given(fleets())
@settings(max_examples=share(0.2))
def test_loads_that_are_kept_are_those_that_engines_tell(fleet):
    router = AsksTwice()
    router.rng = np.random.default_rng(0)
    run(**fleet | {"router": router})


def sent_at(arrival, sent_ns):
    moved = replace(arrival.request, arrival_ns=sent_ns)
    return replace(arrival, request=moved, ready_ns=sent_ns)


@pytest.mark.slow
@given(fleets())
@settings(max_examples=share(0.8))
def test_fleet_gives_the_same_bytes_again_and_step_by_step(fleet):
    one, again, slow = run(**fleet), run(**fleet), run(**fleet, fast=False)
    for other in (again, slow):
        for mine, its in zip(one.of_engines, other.of_engines, strict=True):
            assert laws.signature(mine) == laws.signature(its)


@given(fleets())
@settings(max_examples=share(0.6))
def test_no_more_requests_are_in_flight_than_clients(fleet):
    most = fleet["max_concurrency"]
    if most is None:
        return
    requests = run(**fleet).requests()
    answered = requests["finish_ns"] >= 0
    times = np.concatenate([requests["arrival_ns"], requests["finish_ns"]])[np.tile(answered, 2)]
    change = np.repeat([1, -1], answered.sum())
    in_flight = np.cumsum(change[np.lexsort((change, times))])
    assert not len(in_flight) or in_flight.max() <= most
