"""The laws, over every registered policy, random workloads and random limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.policies import registry
from tests import laws
from tests.workloads import configs, workloads

# Knobs for workloads of microseconds and a few tokens; "name/variant" is one more case.
PARAMS = {
    "aged": {"rate_per_s": 1e6},
    "aged/priority": {"inner": "priority", "rate_per_s": 1e5},
    "boosted": {"threshold_s": 5e-6},
    "boosted/iterations": {"inner": {"name": "hrrn"}, "threshold_iterations": 3},
    "dynamic": {"max_batch_size": 3, "max_queue_delay_s": 5e-6},
    "edf": {"default_ttft_s": 5e-6},
    "fastserve": {"first_quantum_s": 3e-6, "starvation_s": 1e-5, "starvation_period": 7},
    "ltr": {"starvation_threshold": 5, "quantum": 2},
    "ltr/starving": {"starvation_threshold": None},
    "mc_sf": {"margin": 0.0},
    "multi_bin": {"bin_edges": [8, 16], "max_batch_size": 3, "max_wait_s": 5e-6},
    "magnus": {"wma_threshold": 300.0, "max_batch_size": 4},
    "nested_wait": {"output_edges": [4, 12], "total_limit": 12, "max_wait_s": 5e-6},
    "nested_wait/theory": {
        "output_edges": [8, 20],
        "request_rates": [2.0, 1.0],
        "max_wait_s": 5e-6,
        "drain": False,
    },
    "prefill_first/delay": {"delay_factor": 2.0},
    "prompt_buckets": {"bucket_edges": [10, 30]},
    "qoserve": {"ttft_s": 2e-5, "tbt_s": 2e-6, "alpha_ms_per_token": 1e-5, "min_chunk_size": 4},
    "sarathi": {"chunk_size": 12},
    "scorpio": {"ttft_s": 3e-5, "tbt_s": 4e-6},
    "scorpio/lenient": {"ttft_s": 1.0, "tbt_s": 3e-6},
    "slai": {"token_budget": 16, "tbt_s": 6e-6, "offset": 2, "memory_limit": 0.5},
    "slai/paying": {"order": "paying_first", "tbt_s": 1e-5, "dynamic_offset": False},
    "tensorrt_llm/max_utilization": {"capacity_policy": "max_utilization"},
    "tgi": {"waiting_served_ratio": 0.5, "max_waiting_tokens": 4, "max_batch_prefill_tokens": 40},
    "wait": {"output_edges": [8, 30], "total_limit": 12, "max_wait_s": 5e-6},
    "wait/cap": {"output_edges": [8, 30], "total_limit": 6, "only_cap": True},
    "wait/theory": {"output_edges": [5], "total_limit": 12, "max_wait_s": 5e-6, "drain": False},
}
MAY_WAIT = {"dynamic", "multi_bin", "nested_wait", "nested_wait/theory", "wait", "wait/theory"}
CASES = sorted({*registry.names(), *PARAMS})


def make(case):
    return registry.make(case.split("/")[0], **PARAMS.get(case, {}))


@pytest.mark.parametrize("name", CASES)
@given(workload=workloads(), config=configs())
def test_policy_on_random_work_obeys_the_laws(name, workload, config):
    log = laws.run(make(name), workload, config)
    laws.check(log, workload, config, may_wait=name in MAY_WAIT)


@pytest.mark.parametrize("name", CASES)
@given(workload=workloads(), config=configs())
def test_skipping_ahead_by_any_route_changes_no_bit(name, workload, config):
    fast = laws.signature(laws.run(make(name), workload, config))
    slow = laws.signature(laws.run(make(name), workload, laws.slow(config)))
    cut = laws.signature(laws.run(make(name), workload, config, drive=laws.cut_at_arrivals))
    assert fast == slow
    assert fast == cut


@pytest.mark.parametrize("name", CASES)
@given(workload=workloads(), config=configs())
def test_policy_replanned_at_every_step_keeps_its_promise(name, workload, config):
    checked = laws.run(make(name), workload, replace(config, check_horizon=True))
    assert laws.signature(checked) == laws.signature(laws.run(make(name), workload, config))


@pytest.mark.parametrize("name", CASES)
@given(workload=workloads(), config=configs(), clients=st.integers(1, 6))
def test_closed_loop_never_exceeds_its_concurrency(name, workload, config, clients):
    most = 0

    def watch(engine):
        nonlocal most
        most = max(most, engine.requests.num_in_flight)

    log = laws.run(make(name), workload, config, observer=watch, max_concurrency=clients)
    assert most <= clients
    requests = log.requests()
    assert len(requests["id"]) == len(workload)


@pytest.mark.parametrize("name", CASES)
@given(workload=workloads(), config=configs(), lengths=st.randoms(use_true_random=False))
def test_policy_cannot_see_true_lengths(name, workload, config, lengths):
    """Plans are the same, whatever the true lengths, until a request finishes."""
    config = replace(config, kv_allocator="paged", fast_forward=False)
    other = [a._replace(output_tokens=lengths.randint(1, 40)) for a in workload]

    def decisions(requests):
        seen = []

        def watch(engine):
            if not (
                engine.requests.num_finished or engine.requests.num_rejected or engine.requests.held
            ):
                computed = {s.id: s.num_computed_tokens for s in engine.requests.running.values()}
                seen.append((engine.now_ns, computed))

        laws.run(make(name), requests, config, observer=watch)
        return seen

    for first, second in zip(decisions(workload), decisions(other), strict=False):
        assert first == second
