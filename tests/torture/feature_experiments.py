"""Small experiments that between them ask for everything an experiment can ask for."""

from typing import Any

_BASE: dict[str, Any] = {
    "seed": 0,
    "model": "llama-3-8b",
    "hardware": "a100-80gb",
    "cost_model": "roofline",
    "engine": {"max_num_seqs": 8, "max_model_len": 2048},
    "workload": {
        "num_requests": 20, "request_rate": 40, "prompt_tokens": 64, "output_tokens": 8,
    },
    "slo": {"ttft_ms": 1000, "tpot_ms": 50},
    "policy": "fcfs",
}  # fmt: skip
_SESSIONS = {
    "count": 6,
    "turns": {"distribution": "uniform", "low": 1, "high": 3},
    "first_tokens": 60,
    "new_tokens": {"distribution": "exponential", "mean": 30, "cap": 90},
    "output_tokens": 7,
    "think_s": {"distribution": "lognormal", "median_s": 2, "sigma": 0.8, "cap_s": 9},
    "max_calls": 3,
    "tools": {
        "shell": {
            "share": 0.4, "seconds": {"distribution": "exponential", "mean_s": 3}, "tokens": 9,
        },
    },
    "fan_out": {
        "share": 0.2, "width": {"distribution": "uniform", "low": 2, "high": 3}, "tokens": 5,
    },
    "shared_prefix": {"tokens": 32, "groups": 2},
}  # fmt: skip
_START = {"load_gb_per_s": 40, "warm_up_s": 0.1}

FEATURES: dict[str, dict[str, Any]] = {
    "kinds of engines": {
        "cluster": {
            "pools": {
                "old": {"count": 2, "engine": {"max_num_seqs": 4}},
                "new": {"count": 1, "hardware": "h100-80gb", "policy": {"name": "vtc"}},
            },
            "router": {"name": "power_of_d", "d": 2, "staleness_ms": 20},
        },
    },
    "disaggregated": {
        "cluster": {
            "pools": {"p": {"role": "prefill"}, "d": {"role": "decode", "count": 2}},
            "link": {"gb_per_s": 40, "latency_us": 5, "by_layer": True},
            "decode_router": {"name": "least_kv"},
            "local": {"max_prompt_tokens": 20, "max_queued_tokens": 100, "when_full": True},
        },
    },
    "autoscaled": {
        "cluster": {
            "count": 2,
            "start_up": _START,
            "autoscaler": {
                "name": "hpa", "metric": "num_in_flight", "target": 2, "stabilization_s": 0.2,
                "every_s": 0.1, "min": 1, "max": 4,
            },
        },
    },
    "failing": {
        "cluster": {
            "count": 3,
            "start_up": _START,
            "failures": {
                "engines": [{"engine": 0, "at_s": 0.1, "down_s": 0.2}],
                "mtbf_s": 1, "mttr_s": 0.2, "max_retries": 2, "deadline_s": 9,
                "stragglers": [{"engine": 1, "from_s": 0.1, "to_s": 0.4, "slowdown": 3}],
            },
        },
    },
    "migrating": {
        "cluster": {
            "count": 2, "router": "llumnix", "link": "ethernet-100g",
            "migration": {
                "name": "llumnix", "every_ms": 10, "leave_below": 2, "last_stage_blocks": 2,
                "max_stages": 3,
            },
        },
    },
    "tiers": {
        "engine": {
            "enable_prefix_caching": True, "num_gpu_blocks_override": 140,
            "max_model_len": 2048, "max_num_seqs": 4, "preemption_mode": "swap",
            "kv_offload": {
                "tiers": [
                    {"name": "cpu", "gib": 1, "link": "pcie-4"},
                    {
                        "name": "disk", "num_blocks": 50, "load_gb_per_s": 3,
                        "store_gb_per_s": 1, "latency_us": 80, "write": "back",
                    },
                ],
                "load": "always",
            },
        },
        "workload": {"session_rate": 4.0, "sessions": _SESSIONS},
    },
    "sessions": {
        "engine": {"enable_prefix_caching": True, "max_model_len": 2048},
        "workload": {"session_rate": 4.0, "sessions": _SESSIONS},
        "policy": {"name": "program_srpt", "predictor": "oracle"},
    },
    "speculation": {
        "engine": {
            "max_model_len": 2048,
            "speculation": {
                "method": "eagle", "num_speculative_tokens": 4, "num_layers": 1,
                "acceptance": {"rates": [0.9, 0.5], "spread": 0.1},
                "draft_length": {"name": "by_batch_size", "schedule": [[1, 4], [4, 0]]},
            },
        },
    },
    "classes": {
        "workload": {
            "num_requests": 20, "trace": "azure-conv",
            "classes": {
                "paying": {
                    "arrivals": {"process": "poisson", "rate": 9}, "priority": 0,
                    "slo": {"ttft_ms": 500},
                },
                "agent": {
                    "priority": 1, "prompt_tokens": 90,
                    "shared_prefix": {"tokens": 64, "groups": 3},
                    "arrivals": {"process": "on_off", "rate": 5, "mean_on_s": 1, "mean_off_s": 1},
                },
            },
        },
        "measure": {"warm_up_s": 0.1, "cool_down_s": 0.1},
    },
    "predicted": {
        "policy": {
            "name": "trail", "preemptible_share": 0.5,
            "predictor": {"name": "noisy", "sigma": 0.3},
        },
    },
    "find": {
        "find": {
            "maximize": "workload.request_rate", "between": [20, 60], "tolerance": 0.5,
            "at_most": {"p99_ttft_ms": 100}, "at_least": {"slo_attainment": 0.1}, "settle": False,
        },
        "sweep": {"policy": ["fcfs", "shortest_prompt"]},
    },
    "tune": {
        "tune": {
            "maximize": "output_throughput", "over": {"engine.max_num_seqs": [4, 8]},
            "at_most": {"p99_itl_ms": 100}, "levels": 2, "tolerance": 0.9, "max_settings": 3,
            "settle": False,
        },
    },
}  # fmt: skip
"""Name to what an experiment of it has beside `_BASE`."""


def experiment(feature: str) -> dict[str, Any]:
    """Return an experiment with a feature, as plain data."""
    return _BASE | FEATURES[feature]
