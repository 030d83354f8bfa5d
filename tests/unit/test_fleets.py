import json
from dataclasses import asdict

import numpy as np
import pytest

from schedlab.experiments.running.fleet import resolve_fleet
from schedlab.experiments.running.provenance import provenance
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import load_spec, make_spec
from schedlab.policies import registry
from schedlab.policies.routers import registry as routers
from schedlab.sim.errors import PolicyError, SpecError
from schedlab.sim.result import RunResult

WORKLOAD = {"trace": "azure-conv", "num_requests": 40, "request_rate": 30.0}
SMALL = {"num_gpu_blocks_override": 400, "max_model_len": 4000, "max_num_seqs": 6}


def experiment(**changes):
    return make_spec({"name": "fleet", "workload": WORKLOAD, "engine": SMALL, **changes})


def policy_for(name):
    needs = registry.make(name).needs_prediction
    return {"name": name, "predictor": "oracle"} if needs else name


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_one_engine_in_a_cluster_gives_the_bytes_of_that_engine_alone(name):
    keys = {"policy": policy_for(name), "workload": {**WORKLOAD, "num_requests": 24}}
    alone = run(experiment(**keys))
    # `jsq` looks at the engine, so that it runs behind the router; the other is run by itself,
    # which is the same whatever the policy.
    for router in ("jsq", "round_robin") if name in ("fcfs", "static") else ("jsq",):
        among = run(experiment(**keys, cluster={"count": 1, "router": router}))
        for table, other in (
            (alone.requests, among.requests),
            (alone.log.steps(), among.log.steps()),
            (alone.log.preemptions(), among.log.preemptions()),
        ):
            for column, values in table.items():
                assert np.array_equal(values, other[column], equal_nan=values.dtype.kind == "f")
        metrics = among.metrics()
        assert {name: metrics[name] for name in alone.metrics()} == pytest.approx(
            alone.metrics(), rel=0, abs=0, nan_ok=True
        )


POOLS = {
    "router": "round_robin",
    "pools": {
        "old": {"count": 2},
        "new": {"hardware": "h100", "policy": "sjf", "engine": {"num_gpu_blocks_override": 800}},
    },
}
PREDICTED = {"name": "fcfs", "predictor": "oracle"}


def test_pool_has_the_keys_of_the_experiment_but_for_its_own():
    old, new = resolve_fleet(experiment(cluster=POOLS, policy=PREDICTED))
    assert (old.num_engines, new.num_engines) == (2, 1)
    assert (old.point.deployment.gpu.name, new.point.deployment.gpu.name) == (
        "a100-80gb",
        "h100-80gb",
    )
    assert (old.point.config.num_blocks, new.point.config.num_blocks) == (400, 800)
    assert old.point.config.max_num_seqs == new.point.config.max_num_seqs == 6
    assert new.point.spec.policy.name == "sjf"


def test_provenance_tells_of_one_engine_what_the_first_pool_is_and_each_pool_its_own():
    spec = experiment(cluster=POOLS, policy=PREDICTED)
    old, new = kinds = resolve_fleet(spec)
    told = provenance(spec, kinds)
    assert list(told["pools"]) == ["old", "new"]
    for kind, one in zip(kinds, told["pools"].values(), strict=True):
        assert one["num_engines"] == kind.num_engines
        assert one["hardware"] == kind.point.deployment.gpu.name
        assert one["engine"]["num_blocks"] == kind.point.config.num_blocks
        assert one["policy_source"] == registry.policy_class(kind.point.spec.policy.name).source
        assert one["memory"] == asdict(kind.point.memory)
    assert told["hardware"] == old.point.deployment.gpu.name != new.point.deployment.gpu.name
    assert told["engine"] == told["pools"]["old"]["engine"]
    assert told["router_source"] == routers.router_class("round_robin").source
    assert "pools" not in provenance(spec, kinds[:1])
    alone = experiment(cluster=None, policy=PREDICTED)
    assert "router_source" not in provenance(alone, resolve_fleet(alone))


