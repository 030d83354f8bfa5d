"""Tiers of KV below fleets: nobody is lost, and skipping ahead changes no bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies.routers import registry as routers
from schedlab.policies.static import Static
from schedlab.sim.config import KVTier
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.drive.failures import Failures
from tests import laws
from tests.policy_cases import make
from tests.property.test_fleet_combinations import check_fleet, fleet_combinations
from tests.workloads import share


@st.composite
def sharing(draw, size=(2, 3)):
    """Draw engines that are alike, with a memory of their own and a store of all below it."""
    one = draw(fleet_combinations().filter(lambda one: not isinstance(make(one.policy), Static)))
    seconds = st.sampled_from([1e8, 1e9, 1e12])
    tiers = tuple(
        KVTier(
            name,
            draw(st.sampled_from([1, 7, 30, 500])),
            draw(seconds),
            draw(seconds),
            draw(st.sampled_from([0, 300])),
            draw(st.sampled_from([0, 300])),
            draw(st.sampled_from(["through", "back"])),
            is_shared=name == "store",
        )
        for name in draw(st.sampled_from([("cpu", "store"), ("cpu", "disk", "store")]))
    )
    config = replace(
        one.config,
        kv_allocator="paged",
        enable_prefix_caching=True,
        offloading_connector=False,
        load_takes_seat=True,
        kv_tiers=tiers,
        kv_load=draw(st.sampled_from(["when_faster", "always"])),
        kv_block_bytes=100,
        swap_space_blocks=tiers[0].num_blocks,
    )
    num_engines = draw(st.sampled_from(size))
    return replace(
        one,
        config=config,
        roles=("mixed",) * num_engines,
        failures=one.failures if num_engines == len(one.roles) else Failures(),
        moves_every_ns=None,
    )


@pytest.mark.slow
@settings(max_examples=share(0.8))
@given(fleet=sharing())
def test_fleet_with_a_shared_tier_loses_nobody_and_skips_ahead_exactly(fleet):
    check_fleet(fleet)


@settings(max_examples=share(0.3))
@given(fleet=sharing(size=(1,)))
def test_one_engine_with_a_shared_tier_is_that_engine_with_one_of_its_own(fleet):
    # Written through it is sent on while nobody is here, too, which one of its own waits with.
    host, *_, store = fleet.config.kv_tiers
    together, apart = (
        replace(
            fleet,
            scaling=None,
            config=replace(
                fleet.config,
                kv_tiers=(host, replace(store, write="back", is_shared=is_shared)),
            ),
        )
        .run()
        .of_engines[0]
        for is_shared in (True, False)
    )
    assert laws.signature(together) == laws.signature(apart)


def in_lockstep(fleet, size):
    """Run engines that take as long as the slowest of them for every step."""
    engines = [
        Engine(
            fleet.config,
            make(fleet.policy),
            SimExecutor(Pricing(laws.LinearCost(1000, 10, 1))),
            check_conservation,
        )
        for _ in range(size)
    ]
    return simulate_cluster(
        engines,
        routers.make("jsq"),
        fleet.workload,
        lockstep=lambda stepping, idle: max(one.steps.durations_ns[0] for _, one in stepping),
    )


@settings(max_examples=share(0.3))
@given(fleet=sharing().filter(lambda one: not one.rates), size=st.sampled_from([1, 2, 3]))
def test_engines_in_lockstep_with_tiers_answer_everybody_and_alone_are_as_without_it(fleet, size):
    *own, store = fleet.config.kv_tiers
    shared = replace(store, is_shared=size > 1)
    fleet = replace(fleet, config=replace(fleet.config, kv_tiers=(*own, shared)))
    log, again = in_lockstep(fleet, size), in_lockstep(fleet, size)
    requests = log.requests()
    assert requests["id"].tolist() == sorted(a.request.id for a in fleet.workload)
    for a in fleet.workload:
        if log.reject_reasons.get(a.request.id) is None:
            tokens = min(a.output_tokens, a.request.max_tokens)
            assert len(log.token_times(a.request.id)) == tokens
    for mine, its in zip(log.of_engines, again.of_engines, strict=True):
        assert laws.signature(mine) == laws.signature(its)
    if size == 1:
        fleet = replace(fleet, roles=("mixed",), scaling=None, failures=Failures(), clients=None)
        alone = fleet.run(fast=False).of_engines[0]
        assert laws.signature(log.of_engines[0]) == laws.signature(alone)
