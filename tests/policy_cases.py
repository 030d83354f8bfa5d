"""Every registered policy, with knobs for workloads of microseconds and a few tokens."""

from schedlab.policies import registry

PARAMS = {
    # "name/variant" is one more case.
    "aged": {"rate_per_s": 1e6},
    "aged/priority": {"inner": "priority", "rate_per_s": 1e5},
    "atlas/levels": {"first_quantum_s": 8e-6, "num_queues": 3},
    "boosted": {"threshold_s": 5e-6},
    "boosted/iterations": {"inner": {"name": "hrrn"}, "threshold_iterations": 3},
    "dynamic": {"max_batch_size": 3, "max_queue_delay_s": 5e-6},
    "dynamic/delaying": {
        "use_priorities": True,
        "queue_timeout_s": 4e-6,
        "timeout_action": "delay",
        "max_queue_delay_s": 3e-6,
    },
    "dynamic/preferring": {
        "max_batch_size": 6,
        "max_queue_delay_s": 8e-6,
        "preferred_batch_sizes": [2, 5],
        "queue_timeout_s": 6e-6,
    },
    "edf": {"default_ttft_s": 5e-6},
    "fair_batching": {"ttft_s": 2e-5, "tbt_s": 1.3e-6},
    "fair_batching/roomy": {"ttft_s": 1e-5, "tbt_s": 3e-6},
    "fastserve": {"first_quantum_s": 3e-6, "starvation_s": 1e-5, "starvation_period": 7},
    "gittins": {"window": 8, "min_samples": 2, "refresh_tokens": 3},
    "gittins/memory": {"min_samples": 4, "refresh_tokens": 7, "cost": "memory"},
    "hygen": {"latency_budget_s": 1.2e-6, "chunk_size": 16},
    "hygen/prefix": {
        "latency_budget_s": 3e-6,
        "offline_priority": 2,
        "chunk_size": 60,
        "offline_order": "prefix",
    },
    "lpm/small": {"max_queue": 4, "check_tokens": 8, "deprioritize_tokens": 4},
    "ltr": {"starvation_threshold": 5, "quantum": 2},
    "ltr/starving": {"starvation_threshold": None},
    "mc_sf": {"margin": 0.0},
    "mc_sf/arrival": {"margin": 0.0, "shortest_first": False},
    "multi_bin": {"bin_edges": [8, 16], "max_batch_size": 3, "max_wait_s": 5e-6},
    "magnus": {"wma_threshold": 300.0, "max_batch_size": 4},
    "nested_wait": {"output_edges": [4, 12], "total_limit": 12, "max_wait_s": 5e-6},
    "nested_wait/theory": {
        "output_edges": [8, 20],
        "request_rates": [2.0, 1.0],
        "max_wait_s": 5e-6,
        "drain": False,
    },
    "plas/levels": {"first_quantum_s": 3e-6, "num_queues": 4},
    "prefill_first/delay": {"delay_factor": 2.0},
    "prompt_buckets": {"bucket_edges": [10, 30]},
    "qoserve": {
        "ttft_s": 2e-5,
        "tbt_s": 2e-6,
        "batch_tbt_s": 3e-6,
        "alpha_ms_per_token": 1e-5,
        "chunk_sizes": [4, 16, 60],
        "scarce_chunk_sizes": [3, 12],
        "scarce_tokens": 60,
    },
    "sarathi": {"chunk_size": 12},
    "scorpio": {"ttft_s": 3e-5, "tbt_s": 4e-6, "ttft_margin_s": 5e-7},
    "scorpio/lenient": {"ttft_s": 1.0, "tbt_s": 3e-6},
    "scorpio/prefill_first": {
        "ttft_s": 5e-5,
        "tbt_s": 4e-6,
        "prefill_first": True,
        "ttft_margin_s": 0.0,
    },
    "slai": {"token_budget": 16, "tbt_s": 6e-6, "offset": 2, "memory_limit": 0.5},
    "slai/paying": {"order": "paying_first", "tbt_s": 1e-5, "dynamic_offset": False},
    "tensorrt_llm/max_utilization": {"capacity_policy": "max_utilization"},
    "tensorrt_llm/static_batch": {"capacity_policy": "static_batch"},
    "tgi": {"waiting_served_ratio": 0.5, "max_waiting_tokens": 4, "max_batch_prefill_tokens": 40},
    "tgi3": {"max_batch_prefill_tokens": 20, "max_batch_total_tokens": 150},
    "tgi3/small": {"max_batch_prefill_tokens": 3},
    "trail": {"preemptible_share": 0.3},
    "trail/unlimited": {"preemptible_share": 1e9},
    "trail/waiting_only": {"preemptible_share": 0.0},
    "wait": {"output_edges": [8, 30], "total_limit": 12, "max_wait_s": 5e-6},
    "wait/cap": {"output_edges": [8, 30], "total_limit": 6, "only_cap": True},
    "wait/theory": {"output_edges": [5], "total_limit": 12, "max_wait_s": 5e-6, "drain": False},
}
MAY_WAIT = {
    "dynamic",
    "dynamic/delaying",
    "dynamic/preferring",
    "multi_bin",
    "nested_wait",
    "nested_wait/theory",
    "wait",
    "wait/theory",
}
CASES = sorted({*registry.names(), *PARAMS})


def make(case):
    """Return a fresh policy of a case."""
    return registry.make(case.split("/")[0], **PARAMS.get(case, {}))
