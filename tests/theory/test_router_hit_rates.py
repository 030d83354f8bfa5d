"""Hits of caches that evict nothing lie between those of nobody and of all sharing, by any router.

Requests come one after the other, so that each finds all that was computed before it.
"""

import pytest

from schedlab.experiments.bench.hit_rates import bounds, requests_of
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.routers import registry as routers
from tests.laws import arrival

NEEDS_MORE = ("session_affinity",)  # a workload of sessions


def prefixes(router, num_engines, num_requests=60):
    return make_spec({
        "seed": 3, "model": "schedlab-small", "hardware": "a100-80gb",
        "policy": {"name": "fcfs", "predictor": "oracle"},
        "slo": {"ttft_ms": 1000, "tpot_ms": 100},
        "engine": {"enable_prefix_caching": True, "block_size": 16, "max_model_len": 2000,
                   "num_gpu_blocks_override": 10_000},
        "workload": {
            "num_requests": num_requests, "request_rate": 0.01, "output_tokens": 2,
            "prompt_tokens": {"distribution": "uniform", "low": 40, "high": 200},
            "classes": {"agents": {"share": 3, "shared_prefix": {"tokens": 64, "groups": 4}},
                        "chat": {"share": 1}},
        },
        "cluster": {"count": num_engines, "router": router},
    })  # fmt: skip


@pytest.mark.parametrize("num_engines", [1, 4])
@pytest.mark.parametrize("name", sorted(set(routers.names()) - set(NEEDS_MORE)))
def test_hits_behind_any_router_lie_between_both_bounds(name, num_engines):
    spec = prefixes(name, num_engines)
    least, most = bounds(requests_of(spec), num_engines, 16)
    hits = int(run(spec).requests["prefix_hit_tokens"].sum())
    assert 0 < least <= hits <= most
    assert (least == most) is (num_engines == 1)


def test_bounds_are_reached_by_equal_prompts_in_turn_and_at_one_engine():
    requests = [arrival(i, prompt=65, prefix_hash_ids=(1, 2, 3, 4)).request for i in range(10)]
    assert bounds(requests, 4, 16) == ((10 - 4) * 64, 9 * 64)
    whole = [arrival(i, prompt=64, prefix_hash_ids=(1, 2, 3, 4)).request for i in range(10)]
    assert bounds(whole, 1, 16) == (9 * 48, 9 * 48)  # the last token is always computed


def test_knowing_prefixes_reaches_more_of_what_can_be_shared():
    by_prefix = {"name": "prefix_aware", "cache_threshold": 0.3}  # of most it is less than half
    known, blind = (
        run(prefixes(router, 4, 100)).metric("prefix_hit_share")
        for router in (by_prefix, "round_robin")
    )
    assert known > blind
