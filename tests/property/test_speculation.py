"""Laws of speculation: exact skipping, tokens that do not depend on the schedule, memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.policies import registry
from schedlab.policies.speculation.by_batch_size import ByBatchSize
from schedlab.policies.speculation.goodput import Goodput
from schedlab.policies.speculation.slo import SloDrafts
from schedlab.sim.config import EngineConfig, KVTier
from schedlab.sim.core.speculative_executor import SpeculativeExecutor
from schedlab.sim.request import Slo
from schedlab.sim.speculation.acceptance import DrawnAcceptance
from schedlab.sim.speculation.drafters import NgramDrafter
from tests import laws
from tests.workloads import kv_tiers

POLICIES = ("fcfs", "srtf", "prefill_first", "sarathi", "aged", "static", "fastserve", "vtc")
PARAMS = {"aged": {"rate_per_s": 1e6}, "sarathi": {"chunk_size": 40}}
LENGTHS = (
    None,
    lambda: ByBatchSize([[2, 1], [4, 0]]),
    lambda: Goodput(prior_tokens=4.0),
    lambda: SloDrafts(budget_tokens=8),
)
LONGEST = 100


@st.composite
def cases(draw):
    """Draw limits, drafts and a workload that fits them."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    config = EngineConfig(
        num_blocks=-(-LONGEST // block_size) + draw(st.sampled_from([0, 1, 3, 20, 400])),
        max_model_len=LONGEST,
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 2, 5, 16])),
        max_num_batched_tokens=draw(st.sampled_from([17, 64, 500])),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        swap_space_blocks=30,
        kv_block_bytes=100,
        enable_prefix_caching=draw(st.booleans()),
        free_uncached_first=draw(st.booleans()),
        arrivals_between_steps=draw(st.booleans()),
        preempt_in_order=draw(st.booleans()),
        serve_behind_preempted=draw(st.booleans()),
        cudagraph_capture_sizes=draw(st.sampled_from([(), (1, 2, 4, 8, 16)])),
        num_speculative_tokens=draw(st.sampled_from([1, 3, 5])),
        names_accepted_drafts=draw(st.booleans()),
        num_lookahead_tokens=draw(st.sampled_from([0, 5])),
        async_scheduling=(ahead := draw(st.booleans())),
        overrun_at_stop=ahead and draw(st.booleans()),
    )
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 700, 3_000, 40_000]),
                st.integers(1, 60),
                st.integers(1, 40),
            ),
            min_size=1,
            max_size=16,
        )
    )
    now_ns, requests = 0, []
    for i, (gap_ns, prompt, output) in enumerate(rows):
        now_ns += gap_ns
        requests.append(
            laws.arrival(
                i, now_ns, prompt, output, priority=i % 3, predicted_tokens=float(output),
                tenant=f"t{i % 2}", slo=Slo(tpot_ms=0.0008 * (1 + i % 3)),
                prefix_hash_ids=tuple(range(prompt // block_size)) if i % 2 else (),
            )
        )  # fmt: skip
    rates = draw(st.sampled_from([[0.0], [0.6], [1.0], [0.9, 0.5, 0.1]]))
    return requests, config, rates, draw(st.sampled_from(LENGTHS))


def run(name, case, config=None, drive=None):
    workload, own, rates, length = case
    config = config or own
    if name == "static":  # which sets memory aside
        config = replace(config, enable_prefix_caching=False)

    def make_executor(pricing):
        acceptance = DrawnAcceptance(rates, 0.1 if rates == [0.6] else 0.0, seed=3)
        return SpeculativeExecutor(pricing, config, acceptance, NgramDrafter(1e-8))

    policy = registry.make(name, **PARAMS.get(name, {}))
    options = {} if drive is None else {"drive": drive}
    return laws.run(
        policy, workload, config, make_executor=make_executor,
        draft_length=None if length is None else length(), **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8)
@given(case=cases())
def test_run_with_drafts_obeys_the_laws_however_it_is_driven(name, case):
    require_laws(name, case)


def require_laws(name, case):
    """Tokens and memory add up; skipping ahead and cutting change no bit; promises are kept."""
    workload, config = case[:2]
    log = run(name, case)
    laws.check(log, workload, config, may_wait=True)
    fast = laws.signature(log)
    assert fast == laws.signature(run(name, case, laws.slow(config)))
    assert fast == laws.signature(run(name, case, drive=laws.cut_at_arrivals))
    run(name, case, replace(config, check_horizon=True))


@st.composite
def tiered(draw):
    """Draw the same with tiers of memory below."""
    workload, config, rates, length = draw(cases())
    return workload, draw(kv_tiers(config)), rates, length


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcfs", "srtf", "prefill_first", "fastserve", "vtc"])
@settings(max_examples=8)
@given(case=tiered())
def test_run_with_drafts_and_tiers_obeys_the_laws_however_it_is_driven(name, case):
    require_laws(name, case)


def test_request_that_comes_back_has_room_for_its_next_token_and_the_slots_ahead_of_it():
    """Two of which neither has that would give way in turn, for ever."""
    tier = KVTier("cpu", 500, 1e9, 1e12, load_latency_ns=300, write="back")
    config = EngineConfig(
        num_blocks=60, max_model_len=60, block_size=1, max_num_seqs=5, max_num_batched_tokens=500,
        preemption_mode="swap", swap_space_blocks=500, kv_block_bytes=100, kv_tiers=(tier,),
        enable_prefix_caching=True, num_speculative_tokens=5, num_lookahead_tokens=5,
    )  # fmt: skip
    work = [laws.arrival(0, 0, 24, 16), laws.arrival(1, 0, 23, 8)]
    for reserves in (False, True):
        limits = replace(config, scheduler_reserve_full_isl=reserves)
        log = run("fcfs", (work, limits, [0.0], None))
        assert log.copies.columns()["is_swap"].sum() >= 2
        laws.check(log, work, limits, may_wait=True)


@pytest.mark.slow
@settings(max_examples=15)
@given(case=cases(), other=st.sampled_from(["sjf", "priority", "srtf"]))
def test_tokens_of_verifications_do_not_depend_on_the_schedule(case, other):
    """With a fixed length and room for all drafts, what comes out together always does."""
    workload, config, rates, _ = case
    config = replace(
        config, max_num_batched_tokens=500, max_num_seqs=16, num_blocks=4000,
        preempt_in_order=False,
    )  # fmt: skip
    case = (workload, config, rates, None)

    def bursts(log):
        return [
            np.unique(log.token_times(a.request.id), return_counts=True)[1].tolist()
            for a in workload
        ]

    assert bursts(run("fcfs", case)) == bursts(run(other, case))
