"""Drafts in fleets: who goes on elsewhere has none at first, and their KV goes with the model's."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.policies.routers.vllm import Vllm
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.audit import check_conservation
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.cluster import Changes, simulate_cluster
from schedlab.sim.drive.disaggregation import Disaggregation
from schedlab.sim.drive.failures import Failures, Outage
from schedlab.sim.drive.handover import has_room
from schedlab.sim.drive.links import Interconnect
from schedlab.sim.drive.members import Supply
from schedlab.sim.drive.migration import MigrationPlan
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.link import Link
from schedlab.sim.hardware.models import model
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import (
    ModelDrafter,
    NgramDrafter,
    draft_head,
    draft_model,
)
from tests import laws
from tests.laws import LinearCost, arrival
from tests.unit.test_cluster import OUTSIDE, Measured, SharedCost, joint_step
from tests.workloads import share, workloads

LIMITS = {"num_blocks": 200, "max_model_len": 100, "block_size": 4, "max_num_seqs": 4}
DRAFTS = EngineConfig(**LIMITS, num_speculative_tokens=3)
PLAIN = EngineConfig(**LIMITS)
LINK = Link(bytes_per_s=1e12, latency_s=50e-9, source="a test")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.7}
MTP = {**NGRAM, "method": "mtp"}
PARTS = {"p": {"role": "prefill"}, "d": {"role": "decode"}}


def engine(config):
    """Return an engine whose drafts, if it makes any, are all right; those take no time."""
    pricing = Pricing(LinearCost(1000, 10, 0))
    gpu = SimExecutor(pricing)
    if config.num_speculative_tokens:
        every = DrawnAcceptance([1.0], 0.0, seed=0)
        gpu = SpeculativeExecutor(pricing, config, every, NgramDrafter(0.0))
    return Engine(config, registry.make("fcfs"), gpu, check_conservation)


def fleet(configs, workload, roles=("mixed", "mixed"), outages=(), migrator=None):
    disaggregation = None
    if "decode" in roles:
        disaggregation = Disaggregation(roles, routers.make("jsq"))
    changes = Changes(
        Supply(lambda pool: engine(configs[pool]), roles, [0] * len(roles)),
        Failures(outages=outages),
        (),
        None if migrator is None else MigrationPlan(migrator, 3_000, 2, 1),
    )
    return simulate_cluster(
        [engine(config) for config in configs],
        routers.make("round_robin"),
        workload,
        disaggregation=disaggregation,
        interconnect=Interconnect(LINK, 1000, [1] * len(roles)),
        changes=changes if outages or migrator else None,
    )


def tokens_at(log, request_id):
    """Return how many tokens came out at each instant at which any did, in order."""
    return np.unique(log.token_times(request_id), return_counts=True)[1].tolist()


@pytest.mark.parametrize("prefill", [PLAIN, DRAFTS], ids=["plain", "drafts"])
def test_request_whose_kv_came_verifies_no_drafts_in_its_first_step(prefill):
    log = fleet([prefill, DRAFTS], [arrival(0, 0, 20, 12)], roles=("prefill", "decode"))
    # Of its prompt one; then nobody has drafted; then three drafts and one more; 2 are left.
    assert tokens_at(log, 0) == [1, 1, 4, 4, 2]
    steps = log.steps()
    assert steps["engine"].tolist() == [0, 1, 1, 1, 1]
    assert steps["draft_tokens"].tolist() == [0, 0, 3, 3, 3]
    assert steps["accepted_tokens"].tolist() == [0, 0, 3, 3, 1]
    assert steps.rows(0, 2)["draft_tokens"].tolist() == [0, 0]
    assert log.requests()["generated_tokens"].tolist() == [12]


def test_request_of_an_engine_that_died_drafts_on_the_next_one():
    # A step takes 1000 ns and 10 a token. The engine dies in the third, before its tokens.
    died = Outage(0, 2_500, 100_000)
    log = fleet([DRAFTS, DRAFTS], [arrival(0, 0, 20, 12)], outages=[died])
    # 5 came out; the context is computed again, which gives one more; then drafts as ever.
    assert tokens_at(log, 0) == [1, 4, 1, 4, 2]
    requests = log.requests()
    assert (requests["num_losses"][0], requests["engine"][0]) == (1, 1)


class MovesFirst:
    """Moves whoever is first to the other engine, once."""

    def __init__(self):
        self.is_done = False

    def pairs(self, candidates):
        return [] if self.is_done else [(0, 1)]

    def victim(self, decoding):
        self.is_done = True
        return 0


@pytest.mark.parametrize(
    ("target", "came"),
    [(DRAFTS, [1, 4, 4, 4, 1, 4, 4, 4, 4]), (PLAIN, [1, 4, 4, 4] + [1] * 17)],
    ids=["drafts", "plain"],
)
def test_request_that_moves_drafts_where_it_goes_if_anybody_does_there(target, came):
    # It is chosen when the step ends that is under way at 3,000 ns, decodes one step while
    # all of its KV is sent, and stops for what that step added.
    log = fleet([DRAFTS, target], [arrival(0, 0, 20, 30)], migrator=MovesFirst())
    assert len(log.moves) == 1
    assert tokens_at(log, 0) == came


@pytest.mark.parametrize(("drafts", "free_blocks"), [(0, 3), (1, 4)])
def test_room_for_a_request_is_told_with_slots_of_a_drafter(drafts, free_blocks):
    # 8 tokens and the next one take 3 blocks of 4; with 5 slots more it is 4 blocks.
    config = EngineConfig(**LIMITS, num_speculative_tokens=drafts, num_lookahead_tokens=5 * drafts)
    for free, fits in ((free_blocks, True), (free_blocks - 1, False)):
        live = SimpleNamespace(used_blocks=config.num_blocks - free)
        assert has_room(SimpleNamespace(engine=engine(config), live=live), 8) is fits


def spec_of(pools=PARTS, **engine_keys):
    return make_spec(
        {
            "name": "drafts",
            "workload": {"trace": "azure-conv", "num_requests": 12, "request_rate": 4.0},
            "engine": engine_keys,
            "cluster": {"pools": pools},
        }
    )


def test_kv_of_a_drafter_goes_with_that_of_the_model():
    plain = run(spec_of()).requests["transferred_bytes"]
    of_mtp = run(spec_of(speculation=MTP)).requests["transferred_bytes"]
    of_ngram = run(spec_of(speculation=NGRAM)).requests["transferred_bytes"]
    assert (of_mtp * 32 == plain * 33).all()  # a layer beside the 32 of Llama 3 8B
    assert (of_ngram == plain).all()


def test_pools_with_drafters_that_cannot_go_on_with_each_other_are_refused():
    pools = {**PARTS, "d": {"role": "decode", "engine": {"speculation": MTP}}}
    message = r"one drafter in all pools, got mtp of 1 layers and none; set it for the experiment"
    with pytest.raises(SpecError, match=message):
        run(spec_of(pools))
    pools["d"]["engine"]["speculation"] = NGRAM
    requests = run(spec_of(pools))
    assert requests.metric("mean_tokens_per_step") > 1


@pytest.mark.parametrize(
    "cluster",
    [
        {"count": 2, "failures": {"engines": [{"engine": 0, "at_s": 1, "down_s": 0.5}]}},
        {"count": 2, "migration": {"name": "llumnix", "every_ms": 50}},
        {
            "count": 1,
            "autoscaler": {
                "name": "hpa",
                "metric": "num_in_flight",
                "target": 4,
                "max": 3,
                "every_s": 1,
            },
        },
    ],
    ids=["failures", "migration", "autoscaler"],
)
def test_fleet_that_changes_serves_everybody_with_drafts(cluster):
    found = run(
        make_spec(
            {
                "name": "drafts",
                "workload": {"trace": "azure-conv", "num_requests": 30, "request_rate": 15.0},
                "engine": {"speculation": NGRAM},
                "cluster": cluster,
            }
        )
    )
    generated = found.requests["generated_tokens"]
    assert (generated == found.requests["output_tokens"]).all()
    assert found.metric("mean_tokens_per_step") > 1.5


# -- engines that run every step together --------------------------------------------------------


def together(size, workload, rates=(1.0,), config=DRAFTS, lockstep=True, pricing=None):
    """Run engines whose experts, those of their drafters too, get the tokens of all."""
    pricing = pricing or Pricing(SharedCost(100, 10, 0))

    def new_engine():
        drafter = ModelDrafter(SharedCost(50, 1, 0), 0, 0, 0)
        acceptance = DrawnAcceptance(list(rates), 0.0, seed=0)
        gpu = SpeculativeExecutor(pricing, config, acceptance, drafter)
        return Engine(config, registry.make("fcfs"), gpu, check_conservation)

    engines = [new_engine() for _ in range(size)]
    return simulate_cluster(engines, Vllm(), workload, None, joint_step if lockstep else None)


def test_passes_of_engines_in_lockstep_meet_one_by_one():
    config = replace(DRAFTS, num_speculative_tokens=2)
    log = together(2, [arrival(0, 0, 20, 8), arrival(1, 0, 4, 3)], config=config)
    ends_ns = [
        # The longer prompt here, 24 tokens of both at the experts: the model, then its drafter.
        (100 + 10 * 20 + 24) + (50 + 20 + 24),
        # Three tokens are verified on each; the drafter computes them, then one more on each.
        (100 + 10 * 3 + 6) + (50 + 3 + 6) + (50 + 1 + 2),
        # One engine is done, and computes and drafts as many for nobody.
        *[(100 + 10 * 3 + 6) + (50 + 3 + 6) + (50 + 1 + 2)] * 2,
    ]
    steps = log.steps()
    assert np.unique(steps["end_ns"]).tolist() == np.cumsum(ends_ns).tolist()
    assert log.token_times(1).tolist() == np.cumsum(ends_ns)[[0, 1, 1]].tolist()


def test_first_passes_of_drafters_are_padded_with_those_of_the_model():
    config = replace(DRAFTS, num_speculative_tokens=2, cudagraph_capture_sizes=(4, 8, 24))
    log = together(3, [arrival(0, 0, 20, 8), arrival(1, 0, 4, 3)], config=config)
    ends_ns = [
        # 24 tokens here, there and on the idle engine.
        (100 + 10 * 24 + 72) + (50 + 24 + 72),
        # Three tokens are verified in four; the drafter computes them, then one more on each.
        *[(100 + 10 * 4 + 12) + (50 + 4 + 12) + (50 + 1 + 3)] * 3,
    ]
    assert np.unique(log.steps()["end_ns"]).tolist() == np.cumsum(ends_ns).tolist()


@pytest.mark.filterwarnings("ignore::schedlab.sim.cost.pricing.ExtrapolationWarning")
@pytest.mark.parametrize(("prompts", "steps", "by_feature"), OUTSIDE)
def test_step_with_drafts_is_extrapolated_by_the_tokens_that_the_model_meets(
    prompts, steps, by_feature
):
    # The drafter has its own passes, which may meet more or fewer.
    pricing = Pricing(Measured(100, 10, 0))
    together(2, [arrival(i, 0, n, 3) for i, n in enumerate(prompts)], pricing=pricing)
    assert pricing.extrapolated_steps == steps
    assert pricing.extrapolated_by_feature == by_feature


def test_engine_that_drafts_nothing_waits_for_the_drafts_of_others():
    # The second request is one token of prompt and answer: its engine has a step without drafts.
    log = together(2, [arrival(0, 0, 8, 9), arrival(1, 500, 1, 1)])
    steps = log.steps()
    for start_ns in np.unique(steps["start_ns"]):
        assert len(np.unique(steps["end_ns"][steps["start_ns"] == start_ns])) == 1
    alone = together(1, [arrival(0, 0, 8, 9)])
    assert len(log.token_times(0)) == len(alone.token_times(0)) == 9
    assert log.token_times(0)[-1] > alone.token_times(0)[-1]


@given(workload=workloads(max_requests=12), rate=st.sampled_from((0.0, 0.5, 1.0)))
@settings(max_examples=share(0.5))
def test_one_engine_in_lockstep_drafts_as_that_engine_alone(workload, rate):
    one, alone = (together(1, workload, [rate], lockstep=lockstep) for lockstep in (True, False))
    assert laws.signature(one.of_engines[0]) == laws.signature(alone.of_engines[0])


@given(workload=workloads(max_requests=12), size=st.integers(2, 4))
@settings(max_examples=share(0.5))
def test_drafts_in_lockstep_leave_no_token_out_and_steps_end_together(workload, size):
    log = together(size, workload, [0.8, 0.3])
    for a in workload:
        assert len(log.token_times(a.request.id)) == a.output_tokens
    steps = log.steps()
    for start_ns in np.unique(steps["start_ns"]):
        assert len(np.unique(steps["end_ns"][steps["start_ns"] == start_ns])) == 1
    for a in workload:  # what is accepted is of the request, not of who computes beside it
        alone = together(1, [a], [0.8, 0.3])
        assert tokens_at(log, a.request.id) == tokens_at(alone, a.request.id)


def test_experts_of_a_draft_head_are_shared_like_those_of_the_model():
    def on(data_parallel_size):
        return run(
            make_spec({
                "model": "mixtral-8x7b", "hardware": "h100-80gb", "policy": "fcfs",
                "engine": {
                    "tensor_parallel_size": 4, "data_parallel_size": data_parallel_size,
                    "max_num_seqs": 8, "speculation": MTP,
                },
                "workload": {
                    "prompt_tokens": 200, "output_tokens": 40, "num_requests": 16,
                    "request_rate": float("inf"),
                },
            })
        )  # fmt: skip

    whole, shared = on(1), on(2)
    assert shared.requests["generated_tokens"].tolist() == [40] * 16
    assert shared.metric("draft_acceptance_share") == whole.metric("draft_acceptance_share")
    layer = model("mixtral-8x7b").routed_expert_bytes("bf16") / 32
    held = [draft_head(where(size), 1, 1).weight_bytes for size in (1, 2)]
    assert held[0] - held[1] == pytest.approx(layer / 2 / 4, rel=1e-6)
    # Steps begin and end together, and each computes drafts.
    steps = shared.log.steps()
    assert steps["draft_tokens"].sum() > 0
    for start_ns in np.unique(steps["start_ns"]):
        assert len(np.unique(steps["end_ns"][steps["start_ns"] == start_ns])) == 1


def where(data_parallel_size):
    return Deployment(
        model("mixtral-8x7b"), gpu("h100-80gb"), 4, data_parallel_size=data_parallel_size
    )


def test_drafter_without_experts_costs_what_it_costs_alone():
    drafter, verified = draft_head(where(2), 1, 1), BatchShape(4, 400, 100, padding_tokens=8)
    dense = draft_model(replace(where(2), model=model("llama-3-70b")), model("llama-3-8b"))
    for one, differs in ((drafter, True), (dense, False)):
        alone_ns = one.step_ns(verified, 8, [4, 4])
        assert (one.step_ns(verified, 8, [4, 4], [24, 8]) != alone_ns) is differs
        assert one.pass_tokens(verified, [4, 4]) == [12, 4]
        assert one.pass_tokens(verified, []) == [0]
    assert NgramDrafter(1e-6).pass_tokens(verified, [4, 4]) == []
