"""A specification's names are looked up once, and its limits reach the engine."""

from dataclasses import MISSING, fields

import pytest

from schedlab.experiments.running import resolved
from schedlab.experiments.running.resolved import resolve
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.engine import EngineSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost.overhead import SchedulingOverhead
from schedlab.sim.errors import SpecError

SPEC = {"workload": {"trace": "azure-conv", "num_requests": 5, "request_rate": 2.0}}
# One value beside the default of every limit that specification and engine both name.
CHANGED = {
    "max_model_len": 1000, "block_size": 32, "max_num_seqs": 16, "max_num_resident": 500,
    "max_num_batched_tokens": 1024,
    "enable_chunked_prefill": False, "long_prefill_token_threshold": 100, "watermark": 0.1,
    "scheduler_reserve_full_isl": True, "kv_allocator": "contiguous_max",
    "preemption_mode": "swap", "enable_prefix_caching": True, "async_scheduling": True,
    "preempt_in_order": True, "threshold_spares_lone_request": True, "free_uncached_first": True,
    "arrivals_between_steps": True, "fast_forward": False, "check_horizon": True,
    "pipeline_parallel_size": 2, "overrun_at_stop": True, "offloading_connector": True,
    "serve_behind_preempted": True, "names_accepted_drafts": True,
    "chunked_pipeline_parallelism": True,
}  # fmt: skip


def config(**engine):
    return resolve(make_spec({**SPEC, "engine": engine})).config


def test_every_limit_that_engine_and_specification_both_name_is_tested_here():
    shared = {field.name for field in fields(EngineConfig)} & set(EngineSpec.model_fields)
    assert shared == set(CHANGED)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_limit_has_the_engines_default_and_reaches_the_engine(name):
    default = {field.name: field.default for field in fields(EngineConfig)}[name]
    if default is not MISSING:
        assert getattr(config(), name) == default != CHANGED[name]
    # Without chunks a prompt must fit the budget; nobody overruns who does not plan ahead.
    needs = {
        "enable_chunked_prefill": {"max_model_len": 1000},
        "overrun_at_stop": {"async_scheduling": True},
    }
    also = needs.get(name, {})
    assert getattr(config(**also, **{name: CHANGED[name]}), name) == CHANGED[name]


def test_limits_that_follow_from_memory_and_switches_by_hand():
    plain = resolve(make_spec(SPEC))
    assert plain.config.num_blocks == plain.memory.num_blocks
    assert plain.config.max_model_len == 8192  # of the model; the cache holds more
    # Llama-3-8B: 32 layers, keys and values of 8 heads of 128 in 2 bytes, 16 tokens a block.
    assert plain.config.kv_block_bytes == 32 * 2 * 8 * 128 * 2 * 16
    assert plain.config.swap_space_blocks == 4 * 2**30 // plain.config.kv_block_bytes
    assert plain.config.cudagraph_capture_sizes == ()
    other = config(
        num_gpu_blocks_override=101, reserve_null_block=True, cuda_graph_padding=True,
        max_num_seqs=4, scheduling_overhead={"first_step_s": 0.25},
    )  # fmt: skip
    assert other.num_blocks == 100
    assert other.max_model_len == 1600
    assert other.cudagraph_capture_sizes == (1, 2, 4, 8)
    assert other.first_launch_ns == 250_000_000


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(SpecError, match="engine: max_model_len 5000 does not fit the KV cache"):
        config(num_gpu_blocks_override=100, max_model_len=5000)


def test_stated_overhead_wins_over_that_of_the_profile_and_none_is_zero():
    stated = make_spec({**SPEC, "engine": {"scheduling_overhead": {"base_s": 1e-4}}})
    assert resolve(stated).overhead == SchedulingOverhead(base_s=1e-4)
    assert resolve(make_spec(SPEC)).overhead == SchedulingOverhead()
    cpu = {
        **SPEC, "model": "schedlab-small", "hardware": "cpu",
        "cost_model": "profiles/cpu/schedlab-small/fp32-tp1", "engine": {"dtype": "fp32"},
    }  # fmt: skip
    measured = resolve(make_spec(cpu))
    assert measured.overhead == measured.cost_model.scheduling_overhead != SchedulingOverhead()
    cpu["engine"] = {"dtype": "fp32", "scheduling_overhead": {"base_s": 0.5}}
    assert resolve(make_spec(cpu)).overhead == SchedulingOverhead(base_s=0.5)


