"""Laws of fleets of pipelines, and of engines of one stage beside them, over what is drawn."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies.routers import registry as routers
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.pipeline_executor import PipelineExecutor
from schedlab.sim.core.pipelined_engine import PipelinedEngine
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.failures import Failures
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.simulation import simulate
from tests import laws
from tests.policy_cases import make
from tests.property.test_fleet_combinations import check_fleet, fleet_combinations
from tests.property.test_fleets import AsksTwice
from tests.property.test_pipelines import ABLE
from tests.staged_cost import StagedCost
from tests.workloads import configs, share, workloads


@st.composite
def fleets_of_pipelines(draw):
    """Draw a fleet, all that happens to it, and how many stages the engines of each role have."""
    one = draw(fleet_combinations())
    shares = st.lists(st.sampled_from((1, 5, 10, 25)), min_size=1, max_size=3)
    between_steps = draw(st.booleans())
    stays = {*one.roles} == {"mixed"} and one.moves_every_ns is None
    ahead = between_steps and stays and draw(st.booleans())
    failures = (Failures(),) if ahead else (one.failures, Failures())
    return replace(
        one,
        policy=draw(st.sampled_from(ABLE)),
        config=replace(
            one.config, async_scheduling=ahead, overrun_at_stop=False,
            arrivals_between_steps=between_steps,
            chunked_pipeline_parallelism=draw(st.booleans()),
            num_speculative_tokens=0, num_lookahead_tokens=0, kv_tiers=(), load_takes_seat=True,
            offloading_connector=False,
        ),
        rates=(),
        drafting=None,
        failures=draw(st.sampled_from(failures)),
        shares=tuple(tuple(draw(shares)) for _ in one.roles),
    )  # fmt: skip


@pytest.mark.slow
@given(fleet=fleets_of_pipelines())
def test_fleet_of_pipelines_loses_nobody_and_gives_the_same_bytes_again(fleet):
    check_fleet(fleet)


@pytest.mark.slow
@given(fleet=fleets_of_pipelines())
@settings(max_examples=share(0.5))
def test_router_is_told_of_who_is_in_the_pipeline(fleet):
    class Counts(AsksTwice):
        def route(self, request, engines):
            for engine in engines:
                requests = engine._requests
                # Whose KV has only just set out is counted from the engine's next event on.
                seated = requests.num_seated - len(requests.held)
                assert seated - len(requests.fetching) <= engine.num_running <= seated
            return super().route(request, engines)

    def counting(_):
        router = Counts()
        router.rng = np.random.default_rng(0)
        return router

    replace(fleet, make_router=counting, staleness_ns=0).run()


@given(workload=workloads(), config=configs(), shares=st.sampled_from(((10, 10), (25, 1, 5))))
@settings(max_examples=share(0.25))
@pytest.mark.parametrize("name", ABLE)
def test_pipeline_behind_a_router_is_that_pipeline_alone(name, workload, config, shares):
    def new_engine(_=0):
        limits = replace(config, pipeline_parallel_size=len(shares))
        executor = PipelineExecutor(Pricing(StagedCost(shares, 70, 3)))
        return PipelinedEngine(limits, make(name), executor, check_conservation)

    alone = simulate(new_engine(), workload)
    fleet = simulate_cluster(
        [new_engine()],
        routers.make("vllm"),
        workload,
        changes=Changes(Supply(new_engine, ["mixed"], [0])),
    )
    assert laws.signature(fleet.of_engines[0]) == laws.signature(alone)
