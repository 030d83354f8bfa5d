"""The switches of real engines: prefix caching, async scheduling, late intake, graph padding."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.policies import Policy, registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.plan import FOREVER
from tests import laws

POLICIES = ("fcfs", "sjf", "priority", "srtf", "prefill_first", "sarathi", "aged")
PARAMS = {"aged": {"rate_per_s": 1e6}, "sarathi": {"chunk_size": 12}}
LONGEST = 100


@st.composite
def shared_workloads(draw, block_size):
    """Draw requests whose prompts begin with a few common documents."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0, 0, 1, 700, 3_000, 40_000]),
                st.integers(0, 2),
                st.integers(0, 60),
                st.integers(1, 60),
                st.integers(1, 40),
            ),
            min_size=1,
            max_size=20,
        )
    )
    now_ns, requests = 0, []
    for i, (gap_ns, document, shared, prompt, output) in enumerate(rows):
        now_ns += gap_ns
        ids = tuple(
            document * 1000 + j if (j + 1) * block_size <= shared else (i + 10) * 1000 + j
            for j in range(prompt // block_size)
        )
        requests.append(
            laws.arrival(
                i, now_ns, prompt, output, priority=document, prefix_hash_ids=ids,
                predicted_tokens=float(output),
            )
        )  # fmt: skip
    return requests


@st.composite
def cases(draw):
    """Draw limits, switches and a workload that fits them."""
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
        async_scheduling=draw(st.booleans()),
        arrivals_between_steps=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 8])),
        threshold_spares_lone_request=draw(st.booleans()),
        free_uncached_first=draw(st.booleans()),
        preempt_in_order=draw(st.booleans()),
        serve_behind_preempted=draw(st.booleans()),
        null_blocks=draw(st.sampled_from([0, 1])),
        cudagraph_capture_sizes=draw(st.sampled_from([(), (1, 2, 4, 8, 16)])),
    )
    if config.async_scheduling:
        config = replace(config, overrun_at_stop=draw(st.booleans()))
    return draw(shared_workloads(block_size)), config


def make(name):
    return registry.make(name, **PARAMS.get(name, {}))


class LongestPrefix(Policy):
    """Admits whoever finds most of its prompt in the cache: decisions that an eviction changes."""

    def plan(self, view, builder):
        while not builder.grant_running():
            builder.preempt(next(builder.running()))
        if builder.preempted:
            return builder.build()
        by_hit = sorted(view.waiting, key=lambda s: (-view.cached_tokens(s), s.id))
        for state in by_hit:
            if not builder.grant(state):
                break
        return builder.build(max_steps=FOREVER)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@given(case=cases())
def test_engine_with_switches_obeys_the_laws_by_any_route(name, case):
    workload, config = case
    log = laws.run(make(name), workload, config)
    laws.check(log, workload, config)
    fast = laws.signature(log)
    for other in (laws.slow(config), replace(config, check_horizon=True)):
        assert fast == laws.signature(laws.run(make(name), workload, other, prove=False))
    cut = laws.run(make(name), workload, config, drive=laws.cut_at_arrivals, prove=False)
    assert fast == laws.signature(cut)


@given(case=cases())
def test_cache_aware_policy_is_asked_again_at_every_eviction(case):
    workload, config = case
    config = replace(config, enable_prefix_caching=True)
    fast = laws.signature(laws.run(LongestPrefix(), workload, config))
    assert fast == laws.signature(laws.run(LongestPrefix(), workload, laws.slow(config)))
    checked = laws.run(LongestPrefix(), workload, replace(config, check_horizon=True))
    assert fast == laws.signature(checked)


@given(case=cases())
def test_prefix_caching_never_computes_more_nor_changes_what_comes_out(case):
    workload, config = case
    roomy = replace(config, num_blocks=4000)
    cold = laws.run(make("fcfs"), workload, replace(roomy, enable_prefix_caching=False))
    warm = laws.run(make("fcfs"), workload, replace(roomy, enable_prefix_caching=True))
    computed = [log.steps()["prefill_tokens"].sum() for log in (cold, warm)]
    assert computed[1] == computed[0] - warm.requests()["cached_tokens"].sum()
    assert (warm.requests()["generated_tokens"] == cold.requests()["generated_tokens"]).all()