def test_requests_fit_the_engine_of_the_shortest_model_length():
    pools = {"long": {"engine": {"max_model_len": 300}}, "short": {"engine": {"max_model_len": 90}}}
    workload = {
        "prompt_tokens": {"distribution": "uniform", "low": 20, "high": 120}, "output_tokens": 20,
        "num_requests": 20, "request_rate": 9.0, "too_long": "drop",
    }  # fmt: skip
    for order in (pools, dict(reversed(pools.items()))):
        requests = run(experiment(workload=workload, cluster={"pools": order})).requests
        total = requests["prompt_tokens"].astype(int) + 20
        assert 80 < total.max() <= 90
        assert (requests["status"] == 0).all()


def test_every_row_says_its_engine_and_engines_are_told_apart(tmp_path):
    result = run(experiment(cluster=POOLS, policy=PREDICTED))
    assert result.requests["engine"].tolist()[:6] == [0, 1, 2, 0, 1, 2]
    assert set(result.log.steps()["engine"]) == {0, 1, 2}
    assert [e.pool for e in result.engines] == ["old", "old", "new"]
    assert [e.kv_capacity_tokens for e in result.engines] == [6400, 6400, 12800]
    assert set(result.provenance["pools"]) == {"old", "new"}
    result.save(tmp_path)
    again = RunResult.load(tmp_path)
    assert again.engines == result.engines
    assert again.metrics() == pytest.approx(result.metrics(), nan_ok=True)
    result.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[-1].endswith("engine 2 (new)")


def test_memory_is_a_share_of_each_engines_own():
    result = run(experiment(cluster=POOLS, policy=PREDICTED))
    steps = result.log.steps()
    capacity = np.array([6400, 6400, 12800])[steps["engine"]]
    took = steps["end_ns"] - steps["start_ns"]
    share = np.average(steps["kv_allocated_tokens"] / capacity, weights=took)
    assert result.metrics()["kv_allocated_share"] == pytest.approx(share)
    most = (steps["kv_allocated_tokens"] / capacity).max()
    assert result.metrics()["max_kv_allocated_share"] == pytest.approx(most)


def test_fleet_metrics_are_what_their_words_say():
    result = run(experiment(cluster=POOLS, policy=PREDICTED))
    metrics, steps = result.metrics(), result.log.steps()
    busy = [
        (steps["end_ns"] - steps["start_ns"])[steps["engine"] == i].sum() / 1e9 for i in range(3)
    ]
    assert metrics["load_imbalance"] == pytest.approx(max(busy) / np.mean(busy))
    assert metrics["request_imbalance"] == pytest.approx(14 / (40 / 3))
    duration_s = metrics["duration_s"]
    assert metrics["max_engine_busy_share"] == pytest.approx(max(busy) / duration_s)
    assert result.metric("engine_busy_share", engine=2) == pytest.approx(busy[2] / duration_s)
    assert metrics["gpu_seconds"] == pytest.approx(3 * duration_s)
    usd = (2 * 21.60 / 8 + 49.24 / 8) * duration_s / 3600
    assert metrics["cost_usd"] == pytest.approx(usd)
    tokens = metrics["total_output_tokens"]
    assert metrics["usd_per_million_output_tokens"] == pytest.approx(usd / tokens * 1e6)


def test_cost_of_hardware_without_a_price_is_not_a_number():
    result = run(experiment(cluster=2, hardware="l4", model="schedlab-small"))
    assert np.isnan(result.metrics()["cost_usd"])


def test_run_without_a_cluster_has_no_fleet_metrics():
    assert "load_imbalance" not in run(experiment()).metrics()


