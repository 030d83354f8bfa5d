"""What can be asked for: keys with their limits, options, and what is made of what is asked."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import numpy as np
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schedlab.experiments.running import fleet
from schedlab.experiments.running.prediction import prediction_line
from schedlab.experiments.running.session_workload import with_think_times
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.specification.sessions import DurationsSpec
from schedlab.experiments.specification.sweep import points, slug
from schedlab.experiments.sweeps import dry_run
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import Shard, plan
from schedlab.experiments.sweeps.timing import TimeEstimate, duration
from schedlab.experiments.training import batches, quality
from schedlab.sim.errors import SchedlabError
from schedlab.sim.hardware.dtypes import dtype_name
from schedlab.sim.hardware.gpus import gpu, gpu_names
from schedlab.sim.hardware.models import model, model_names
from tests.golden.files import columns
from tests.golden.rounding import json_digest

_BASE: dict[str, Any] = {
    "name": "asked", "model": "llama-3-8b", "hardware": "h100",
    "workload": {"trace": "azure-conv", "num_requests": 6, "request_rate": 2.0},
}  # fmt: skip


# -- names ---------------------------------------------------------------------------------------


def names(kind: str) -> dict[str, Any]:
    """Ask for everything by its name, by what others call it, and by what it is nearly called."""
    of, table, written = {
        "models": (model, model_names(), "meta-llama/{}"),
        "gpus": (gpu, gpu_names(), "NVIDIA {}"),
        "formats": (dtype_name, ("fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"), "torch.{}"),
    }[kind]
    asked = [*table, *_CALLED[kind]]
    ways = ("{}", written, " {} ", "{}s", "{}-instruct", "{}-fp8", "{}-awq", "{}-distill-qwen-1b")
    return {
        name: json_digest(
            [_named(of, way.format(spelt)) for way in ways for spelt in (name, name.upper())]
        )
        for name in dict.fromkeys(asked)
    }


_CALLED: dict[str, tuple[str, ...]] = {
    "models": (
        "deepseek-v2", "deepseek-v3", "deepseek-r1", "kimi-k2", "gemma-2-9b", "gemma-3-4b",
        "gpt-oss-20b", "qwen3-next-80b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "llama",
    ),
    "gpus": ("a100", "h100", "a100-sxm4-80gb", "h100_nvl", "tesla t4", "rtx 4090", "mi300x"),
    "formats": ("float16", "half", "bfloat16", "float", "float8_e4m3fn", "fp8_e5m2", "auto", ""),
}  # fmt: skip


def _named(of: Callable[[str], Any], name: str) -> str:
    try:
        found = of(name)
    except SchedlabError as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, str) else found.name


# -- keys ------------------------------------------------------------------------------------------


def keys(_: str) -> dict[str, Any]:
    """Return every key with its default and limits, section by section."""
    found: dict[str, Any] = {}

    def walk(section: type[BaseModel]) -> None:
        if section.__name__ in found:
            return
        told = found[section.__name__] = {}
        for name, field in section.model_fields.items():
            default = (
                "" if field.is_required() else repr(field.get_default(call_default_factory=True))
            )
            told[name] = " ".join([default, *_limits(field.annotation, field.metadata)]).strip()
        for field in section.model_fields.values():
            for inside in _sections(field.annotation):
                walk(inside)

    walk(ExperimentSpec)
    return found


def _limits(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    """Yield the bounds of a key, wherever in its type they stand, and the words it may be."""
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _limits(None, one.metadata)
        for name in ("ge", "gt", "le", "lt", "min_length"):
            if (bound := getattr(one, name, None)) is not None:
                yield f"{name} {bound}"
    for one in get_args(annotation):
        if isinstance(one, str):
            yield one
        elif isinstance(one, FieldInfo) or not get_args(one):
            yield from _limits(None, [one])
        else:
            yield from _limits(one)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _sections(one)


# -- what is made of an experiment ----------------------------------------------------------------

_POOLS = {"pools": {"p": {"role": "prefill", "count": 2}, "d": {"role": "decode"}}}
_TINY = {"num_gpu_blocks_override": 200, "max_model_len": 2000}
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "profile": {"engine": {"profile": "vllm-0.32", "max_num_seqs": 16}},
    "profile of 0.33": {"engine": {"profile": "vllm-0.33", "async_scheduling": False}},
    "two devices": {"engine": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}},
    "formats": {"engine": {"dtype": "float16", "weight_dtype": "int4", "kv_cache_dtype": "fp8"}},
    "swap": {"engine": {"preemption_mode": "swap", "swap_space": 1.5, "block_size": 32}},
    "overhead": {"engine": {"scheduling_overhead": {"base_s": 0.001, "first_step_s": 0.5}}},
    "experts": {"model": "qwen3-30b-a3b", "engine": {"data_parallel_size": 2,
                                                     "enable_expert_parallel": True}},
    "pauses": {"policy": {"name": "srtf", "predictor": "oracle"}, "engine": _TINY},
    "offload": {"engine": {"enable_prefix_caching": True, "kv_offload": {"tiers": [
        {"name": "cpu", "gib": 2, "link": "pcie-5"},
        {"name": "ssd", "num_blocks": 9, "load_gb_per_s": 3, "store_gb_per_s": 2}]}}},
    "drafts": {"engine": {"speculation": {"method": "draft_model", "model": "llama-3.2-1b",
                                          "num_speculative_tokens": 4, "acceptance": 0.7}}},
    "layers": {"engine": {"speculation": {"method": "eagle", "num_layers": 2,
               "num_speculative_tokens": 3, "acceptance": {"rates": [0.9, 0.5], "spread": 0.1}}}},
    "front end": {"frontend": {"latency_s": 0.01, "request_s": 0.002, "servers": 2}},
    "pools": {"cluster": {**_POOLS, "link": {"name": "pcie-4", "latency_us": 30, "by_layer": True},
                          "local": {"max_prompt_tokens": 50}, "decode_router": "round_robin"}},
    "scaled": {"cluster": {"count": 2, "autoscaler": {"name": "hpa", "max": 5},
                           "migration": {"name": "llumnix", "every_ms": 50}}},
    "mixed": {"cluster": {"pools": {"a": {"count": 2, "hardware": "a100"}, "b": {
        "engine": {"max_model_len": 3000}, "policy": "sjf"}}, "router": {
            "name": "vllm", "staleness_ms": 20}}, "policy": {"name": "sjf", "predictor": "oracle"}},
}  # fmt: skip


def resolved(name: str) -> dict[str, Any]:
    """Resolve an experiment: limits, memory, device, prices and what stands around engines."""
    given = CHANGES[name]
    try:
        spec = make_spec({**_BASE, **given})
        kinds = fleet.resolve_fleet(spec)
    except SchedlabError as error:
        return {"refused": str(error)}
    one = kinds[0].point
    found: dict[str, Any] = {
        "config": {f.name: str(getattr(one.config, f.name)) for f in fields(one.config)
                   if getattr(one.config, f.name) != f.default},
        "memory": {key: str(value) for key, value in asdict(one.memory).items()},
        "overhead": str(one.overhead),
        "front end": str(one.frontend),
        "drafts": one.speculation and str(one.speculation.num_lookahead_tokens),
        "kinds": [[k.name, k.num_engines, k.role, k.point.config.max_model_len] for k in kinds],
        "spec": spec.to_data().get("cluster"),
    }  # fmt: skip
    if spec.cluster is not None:
        found["link"] = str(fleet.interconnect(spec.cluster, kinds))
        apart = fleet.disaggregation(spec, kinds)
        if apart is not None:
            found["roles"] = [apart.roles, apart.local_prompt_tokens, apart.local_queue_tokens]
        found["scaling"] = [
            [plan.pool, plan.every_ns, plan.least, plan.most]
            for plan in fleet.scaling(spec.cluster, kinds)
        ]
        moves = fleet.migration(spec.cluster, kinds)
        found["moves"] = None if moves is None else [
            value for value in vars(moves).values() if isinstance(value, int)
        ]  # fmt: skip
    return found


SWEPT: dict[str, dict[str, Any]] = {
    "sweep": {"sweep": {
        "policy": ["fcfs", {"name": "static", "max_batch_size": 2},
                   {"name": "static", "max_batch_size": 4}, {"name": "vtc", "label": "fair"}],
        "engine.max_num_seqs, workload.request_rate": [[4, 1.0], [8, 2.5]],
    }, "replications": 2, "seed": 5},
    "names": {"sweep": {"workload.prompt_tokens": [64, {"distribution": "uniform", "low": 1,
                                                        "high": 9}],
                        "slo.ttft_ms": [100, None], "engine.enable_prefix_caching": [True, False]}},
}  # fmt: skip


def expanded(name: str) -> dict[str, Any]:
    """Expand a sweep: order, labels, settings and seeds of its points."""
    found = points(make_spec({**_BASE, **SWEPT[name]}))
    return {
        "points": [[one.label, one.settings, one.replication, one.spec.seed, one.policy,
                    one.spec.engine.max_num_seqs, one.spec.workload.request_rate] for one in found],
        "folders": sorted({slug(one.label) for one in found}),
    }  # fmt: skip


_STAGES = {"pipeline_parallel_size": 2}
_FIGURE = {
    "name": "a", "metric": "mean_ttft_ms", "of": {"policy": "static"},
    "against": {"policy": "fcfs"}, "at": {"workload.request_rate": 2}, "compare": "ratio",
    "accept": [1, 3],
}  # fmt: skip
_LARGEST = {
    "name": "b", "of": {"policy": "static"}, "compare": "value", "accept": [1, 3],
    "capacity": {"over": "workload.request_rate", "at_most": {"p99_ttft_ms": 100}},
}  # fmt: skip


def _claimed(*figures: dict[str, Any], **more: Any) -> dict[str, Any]:
    claim: dict[str, Any] = {"system": "S", "statement": "x", "source": "s", "scaled_down": "y"}
    claim["figures"] = list(figures)
    policies = ["fcfs", {"name": "static", "max_batch_size": 2}]
    sweep = {"policy": policies, "workload.request_rate": [1, 2]}
    return {"replications": 2, "claim": claim, "sweep": sweep, **more}


_TOGETHER: tuple[dict[str, Any], ...] = (
    {"engine": _STAGES, "cluster": {"count": 2}},
    {"cluster": {"pools": {"a": {"engine": _STAGES}}}},
    {"engine": _STAGES, "cluster": {"pools": {"a": {"engine": {"pipeline_parallel_size": 1}}}}},
    {"cluster": {"pools": {"a": {"engine": {"data_parallel_size": 2}}}}},
    {"engine": {**_STAGES, "data_parallel_size": 2}},
    {"engine": {**_STAGES, "speculation": {"method": "ngram", "num_speculative_tokens": 2,
                                           "acceptance": 0.5}}},
    {"engine": {**_STAGES, "kv_offload": {"tiers": [{"name": "cpu", "gib": 1,
                                                     "link": "pcie-4"}]}}},
    *({"engine": {**_STAGES, switch: True}}
      for switch in ("async_scheduling", "check_horizon")),
    {"engine": {"pipeline_parallel_size": 33}}, {"engine": {"pipeline_parallel_size": 32}},
    {"engine": _STAGES, "backend": "real", "hardware": "cpu"},
    _claimed(_FIGURE, replications=1), _claimed(_FIGURE, _LARGEST), _claimed(_FIGURE, _FIGURE),
    _claimed({**_FIGURE, "metric": "mean_ttft"}), _claimed({**_FIGURE, "at": {}}),
    _claimed({**_FIGURE, "of": {"policy": "sjf"}}), _claimed({**_FIGURE, "accept": [3, 1]}),
    _claimed({**_FIGURE, "at": {"workload.request_rate": 3}}),
    _claimed({**_FIGURE, "at": {"workload.rate": 2}}), _claimed({**_FIGURE, "against": None}),
    _claimed({**_LARGEST, "at": {"workload.request_rate": 2}}),
    _claimed({**_LARGEST, "capacity": {"over": "seed", "at_most": {"p99_ttft_ms": 9}}}),
    _claimed({**_LARGEST, "capacity": {"over": "policy", "at_most": {"p99_ttft_ms": 9}}}),
    _claimed(_LARGEST, sweep={"policy": ["static"], "workload.request_rate": [2, 2]}),
    _claimed(_LARGEST, sweep={"policy": ["static", {"name": "static", "max_batch_size": 2}],
                              "workload.request_rate": [1, 2]}),
    {"engine": {"kv_offload": {"tiers": [{"name": "cpu", "gib": 1, "link": "pcie-4",
                                          "shared": True}]}}},
    {"frontend": {"latency_s": 0.1}, "workload": {"trace": "azure-conv", "num_requests": 5,
                                                  "arrivals": "closed_loop", "max_concurrency": 2}},
    {"frontend": {"file": "nowhere.json"}}, {"cost_model": "profiles/nowhere"},
    {"cost_model": {"name": "roofline", "nothing": 1}}, {"cost_model": {"name": "fitted"}},
    {"cluster": {"count": 2, "router": "llm"}}, {"cluster": {"count": 2, "router": {
        "name": "predicted_length"}}},
    {"cluster": {"count": 2, "migration": {"name": "llumnix", "nothing": 1}}},
    {"cluster": {"count": 2, "migration": {"name": "lumnix"}}},
    {"cluster": {"count": 2, "autoscaler": {"name": "hpa", "max": 4, "nothing": 1}}},
    {"workload": {"trace": "azure-conv"}}, {"workload": {"trace": "azure-con", "num_requests": 2}},
    {"workload": {"trace": "azure-conv", "num_requests": 2, "format": "azur"}},
    {"workload": {"trace": "azure-conv", "num_requests": 2, "arrivals": {"process": "poison"}}},
    {"workload": {"trace": "azure-conv", "num_requests": 2, "arrivals": {
        "process": "poisson", "rate": 2, "nothing": 1}}},
    {"workload": {"trace": "azure-conv", "num_requests": 2, "arrivals": {
        "process": "gamma", "rate": 2, "burstiness": 0}}},
    *({"workload": {"session_rate": 1.0, "sessions": {
        "count": 2, "turns": 2, "new_tokens": 3, "output_tokens": 4, "think_s": 1,
        "tools": {"t": {"share": share, "seconds": 1, "tokens": 2}},
        "fan_out": {"share": 0.25, "width": 2, "tokens": 3}}}} for share in (0.75, 0.8)),
)  # fmt: skip
REFUSED: tuple[tuple[str, Any], ...] = (
    ("engine.max_num_batched_tokens", 100), ("engine.watermark", 1), ("engine.watermark", 0.999),
    ("engine.gpu_memory_utilization", 0), ("engine.gpu_memory_utilization", 1),
    ("engine.data_parallel_size", 1024), ("engine.data_parallel_size", 1025),
    ("engine.block_size", 0), ("engine.long_prefill_token_threshold", 0),
    ("engine.long_prefill_token_threshold", -1), ("engine.max_model_len", 8193),
    ("engine.trial_requests", -1), ("engine.swap_space", -1), ("replications", 0), ("seed", -1),
    ("workload.num_requests", 0), ("workload.num_requests", 2.5), ("workload.request_rate", 0),
    ("workload.burstiness", 0), ("workload.slice", [3, 3]), ("workload.slice", [2, 3]),
    ("workload.rate_scale", 2), ("workload.think_s", 3),
    ("workload.session_rate", 2), ("workload.resample", True),
    ("workload.arrivals", "closed_loop"), ("workload.too_long", "drop"),
    ("workload.prompt_tokens", {"distribution": "uniform", "low": 5, "high": 4}),
    ("workload.prompt_tokens", {"distribution": "uniform", "low": 5, "high": 5}),
    ("workload.classes", {"a b": {}}), ("workload.classes", {"a": {"request_rate": 1}}),
    ("workload.classes", {"a": {"share": 0}}), ("workload.classes", {"a": {"priority": 10**9}}),
    ("slo.ttft_ms", 0), ("slo.ttft_ms", 0.001), ("policy", "fcsf"), ("policy", "sjf"),
    ("policy.max_batch_size", 3), ("model", "llama-3"), ("hardware", "h1000"),
    ("cluster.count", 0), ("cluster.count", 1024), ("cluster.count", 1025),
    ("cluster", {"count": 2, "autoscaler": {"name": "hpa", "min": 3, "max": 2}}),
    ("cluster", {"count": 2, "autoscaler": {"name": "hpa", "min": 3, "max": 3}}),
    ("cluster", {"count": 2, "autoscaler": {"name": "schedule", "max": 4,
                                            "times": [[0, 2], [9, 4]]}}),
    ("cluster", {"count": 2, "autoscaler": {"name": "schedule", "max": 4,
                                            "times": [[0, 2], [9, 5]]}}),
    ("cluster", {"count": 2, "pools": {"a": {}}}), ("cluster", {"pools": {"a b": {}}}),
    ("cluster", {"pools": {"a": {"role": "prefill"}}}),
    ("cluster", {"count": 2, "router": {"name": "round_robin", "staleness_ms": -1}}),
    ("cluster", {"count": 2, "decode_router": {"name": "vllm", "staleness_ms": 1}}),
    ("cluster", {"count": 2, "link": {"latency_us": 3}}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 64, "acceptance": 1}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 65, "acceptance": 1}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 2}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 2, "acceptance": 1.1}),
    ("engine.speculation", {"method": "eagle", "num_speculative_tokens": 2, "acceptance": 0.5,
                            "request_s": 1}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5,
                            "prompt_lookup_min": 4, "prompt_lookup_max": 4}),
    ("engine.speculation", {"method": "ngram", "num_speculative_tokens": 2, "acceptance": 0.5,
                            "prompt_lookup_min": 5}),
    ("measure", {"warm_up_s": 1, "warm_up_requests": 1}), ("measure", {"warm_up_requests": 0}),
    ("find", "max workload.request_rate subject to p99_ttft_ms <= 5"),
    ("find", "max workload.request_rate between 5 and 5 subject to p99_ttft_ms <= 5"),
    ("find", "max workload.request_rate between 1 and 9 subject to a <= 5 and completed >= 1"),
    ("find", "max workload.request_rate subject to p99_ttft_ms < 5"),
    ("find", {"maximize": "workload.request_rate"}),
    ("tune", {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [8, 8]}}),
    ("tune", {"maximize": "output_throughput", "over": {"engine.max_num_seqs": [7, 8]}}),
    ("tune", {"maximize": "workload.request_rate", "over": {"engine.max_num_seqs": [7, 8]}}),
    ("tune", {"maximize": "output_throughput", "levels": 1, "over": {"a": [7, 8]}}),
    ("frontend", {"latency_s": -1}), ("frontend", {"servers": 0}),
    ("policy", {"name": "sjf", "predictor": {"name": "noisy", "sigma": -1}}),
    *(("", together) for together in _TOGETHER),
)  # fmt: skip


def refused(_: str) -> dict[str, Any]:
    """Ask for what is at, and just beyond, what may be asked for."""
    found = {}
    for key, value in REFUSED:
        data = json.loads(json.dumps(_BASE))
        *path, last = key.split(".")
        place = data
        for part in path:
            place = place.setdefault(part, {} if part != "policy" else {"name": "fcfs"})
        place |= {last: value} if last else value
        try:
            make_spec(data)
            said = "allowed"
        except SchedlabError as error:
            said = str(error).replace(str(Path.cwd()), "HERE")
        found[f"{key}: {json.dumps(value)}"] = said
    return found


WORKLOADS: dict[str, dict[str, Any]] = {
    "closed loop": {"arrivals": "closed_loop", "max_concurrency": 3},
    "at once": {"request_rate": "inf"},
    "bursty": {"request_rate": 2.0, "burstiness": 0.5},
    "clipped": {"request_rate": 2.0, "too_long": "clip_prompt", "max_total_tokens": 500},
}


def requests(_: str) -> dict[str, Any]:
    """Load workloads, and think anew between turns."""
    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        given = {"trace": "azure-conv", "num_requests": 6, **workload}
        found[name] = columns(load_workload(make_spec({**_BASE, "workload": given}), 4096))
    sessions = {
        "count": 4, "turns": 3, "new_tokens": 10, "output_tokens": 5, "think_s": 2,
        "tools": {"t": {"share": 0.3, "seconds": 0.5, "tokens": 3}},
        "fan_out": {"share": 0.3, "width": 2, "tokens": 4},
    }  # fmt: skip
    spec = make_spec({**_BASE, "workload": {"sessions": sessions, "session_rate": 1.0}})
    trace = load_workload(spec, 4096)
    found["sessions"] = columns(trace)
    think = DurationsSpec(distribution="exponential", mean_s=2.0)
    found["thinking"] = columns(with_think_times(trace, think, 3))["turns"]
    found["predictor"] = [
        prediction_line([{"predictor": "x", "kendall_tau": tau, **more} for tau in taus])
        for taus in ((0.5, 0.7), (None, 0.25), (float("nan"),))
        for more in ({}, {"latency_s": 0.0125, "one_at_a_time": True, "kind": "k"})
    ]
    return found


def times(_: str) -> dict[str, Any]:
    """Estimate the time left of points that take different times; write times down."""
    now_s = [0.0]
    timing = TimeEstimate("aaabbcd", 2, lambda: now_s[0])
    told = [timing.remaining_s()]
    for label, seconds, at_s in (("a", 4.0, 4.0), ("d", 100.0, 5.0), ("b", None, 6.0),
                                 ("a", 6.0, 9.0), ("c", 10.0, 20.0), ("a", 5.0, 21.0)):  # fmt: skip
        now_s[0] = at_s
        timing.finish(label, seconds)
        now_s[0] = at_s + 0.5
        told += [timing.remaining_s(), timing.text()]
    timing.finish("b", 1.0)
    edges = (0.2, 1.4, 59.4, 59.6, 60, 64, 66, 599, 3595, 3599, 3600, 3629, 3631, 90_000)
    return {
        "left": told,
        "end": timing.remaining_s(),
        "durations": [duration(seconds) for seconds in edges],
    }


def planned(_: str) -> dict[str, Any]:
    """Share points among shards; time some of their requests before they run."""
    spec = make_spec({**_BASE, **SWEPT["sweep"]})
    with TemporaryDirectory() as folder:
        store = Store(Path(folder), dry=True)
        whole = plan(spec, store)
        shards = [[job.label + f" {job.spec.seed}" for job in plan(spec, store, shard).wanted]
                  for shard in (None, Shard(1, 3), Shard(3, 3))]  # fmt: skip
        timed = []
        for num_requests in (10, 100, 1000):
            workload = spec.workload.model_copy(update={"num_requests": num_requests})
            job = whole.jobs[0]
            job = replace(job, spec=job.spec.model_copy(update={"workload": workload}))
            with mock.patch.object(dry_run, "_seconds", lambda _, n, __: 2.0 + 0.01 * n):
                timed.append(list(dry_run.time_point(job)))
        seconds = mock.patch.object(dry_run, "_seconds", lambda _, n, __: 2.0 + 0.5 * n)
        with seconds:
            lines = dry_run.describe_plan(whole, store, 2)
    return {"shards": shards, "timed": timed, "lines": lines}


def learned(_: str) -> dict[str, Any]:
    """Judge predictions; tell sealed batches apart; split prompts."""
    rng = np.random.default_rng(4)
    true = rng.integers(1, 40, 30).astype(float)
    predicted = np.round(true * rng.uniform(0.5, 1.5, 30))
    names = np.array(["a", "b", "a"] * 10)
    means = quality.application_means(true[:20], names[:20], np.array(["a", "b", "c"]))
    judged = quality.quality(predicted, true, names, np.where(names == "a", *means[:2]), 3)
    n = 30
    ends = np.tile([700, 1000], n) - np.arange(2 * n) // 2 % 3 * 40
    starts = np.repeat(np.arange(n) * 1000, 2) * 10**6
    columns = {
        "first_scheduled_ns": starts,
        "last_token_ns": starts + 10**6 * ends,
        "prompt_tokens": np.arange(2 * n) % 7 + 1, "predicted_tokens": np.arange(2 * n) % 5 + 2.0,
        "num_preemptions": (np.arange(2 * n) == 11).astype(int),
        "status": np.where(np.arange(2 * n) == 50, 1, 0),
    }  # fmt: skip
    result = SimpleNamespace(policy="static", requests=columns)
    with mock.patch("schedlab.sim.result.RunResult.load", return_value=result):
        sealed = batches.read_batches(Path("x"))
    return {
        "quality": judged,
        "means": means.tolist(),
        "sealed": [sealed.shape.tolist(), sealed.serving_time_s.tolist(), sealed.num_left_out],
        "split": [part.tolist() for part in batches.split(11, 0.2, 3)],
        "estimates": batches.estimates(
            batches.train_serving_time(sealed, np.arange(0, 20)), sealed.shape[20:24]
        ).tolist(),
    }


CASES = {
    "planned": (planned, ""),
    "learned": (learned, ""),
    "keys": (keys, ""),
    **{f"resolved {name}": (resolved, name) for name in CHANGES},
    **{f"expanded {name}": (expanded, name) for name in SWEPT},
    "refused": (refused, ""),
    **{f"names of {kind}": (names, kind) for kind in _CALLED},
    "requests": (requests, ""),
    "times": (times, ""),
}
