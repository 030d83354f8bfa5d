"""Experiments that ask for much at once, drawn: any policy, engine, fleet, workload and command."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from schedlab.policies import registry as policies
from schedlab.policies.routers import registry as routers
from tests.torture.feature_experiments import FEATURES, experiment
from tests.torture.sandbox import Case
from tests.workloads import KV_ALLOCATORS

NUM_COMBINED = 6_000
"""How many there are."""

_ENGINE: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (1, 2, 8, 64),
    "max_num_resident": (1, 4, 100),
    "max_num_batched_tokens": (16, 65, 512, 4096),
    "block_size": (1, 8, 32),
    "max_model_len": (300, 1024, 2048),
    "enable_chunked_prefill": (True, False),
    "long_prefill_token_threshold": (20,),
    "threshold_spares_lone_request": (True,),
    "watermark": (0.01, 0.1),
    "scheduler_reserve_full_isl": (True,),
    "kv_allocator": KV_ALLOCATORS[1:],
    "enable_prefix_caching": (True, True, False),
    "free_uncached_first": (True,),
    "async_scheduling": (True,),
    "arrivals_between_steps": (True,),
    "cuda_graph_padding": (True,),
    "reserve_null_block": (True,),
    "preempt_in_order": (True,),
    "serve_behind_preempted": (True,),
    "names_accepted_drafts": (True,),
    "preemption_mode": ("swap", "swap", "recompute"),
    "swap_space": (0, 0.01, 4),
    "tensor_parallel_size": (2,),
    "pipeline_parallel_size": (2, 4),
    "data_parallel_size": (2,),
    "data_parallel_lockstep": (False,),
    "dtype": ("fp16", "int8"),
    "weight_dtype": ("int4",),
    "kv_cache_dtype": ("fp8",),
    "profile": ("vllm-0.19", "vllm-0.24", "vllm-0.32", "vllm-0.33"),
    "check_horizon": (True,),
    "fast_forward": (False,),
    "scheduling_overhead": ({"base_s": 0.001, "per_running_s": 1e-5, "per_waiting_s": 1e-6},),
}
_WORKLOADS: tuple[dict[str, Any], ...] = (
    {"num_requests": 30, "trace": "azure-conv", "request_rate": 20, "too_long": "clip_prompt"},
    {"num_requests": 30, "request_rate": ".inf", "prompt_tokens": 200, "output_tokens": 40},
    {"num_requests": 20, "prompt_tokens": 100, "output_tokens": 9, "max_concurrency": 3},
    {
        "num_requests": 25,
        "prompt_tokens": {"distribution": "exponential", "mean": 90, "cap": 250},
        "output_tokens": {"distribution": "uniform", "low": 1, "high": 45},
        "arrivals": {"process": "on_off", "rate": 30, "mean_on_s": 0.5, "mean_off_s": 0.5},
    },
    {**FEATURES["sessions"]["workload"], "max_concurrency": 2},
    FEATURES["sessions"]["workload"],
    FEATURES["classes"]["workload"],
)  # fmt: skip
_TOGETHER: tuple[tuple[str, ...], ...] = (
    (), (), (), (), ("tiers",), ("tiers",), ("speculation",), ("speculation",),
    ("kinds of engines",), ("disaggregated",), ("disaggregated",), ("autoscaled",),
    ("failing",), ("migrating",),
    ("tiers", "failing"), ("tiers", "autoscaled"), ("tiers", "kinds of engines"),
    ("autoscaled", "failing"), ("disaggregated", "failing"), ("disaggregated", "autoscaled"),
    ("disaggregated", "migrating"), ("migrating", "failing"), ("migrating", "autoscaled"),
    ("migrating", "kinds of engines"), ("migrating", "failing", "autoscaled"),
    ("disaggregated", "migrating", "autoscaled"), ("tiers", "speculation"),
    ("speculation", "failing"),
)  # fmt: skip
"""Features of an experiment; the last ones are refused."""
_KEYS = ("engine", "cluster")
_PREDICTORS: tuple[Any, ...] = (
    "oracle", {"name": "noisy", "sigma": 0.5}, {"name": "refined"}, {"name": "constant"},
)  # fmt: skip
_BESIDE: tuple[dict[str, Any], ...] = (
    {"frontend": "vllm-0.15-h100"},
    {"frontend": {"request_s": 0.01, "output_token_s": 1e-4, "servers": 2}},
    {"measure": {"warm_up_s": 0.2, "cool_down_s": 0.1}},
    {"measure": {"warm_up_requests": 5}},
    {"slo": {"ttft_ms": 300, "tpot_ms": 30, "e2el_ms": 2000}},
    {"replications": 2},
    {"sweep": {"policy": ["fcfs", "vtc"]}},
    {"sweep": {"workload.num_requests": [1, 3]}},
    {"hardware": "h100-80gb"},
    {"model": "qwen2.5-7b"},
)
_FOLLOW_UPS = (("by-class",), ("compare",), ("batch-means",), ("plot",), ("report",))
_RUN_FIRST = """
import sys
from schedlab.experiments.commands import cli
argv, sys.argv = sys.argv, ["schedlab", "run", "s.yaml", "-q", "-o", "../made"]
try:
    cli.main()
