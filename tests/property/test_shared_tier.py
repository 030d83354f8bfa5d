"""A tier of KV that engines have together: nobody is lost, and skipping ahead changes no bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies.static import Static
from schedlab.sim.config import KVTier
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
