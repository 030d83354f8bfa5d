"""What a run says whose policy or router goes by cached prefixes where there are none."""

import pytest

from schedlab.experiments.results.tables import warnings
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec

CACHES = {"enable_prefix_caching": True}
PARTS = {"p": {"role": "prefill"}, "d": {"role": "decode"}}


def said(policy="fcfs", engine=None, **cluster):
    """Return who is said to be without prefixes in a run of three requests."""
    spec = make_spec({
        "model": "llama-3-8b", "hardware": "h100", "policy": policy, "engine": engine or {},
        "workload": {
            "num_requests": 3, "request_rate": 10, "prompt_tokens": 20, "output_tokens": 2,
        },
        **({"cluster": cluster} if cluster else {}),
    })  # fmt: skip
    told = [line.split(" goes by cached prefixes") for line in warnings(run(spec))]
    return [who for who, *rest in told if rest]


@pytest.mark.parametrize("policy", ["lpm", "dfs_weight", {"name": "boosted", "inner": "lpm"}])
def test_policy_by_prefixes_without_a_cache_is_warned_of(policy):
    name = policy if isinstance(policy, str) else policy["name"]
    assert said(policy) == [f"policy {name}"]
    assert said(policy, CACHES) == []


@pytest.mark.parametrize("router", ["prefix_aware", "llm_d", "preble"])
def test_router_by_prefixes_without_a_cache_is_warned_of(router):
    assert said(count=2, router=router) == [f"router {router}"]
    assert said(engine=CACHES, count=2, router=router) == []


def test_of_prompts_and_answers_apart_one_cache_suffices():
    assert said("lpm", router="llm_d", decode_router="preble", pools=PARTS) == [
        "decode_router preble", "policy lpm", "router llm_d",
    ]  # fmt: skip
    assert said("lpm", CACHES, router="llm_d", decode_router="preble", pools=PARTS) == []


def test_other_policies_and_routers_are_not_warned_of():
    assert said("sarathi", count=2, router="least_kv") == []