except SystemExit:
    pass
sys.argv = argv
"""


def combined_cases(numbers: Iterable[int] = range(NUM_COMBINED)) -> Iterator[tuple[str, Case]]:
    """Run experiments that ask for much at once; some are impossible, and refused by name."""
    for number in numbers:
        draw = random.Random(number)
        told, spec = _drawn(draw)
        files = {"s.yaml": json.dumps(spec).replace('".inf"', ".inf").encode()}
        argv: tuple[str, ...] = ("run", "s.yaml", "-q", "-o", "out")
        prepare = ""
        if (chance := draw.random()) < 0.05:
            argv, prepare = (*draw.choice(_FOLLOW_UPS), "../made"), _RUN_FIRST
        elif chance < 0.1:
            argv = ("check", "s.yaml")
        named = ("../made", "s.yaml") if prepare else ("s.yaml",)
        case = Case(argv, files, named, prepare, keeps_with="no request was answered")
        yield f"combined {number} {argv[0]}: {told}", case


def _drawn(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return what an experiment is made of, and the experiment."""
    name = draw.choice(policies.names())
    policy: dict[str, Any] = {"name": name}
    if policies.make(name).needs_prediction or draw.random() < 0.3:
        policy["predictor"] = draw.choice(_PREDICTORS)
    spec = experiment("kinds of engines") | {"policy": policy, "seed": draw.randrange(100)}
    del spec["cluster"]
    if draw.random() < 0.7:
        spec["workload"] = draw.choice(_WORKLOADS)
    engine = {key: draw.choice(_ENGINE[key]) for key in draw.sample(sorted(_ENGINE), 4)}
    if draw.random() < 0.5:  # memory for few requests
        size = engine.get("block_size", 16)
        engine |= {
            "max_model_len": 512,
            "num_gpu_blocks_override": 512 // size + draw.choice((1, 9)),
        }
    spec["engine"] = spec["engine"] | engine
    features = draw.choice(_TOGETHER)
    for feature in features:
        all_of_it = deepcopy(FEATURES[feature])
        spec = _merged(spec, {key: all_of_it[key] for key in _KEYS if key in all_of_it})
    if "pools" in spec.get("cluster", {}):
        spec["cluster"].pop("count", None)
    if "cluster" in spec and draw.random() < 0.5:
        spec["cluster"]["router"] = draw.choice(routers.names())
    for extra in draw.sample(_BESIDE, draw.choice((0, 1, 2))):
        spec |= extra
    return ", ".join((name, *features)), spec


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with all of two, the second one's where both say something."""
    both = {key: one[key] for key in one if key in other}
    parts = {
        key: _merged(mine, other[key])
        for key, mine in both.items()
        if isinstance(mine, Mapping) and isinstance(other[key], Mapping)
    }
    return {**one, **other, **parts}
