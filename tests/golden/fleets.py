"""Where every router sends requests, and what becomes of them in fleets of all kinds."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry as policies
from schedlab.policies.routers import registry as routers
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.cluster import simulate_cluster
from schedlab.sim.record.perfetto import write_trace
from tests.golden import small_runs
from tests.laws import BatchShape, LinearCost

# -- fleets: where every router sends requests, and what becomes of them -------------------------

ROUTERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in routers.names()},
    "autellix/short": {"max_small_tokens": 30},
    "consistent_hashing/tenant": {"key": "tenant", "num_points": 3},
    "consistent_hashing/prefix": {"key": "prefix", "load_factor": 1.01},
    "dynamo/warm": {"overlap_weight": 2.0, "temperature": 0.5},
    "llm_d/few": {"max_prefix_blocks": 2},
    "llm_d/precise": {"precise": True, "kv": 5.0},
    "llumnix/code": {"rule": "code"},
    "power_of_d/3": {"d": 3},
    "preble/eager": {"window_s": 1e-4, "balance_ratio": 1.1, "min_requests": 0},
    "prefix_aware/least_loaded": {"cache_threshold": 0.8, "low_match": "least_loaded"},
    "prefix_aware/precise": {"precise": True, "cache_threshold": 0.5},
    "prefix_aware/balancing": {"balance_abs": 2, "balance_rel": 1.2, "max_tree_tokens": 40},
    "session_affinity/tenant": {"key": "tenant"},
    "slo_aware/margin": {"margin": 0.4},
    "vllm/weight": {"waiting_weight": 1.0},
}


def fleet(case: str) -> dict[str, Any]:
    """Send a small workload to three engines, two of which are smaller, seen now and then."""
    config = EngineConfig(
        num_blocks=90, max_model_len=100, block_size=4, max_num_seqs=5,
        max_num_batched_tokens=24, enable_prefix_caching=True,
    )  # fmt: skip
    configs = (config, replace(config, num_blocks=60), replace(config, max_num_seqs=3))
    workload = small_runs.workload("switches")
    found = {}
    for staleness_ns, max_concurrency in ((0, None), (7_000, None), (0, 9)):
        engines = [
            Engine(one, policies.make("fcfs"), SimExecutor(Pricing(LinearCost())))
            for one in configs
        ]
        router = routers.make(case.partition("/")[0], 3, **ROUTERS[case])
        log = simulate_cluster(
            engines, router, workload, max_concurrency, staleness_ns=staleness_ns
        )
        requests = log.requests()
        placed = "".join(map(str, requests["engine"].tolist()))
        found[f"{staleness_ns} ns, {max_concurrency}"] = [placed, _digest(requests, log.steps())]
    return found


def _digest(*tables: Any) -> str:
    text = hashlib.sha256()
    for table in tables:
        for name in table:
            if np.issubdtype(table[name].dtype, np.integer):
                text.update(name.encode() + np.asarray(table[name], dtype=np.int64).tobytes())
    return text.hexdigest()[:16]


_PROMPTS_APART = {
    "policy": {"name": "sjf", "predictor": {"name": "noisy", "sigma": 0.5, "latency_s": 0.004}},
    "workload": {
        "trace": "azure-conv", "num_requests": 50, "request_rate": 12.0,
        "classes": {"a": {"share": 1}, "b": {"share": 2, "prompt_tokens": 640}},
    },
    "engine": {"num_gpu_blocks_override": 500, "max_model_len": 6000, "watermark": 0.05,
               "max_num_seqs": 10},
    "cluster": {
        "router": {"name": "jsq", "staleness_ms": 30},
        "decode_router": "least_kv",
        "link": {"gb_per_s": 2.0, "latency_us": 700},
        "pools": {
            "prompts": {"count": 2, "role": "prefill", "engine": {"tensor_parallel_size": 2}},
            "whole": {"hardware": "h100"},
            "answers": {"count": 2, "role": "decode",
                        "engine": {"max_model_len": 5000, "num_gpu_blocks_override": 400}},
        },
    },
    "frontend": {"latency_s": 0.002, "request_s": 0.001, "output_token_s": 20e-6, "servers": 2},
}  # fmt: skip
FLEETS: dict[str, dict[str, Any]] = {
    "prompts apart": _PROMPTS_APART,
    "prompts apart, closed loop": {
        **_PROMPTS_APART,
        "workload": {"trace": "azure-conv", "num_requests": 40, "arrivals": "closed_loop",
                     "max_concurrency": 8},
        "frontend": None,
    },
    "prompts apart, first token with its KV": {
        **_PROMPTS_APART,
        "cluster": {**_PROMPTS_APART["cluster"], "first_token": "transfer",
                    "link": {"gb_per_s": 2.0, "latency_us": 700, "by_layer": True}},
    },
    "prompts apart, caches and first tokens of answers": {
        "policy": "fcfs",
        "workload": {
            "session_rate": 3.0,
            "sessions": {
                "count": 25, "turns": 4, "first_tokens": 900, "think_s": 0.6,
                "new_tokens": {"distribution": "exponential", "mean": 120, "cap": 600},
                "output_tokens": {"distribution": "uniform", "low": 1, "high": 60},
                "shared_prefix": {"tokens": 256, "groups": 2},
            },
        },
        "engine": {"enable_prefix_caching": True, "num_gpu_blocks_override": 500,
                   "max_model_len": 6000, "max_num_seqs": 8},
        "cluster": {
            "first_token": "decode",
            "decode_router": "lmetric",
            "link": {"gb_per_s": 2.0, "latency_us": 700},
            "handover_overhead_ms": 4,
            "local": {"max_uncached_tokens": 60, "max_queued_requests": 6},
            "pools": {
                "prompts": {"count": 2, "role": "prefill"},
                "answers": {"count": 2, "role": "decode",
                            "engine": {"enable_prefix_caching": True}},
            },
        },
    },
    "engines alone": {
        "policy": "vtc",
        "workload": _PROMPTS_APART["workload"],
        "engine": {"num_gpu_blocks_override": 300, "max_model_len": 4000},
        "cluster": {"count": 2, "router": "round_robin"},
    },
}  # fmt: skip


def trace(case: str) -> dict[str, Any]:
    """Run a fleet; what moved between engines, every metric of it, and the events of its trace."""
    keys = {key: value for key, value in FLEETS[case].items() if value is not None}
    slow = f"{__name__}:SlowSteps"
    result = run(make_spec({"name": "pinned", "cost_model": slow, **keys}))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(result, path, max_requests=30, max_steps=200)
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds: dict[str, int] = {}
    times_us = 0.0
    for event in events:
        kinds[event["name"].split(" ")[0]] = kinds.get(event["name"].split(" ")[0], 0) + 1
        times_us += event.get("ts", 0.0) + 3 * event.get("dur", 0.0)
    numbers = [
        value
        for event in events
        for value in event.get("args", {}).values()
        if isinstance(value, int | float)
    ]
    return {
        **result.metrics(),
        "requests": _digest(result.requests, result.log.steps()),
        "events": kinds,
        "event_us": times_us,
        "event_numbers": hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16],
    }


class SlowSteps(LinearCost):
    """Steps of some 30 ms, whatever the roofline says next year."""

    def __init__(self, deployment: object = None) -> None:
        super().__init__(20_000_000, 60_000, 300)
        self.num_stages = getattr(deployment, "pipeline_parallel_size", 1)

    def stations_ns(self, shape: BatchShape) -> list[int]:
        """Return a step divided evenly, with a millisecond of each link."""
        took_ns = self.step_ns(shape)[0]
        stations = [1_000_000] * (2 * self.num_stages - 1)
        stations[::2] = [took_ns // self.num_stages] * self.num_stages
        return stations


CASES = {
    **{f"router {name}": (fleet, name) for name in ROUTERS},
    **{f"fleet {name}": (trace, name) for name in FLEETS},
}
