"""Memory in tiers: the laws of every policy hold, and nothing is lost or counted twice."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.testing import POLICY_LAWS, Case
from tests import laws
from tests.policy_cases import PARAMS
from tests.property.test_engine_switches import cases
from tests.property.test_laws import make
from tests.workloads import kv_tiers, share


@st.composite
def tiered(draw):
    """Draw work with common prefixes, limits, and one or two tiers below them."""
    workload, config = draw(cases())
    return tuple(workload), draw(kv_tiers(config))


# Every way of asking for tokens: the loop of vLLM, ranks, chunks, and plans of their own.
POLICIES = (
    "fcfs", "aged", "boosted", "fastserve", "hrrn", "hygen", "ltr", "nested_wait/theory",
    "past_future", "plas", "prefill_first", "program_srpt", "qoserve", "sarathi", "tgi3", "vtc",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=share(0.2))
@given(case=tiered())
def test_policy_with_tiers_keeps_the_laws(name, case):
    for law in ("serves_everyone", "skips_ahead_exactly", "keeps_its_promises"):
        POLICY_LAWS[law](lambda: make(name), Case(*case))


@settings(max_examples=share(0.4))
@given(case=tiered())
def test_guaranteed_no_evict_with_tiers_never_evicts(case):
    workload, config = case
    told = [replace(a, request=replace(a.request, max_tokens=a.output_tokens)) for a in workload]
    for name, knobs in (
        ("tensorrt_llm", {}), ("tgi", {}), ("tgi3", {}), ("mc_sf", {"margin": 0.0}),
    ):  # fmt: skip
        log = laws.run(registry.make(name, **knobs), told, config)
        assert log.requests()["num_preemptions"].sum() == 0, name


@settings(max_examples=share(0.4))
@given(case=tiered(), reserve=st.sampled_from([1, 3, 20]), host=st.sampled_from([0.0, 0.1, 0.9]))
def test_fastserve_that_swaps_ahead_keeps_the_laws(case, reserve, host):
    ahead = {"reserve_blocks": reserve, "host_reserve": host}
    for law in ("serves_everyone", "skips_ahead_exactly", "keeps_its_promises"):
        POLICY_LAWS[law](
            lambda: registry.make("fastserve", **PARAMS["fastserve"], **ahead), Case(*case)
        )


def test_two_that_come_back_from_a_tier_leave_each_other_room_for_a_token():
    # The KV of both fills the memory, and who came back first found no block for its next token:
    # it gave way again, and so did the other, for ever.
    def work(number, at_ns, prompt_tokens, output_tokens, priority=0):
        predicted = float(output_tokens)
        return laws.arrival(
            number, at_ns, prompt_tokens, output_tokens, priority=priority,
            predicted_tokens=predicted,
        )  # fmt: skip

    workload = (
        work(0, 0, 57, 2, priority=1),
        work(1, 3000, 1, 13),
        *(work(number, 3000, 1, 1) for number in range(2, 8)),
        work(8, 3000, 16, 26),
    )
    host = KVTier("cpu", 30, 1e8, 1e8, 0, 0, "through")
    config = EngineConfig(
        num_blocks=25, max_model_len=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=17,
        preemption_mode="swap", swap_space_blocks=30, kv_block_bytes=100, kv_tiers=(host,),
        async_scheduling=True,
    )  # fmt: skip
    POLICY_LAWS["serves_everyone"](lambda: make("hygen"), Case(workload, config))


def test_hrrn_admits_others_while_somebody_comes_back_from_a_tier():
    # Swapped out for want of memory, a decode is loaded for as long as several steps take.
    host = KVTier("cpu", 30, 1e6, 1e9, 0, 0, "through")
    config = EngineConfig(
        num_blocks=12, max_model_len=40, block_size=4, max_num_seqs=3, preemption_mode="swap",
        swap_space_blocks=30, kv_block_bytes=1, kv_tiers=(host,),
    )  # fmt: skip
    work = [laws.arrival(i, 300 * i, 6, 20, predicted_tokens=20.0) for i in range(6)]
    POLICY_LAWS["serves_everyone"](lambda: make("hrrn"), Case(tuple(work), config))