# Open and, for one router that looks at engines and one that does not, closed.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "max_concurrency"),
    [*((name, None) for name in routers.names()), ("jsq", 5), ("round_robin", 5)],
)
def test_fleet_takes_the_same_steps_slowly(name, max_concurrency):
    workload = {**WORKLOAD, "arrivals": "closed_loop", "max_concurrency": max_concurrency}
    workload.pop("request_rate")
    prefix = {"classes": {"a": {"shared_prefix": {"tokens": 256, "groups": 3}}}}
    keys = {
        "workload": {**(workload if max_concurrency else WORKLOAD), **prefix},
        "policy": PREDICTED,
        "slo": {"ttft_ms": 500},
        "cluster": {"count": 3, "router": name},
    }
    caching = {**SMALL, "enable_prefix_caching": True}
    fast, slow = (
        run(experiment(**keys, engine={**caching, "fast_forward": fast})) for fast in (True, False)
    )
    for column, values in fast.requests.items():
        assert np.array_equal(values, slow.requests[column], equal_nan=values.dtype.kind == "f"), (
            column
        )
    assert fast.metrics()["completed"] + fast.metrics()["rejected"] == 40
    assert fast.log.num_steps == slow.log.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefix_aware", "llm_d"])
def test_precise_router_sees_the_caches_as_step_by_step(name):
    keys = {
        "workload": {
            **WORKLOAD, "request_rate": 60.0, "num_requests": 60,
            "classes": {"a": {"shared_prefix": {"tokens": 512, "groups": 6}}},
        },
        "cluster": {"count": 2, "router": {"name": name, "precise": True}},
    }  # fmt: skip
    tight = {**SMALL, "num_gpu_blocks_override": 260, "enable_prefix_caching": True}
    fast, slow = (
        run(experiment(**keys, engine={**tight, "fast_forward": fast})) for fast in (True, False)
    )
    assert np.array_equal(fast.requests["engine"], slow.requests["engine"])
    assert np.array_equal(fast.requests["finish_ns"], slow.requests["finish_ns"])
    assert fast.requests["prefix_hit_tokens"].sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["least_kv", "vllm", "slo_aware"])
def test_stale_state_is_the_same_step_by_step_and_differs_from_live_state(name):
    chosen = {}
    for staleness_ms in (0, 700):
        router = {"name": name, "staleness_ms": staleness_ms}
        keys = {"cluster": {"count": 4, "router": router}, "slo": {"ttft_ms": 300}}
        for fast in (True, False):
            result = run(experiment(**keys, engine={**SMALL, "fast_forward": fast}))
            chosen[staleness_ms, fast] = result.requests["engine"].tolist()
    assert chosen[0, True] == chosen[0, False]
    assert chosen[700, True] == chosen[700, False]
    assert chosen[0, True] != chosen[700, True]


@pytest.mark.parametrize("rule", ["paper", "code"])
def test_freeness_counts_what_was_sent_since_the_report(rule):
    a, b = ({"count": 1, "engine": {"num_gpu_blocks_override": n}} for n in (6000, 5990))
    router = {"name": "llumnix", "rule": rule, "staleness_ms": 60_000}
    workload = {"num_requests": 40, "request_rate": 120, "prompt_tokens": 500, "output_tokens": 5}
    keys = {"workload": workload, "cluster": {"router": router, "pools": {"a": a, "b": b}}}
    engines = run(make_spec(keys)).requests["engine"]
    # 32 blocks each: whoever got one is the fuller, by 22 or by 32 and 10.
    assert np.bincount(engines).tolist() == [20, 20]


def test_reports_stop_when_nobody_comes_any_more_and_skip_where_nothing_happens():
    # A report every microsecond over a pause of a day would never end.
    workload = {"trace": "fixed", "num_requests": 2, "request_rate": 1e-5}
    router = {"name": "vllm", "staleness_ms": 50}
    result = run(make_spec({"workload": workload, "cluster": {"count": 2, "router": router}}))
    assert result.metrics()["completed"] == 2


class NoEngine(routers.Router):
    def route(self, request, engines):
        return len(engines)