def test_cost_model_is_given_model_device_formats_and_limits():
    engine = {"tensor_parallel_size": 2, "dtype": "fp16", "kv_cache_dtype": "fp8"}
    point = resolve(make_spec({**SPEC, "hardware": "h100", "engine": engine}))
    where = point.deployment
    assert (where.model.name, where.gpu.name) == ("llama-3-8b", "h100-80gb")
    assert (where.tensor_parallel_size, where.dtype, where.kv_dtype) == (2, "fp16", "fp8")
    assert where.config is point.config
    assert point.cost_model.kv_dtype == "fp8"
    assert resolve(make_spec(SPEC)).deployment.kv_dtype == "bf16"


def test_run_looks_names_up_once(monkeypatch):
    calls, look_up = [], resolved.deployment
    spec = make_spec(SPEC)
    monkeypatch.setattr(resolved, "deployment", lambda s: calls.append(s) or look_up(s))
    run(spec)
    assert calls == [spec]


@pytest.mark.parametrize(
    ("model", "engine", "shared_by"),
    [
        ("qwen3-30b-a3b", {}, 2),
        ("qwen3-30b-a3b", {"data_parallel_lockstep": False}, 1),
        ("llama-3-8b", {}, 1),
    ],
)
def test_engines_in_lockstep_share_the_experts_of_a_mixture_in_memory_too(model, engine, shared_by):
    def resolved(**keys):
        keys = {"model": model, "hardware": "h100", "engine": keys}
        return resolve(make_spec({"workload": {"trace": "azure-conv", "num_requests": 1}} | keys))

    several, one = resolved(data_parallel_size=2, **engine), resolved()
    assert several.deployment.data_parallel_size == shared_by
    saved = one.memory.weight_bytes - several.memory.weight_bytes
    experts = several.deployment.model.routed_expert_bytes()
    assert saved == experts * (1 - 1 / shared_by)
    assert several.config.num_blocks == several.memory.num_blocks


def test_weights_in_int4_compute_in_bf16_and_leave_more_blocks():
    def resolved(**engine):
        workload = {"trace": "azure-conv", "num_requests": 1}
        return resolve(make_spec({"workload": workload, "engine": engine}))

    narrow, wide = resolved(weight_dtype="int4"), resolved()
    assert (narrow.deployment.dtype, narrow.deployment.stored_dtype) == ("bf16", "int4")
    assert narrow.config.num_blocks > wide.config.num_blocks
    assert narrow.deployment.kv_dtype == "bf16"
    with pytest.raises(SpecError, match="weight_dtype bf16 is wider than dtype int8"):
        resolved(weight_dtype="bf16", dtype="int8")
    with pytest.raises(SpecError, match=r"does not compute in int4; .*weight_dtype"):
        resolved(dtype="int4")


def test_weights_narrower_than_arithmetic_are_refused_by_the_real_backend():
    data = {"workload": {"trace": "azure-conv", "num_requests": 1}, "backend": "real"}
    spec = make_spec(data | {"model": "schedlab-tiny", "engine": {"weight_dtype": "int8"}})
    with pytest.raises(SpecError, match=r"engine\.weight_dtype: the real backend stores weights"):
        run(spec)


def test_expert_parallelism_of_a_dense_model_is_refused():
    data = {"workload": {"trace": "azure-conv", "num_requests": 1}}
    with pytest.raises(SpecError, match=r"enable_expert_parallel: llama-3-8b has no experts"):
        resolve(make_spec(data | {"engine": {"enable_expert_parallel": True}}))


def test_policy_that_sets_memory_aside_is_refused_beside_a_prefix_cache():
    spec = {**SPEC, "policy": "dynamic", "engine": {"enable_prefix_caching": True}}
    with pytest.raises(SpecError, match=r"policy dynamic .* engine.enable_prefix_caching=false"):
        resolve(make_spec(spec))
    spec["engine"] = {"enable_prefix_caching": False}
    assert not resolve(make_spec(spec)).config.enable_prefix_caching