class Broken(routers.Router):
    def route(self, request, engines):
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoEngine", r"router NoEngine, request 0: route\(\) returned 2, and there are engines 0 "),
        ("Broken", r"router Broken, request 0: route\(\) raised KeyError: 'mine'"),
    ],
)
def test_router_that_names_no_engine_is_told(name, message):
    with pytest.raises(PolicyError, match=message):
        run(experiment(cluster={"count": 2, "router": f"{__name__}:{name}"}))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({}, "cluster: needs `count`"),
        ({"count": 2, "pools": {"a": {}}}, "cluster: needs `count`"),
        ({"count": 0}, "cluster.count: must be >= 1"),
        (
            {"count": 2, "router": "jsp"},
            "cluster.router.name: unknown router 'jsp'; did you mean jsq",
        ),
        (
            {"count": 2, "router": {"name": "power_of_d", "dd": 2}},
            "cluster.router.dd: power_of_d has no such knob; did you mean d",
        ),
        (
            {"count": 2, "router": {"name": "round_robin", "staleness_s": 3}},
            "cluster.router.staleness_s: round_robin has no such knob; did you mean staleness_ms",
        ),
        ({"count": 2, "router": {"name": "power_of_d", "d": 0}}, "cluster.router: .*d must be"),
        ({"count": 2, "router": "predicted_length"}, "cluster.router: .*needs predictions"),
        ({"pools": {"a": {"hardwear": "h100"}}}, "unknown key.*hardware"),
        ({"pools": {"a": {"hardware": "h1000"}}}, r"cluster.pools.a.hardware: .*'h100"),
        ({"pools": {"a": {"policy": "fcsf"}}}, r"cluster.pools.a.policy.name: unknown policy"),
        ({"pools": {"a": {"engine": {"max_seqs": 4}}}}, "cluster.pools.a.*max_num_seqs"),
        (
            {"pools": {"a": {"engine": {"block_size": 0}}}},
            "cluster.pools.a.engine.block_size: must be >= 1",
        ),
        (
            {"pools": {"a": {"engine": {"data_parallel_size": 2}}}},
            "cluster.pools.a.engine.data_parallel_size: must be 1",
        ),
        (
            {"pools": {"a": {"policy": {"name": "sjf", "predictor": "oracle"}}}},
            "cluster.pools.a.policy.predictor: a request is predicted once",
        ),
        ({"pools": {"a b": {}}}, "'a b' is no name"),
    ],
)
def test_wrong_cluster_is_told_by_its_key(cluster, message):
    with pytest.raises(SpecError, match=message):
        experiment(cluster=cluster)


def test_model_that_does_not_fit_one_of_the_pools_is_told_by_its_pool():
    spec = experiment(
        model="llama-3-70b",
        cluster={"pools": {"big": {"engine": {"tensor_parallel_size": 8}}, "small": {}}},
    )
    with pytest.raises(SpecError, match=r"cluster\.pools\.small: .*llama-3-70b"):
        run(spec)


def test_caches_with_different_block_sizes_are_refused():
    pools = {"a": {}, "b": {"engine": {"block_size": 32}}}
    spec = experiment(cluster={"pools": pools}, engine={**SMALL, "enable_prefix_caching": True})
    with pytest.raises(SpecError, match="must have one block_size"):
        run(spec)


def test_real_backend_and_several_engines_are_refused():
    with pytest.raises(SpecError, match="cluster: only the simulation has several engines"):
        experiment(cluster=2, backend="real")


def test_cluster_can_be_swept_by_count_router_and_pool(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "workload: {trace: azure-conv, num_requests: 5, request_rate: 2}\n"
        "cluster: {router: jsq, pools: {a: {}, b: {hardware: h100}}}\n"
        "sweep: {cluster.pools.a.count: [1, 3], cluster.router: [random, {name: power_of_d, d: 3}],"
        " cluster.pools.b.hardware: [h100, a100]}\n"
    )
    assert len(load_spec(path).sweep) == 3
