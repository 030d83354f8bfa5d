"""What must not move unnoticed: drawn workloads, every metric of a run, every default."""

import dataclasses
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.running.run import run
from schedlab.experiments.running.workload import load_workload
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies import registry
from schedlab.policies.predictors import registry as predictors
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost import registry as cost_models
from schedlab.sim.metrics.registry import (
    every_fleet,
    every_run,
    every_session,
    every_tier,
    metric_named,
)
from schedlab.traces.presets import PRESETS
from schedlab.traces.statistics import describe
from tests.golden import (
    asked,
    backend,
    benched,
    called,
    combined,
    commanded,
    damaged,
    defaults_of_code,
    drawn,
    figures,
    files,
    fleets,
    lawful,
    measured_by_stand_ins,
    numbers,
    parts,
    prices,
    said,
    thresholds,
    told,
    told_of_fleets,
    whole,
    wild,
)
from tests.golden.fleets import SlowSteps
from tests.golden.rounding import rounded
from tests.unit.test_search import searched, tuned

KEPT = Path(__file__).with_name("pinned.json")
SLOW = f"{SlowSteps.__module__}:SlowSteps"

# -- workloads: a digest of what is drawn, and its statistics to nine digits --------------------

_FEW = {"trace": "azure-conv", "num_requests": 60}
_CLASSES = {
    "paying": {"share": 1, "slo": {"ttft_ms": 500, "tpot_ms": 50}, "priority": 1},
    "free": {"share": 2, "trace": "azure-code", "shared_prefix": {"tokens": 300, "groups": 3}},
}
_FLOOD = {
    "steady": {"request_rate": 2.0},
    "floods": {"arrivals": {"process": "on_off", "rate": 4.0, "mean_on_s": 5, "mean_off_s": 9}},
}
WORKLOADS: dict[str, dict[str, Any]] = {
    **{name: {"trace": name, "num_requests": 60} for name in PRESETS},
    "poisson": {**_FEW, "request_rate": 3.0},
    "gamma": {**_FEW, "arrivals": {"process": "gamma", "rate": 3.0, "burstiness": 0.3}},
    "ramp": {
        **_FEW,
        "arrivals": {"process": "linear_ramp", "start_rate": 1, "end_rate": 9, "num_requests": 60},
    },
    "on_off": {
        **_FEW,
        "arrivals": {"process": "on_off", "rate": 9.0, "mean_on_s": 2.0, "mean_off_s": 4.0},
    },
    "varying": {**_FEW, "arrivals": {"process": "varying", "rate": 3.0}},
    "constant": {**_FEW, "arrivals": {"process": "constant", "rate": 3.0}},
    "faster": {**_FEW, "rate_scale": 2.0},
    "fixed lengths": {**_FEW, "prompt_tokens": 100, "output_tokens": 7},
    "uniform lengths": {
        **_FEW,
        "prompt_tokens": {"distribution": "uniform", "low": 10, "high": 20},
        "output_tokens": {"distribution": "exponential", "mean": 50.0, "cap": 120},
    },
    "lognormal lengths": {
        **_FEW,
        "prompt_tokens": {"distribution": "lognormal", "mu": 5.0, "sigma": 1.0, "cap": 900},
        "output_tokens": {"distribution": "gamma", "shape": 2.0, "scale": 30.0},
    },
    "classes": {**_FEW, "request_rate": 5.0, "classes": _CLASSES},
    "flood": {**_FEW, "classes": _FLOOD},
    "dropped": {**_FEW, "max_total_tokens": 900, "too_long": "drop"},
    "clipped": {**_FEW, "max_total_tokens": 900, "too_long": "clip_prompt"},
}


def workload(name: str) -> dict[str, Any]:
    """Draw one workload."""
    trace = load_workload(make_spec({"name": "pinned", "workload": WORKLOADS[name]}), 4096)
    digest = hashlib.sha256()
    columns = {f.name: getattr(trace, f.name) for f in dataclasses.fields(trace)}
    if trace.prefix is not None:
        columns |= {f.name: getattr(trace.prefix, f.name) for f in dataclasses.fields(trace.prefix)}
    for column in columns.values():
        if isinstance(column, np.ndarray) and column.dtype != object:
            digest.update(column.tobytes())
    return {"columns": digest.hexdigest()[:16], **rounded(describe(trace))}


# -- metrics: all of them, of runs with preemption, tenants, targets, prefixes, several engines --

_CROWD = {
    "trace": "azure-conv",
    "num_requests": 60,
    "request_rate": 9.0,
    "classes": {
        "paying": {"share": 1, "slo": {"ttft_ms": 900, "tpot_ms": 60}, "prompt_tokens": 600},
        "free": {
            "share": 2,
            "slo": {"ttft_ms": 3000, "e2el_ms": 9000},
            "priority": 1,
            "shared_prefix": {"tokens": 256, "groups": 2},
        },
    },
}
_SHORT = {"num_gpu_blocks_override": 300, "max_model_len": 4000, "max_num_seqs": 12}
RUNS: dict[str, dict[str, Any]] = {
    "crowd": {"policy": "vtc", "workload": _CROWD, "engine": _SHORT},
    "cached": {
        "policy": "priority",
        "workload": _CROWD,
        "engine": {**_SHORT, "enable_prefix_caching": True},
        "measure": {"warm_up_requests": 5, "cool_down_s": 2.0},
    },
    "swap": {
        "policy": {"name": "srtf", "predictor": {"name": "noisy", "sigma": 0.5}},
        "workload": _CROWD,
        "engine": {**_SHORT, "preemption_mode": "swap", "swap_space": 1},
    },
    "drafts": {
        "policy": "sarathi",
        "workload": _CROWD,
        "engine": {
            **_SHORT,
            "enable_prefix_caching": True,
            "speculation": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "acceptance": {"rate": 0.6, "spread": 0.2},
                "draft_length": "goodput",
            },
        },
    },
    "pipeline": {
        "policy": "sarathi",
        "workload": _CROWD,
        "engine": {**_SHORT, "max_num_resident": 20, "pipeline_parallel_size": 2},
        "measure": {"warm_up_requests": 5},
    },
    "engines": {
        "policy": {"name": "static", "max_batch_size": 6},
        "workload": _CROWD,
        "engine": {"data_parallel_size": 3, "data_parallel_lockstep": False},
    },
    "tiers": {
        "policy": {"name": "srtf", "predictor": "oracle"},
        "workload": {
            "session_rate": 3.0,
            "sessions": {
                "count": 15,
                "turns": 3,
                "new_tokens": {"distribution": "lognormal", "mu": 5.5, "sigma": 0.8},
                "output_tokens": {"distribution": "lognormal", "mu": 4.0, "sigma": 0.8},
                "think_s": {"distribution": "exponential", "mean_s": 2},
            },
        },
        "engine": {
            **_SHORT,
            "enable_prefix_caching": True,
            "preemption_mode": "swap",
            "kv_offload": {
                "load": "always",
                "tiers": [
                    {"name": "cpu", "num_blocks": 150, "link": "pcie-4", "write": "back"},
                    {"name": "disk", "gib": 10, "link": "nvme-4", "write": "back"},
                ],
            },
        },
    },
    "fleet": {
        "policy": {"name": "sjf", "predictor": {"name": "noisy", "sigma": 0.5}},
        "workload": _CROWD,
        "engine": _SHORT,
        "cluster": {
            "router": {"name": "vllm", "staleness_ms": 100},
            "pools": {"old": {"count": 2}, "new": {"hardware": "h100", "policy": "fcfs"}},
        },
    },
    "lockstep": {
        "policy": "fcfs",
        "workload": {
            **{key: value for key, value in _CROWD.items() if key != "request_rate"},
            "arrivals": "closed_loop",
            "max_concurrency": 10,
        },
        "engine": {"data_parallel_size": 2, "data_parallel_lockstep": True},
    },
    "sessions": {
        "policy": {"name": "plas", "first_quantum_s": 0.2, "starvation": 2.0},
        "workload": {
            "session_rate": 1.0,
            "sessions": {
                "count": 12,
                "turns": {"distribution": "uniform", "low": 1, "high": 4},
                "new_tokens": 60,
                "output_tokens": {"distribution": "exponential", "mean": 40},
                "think_s": {"distribution": "exponential", "mean_s": 2},
                "tools": {"search": {"share": 0.4, "seconds": 0.5, "tokens": 90}},
                "fan_out": {"share": 0.2, "width": 3, "tokens": 20},
                "shared_prefix": {"tokens": 128, "groups": 2},
            },
        },
        "engine": {**_SHORT, "num_gpu_blocks_override": 260, "enable_prefix_caching": True},
    },
}
LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time", "normalized_latency")
METRICS = (
    "stall_free_goodput(ttft_ms=900, stall_ms=100)", "mean_max_waiting", "deadline_misses",
    "most_in_flight", "most_output_tokens_per_s",
    "preempted_share", "preemption_loss_at_tail", "kv_waste", "slot_utilization(slots=8)",
    "queue_growth", "of_class(metric=mean_ttft_ms, column=tenant, value=paying)",
    "of_class(metric=output_throughput, column=prompt_tokens, low=100, high=700)",
    "finished_within(seconds=6)", "tokens_within(seconds=6)", "time_to_finish(num_requests=30)",
    "mean_tokens_per_step", "mean_acceptance_length", "draft_acceptance_share",
    "wasted_draft_tokens",
    "jain_fairness", "jain_fairness(column=tenant)", "longest_wait", "service_gap",
    "service_gap(input_weight=0.5, output_weight=3)",
    *(f"{name}(latency={one})" for name in ("largest", "tail_ratio", "worst_ratio")
      for one in LATENCIES),
    *(f"explained_by_lengths(latency={one})" for one in ("ttft", "e2el")),
)  # fmt: skip
PIPELINE_METRICS = (
    "pipeline_bubble_share", "mean_stage_utilization", "stage_utilization(stage=0)",
)  # fmt: skip


def metrics(name: str) -> dict[str, Any]:
    """Run one case; every metric, to nine digits."""
    result = run(make_spec({"name": "pinned", "cost_model": SLOW, **RUNS[name]}))
    chosen = every_run()
    if result.tiers:
        names = [facts.name for facts in result.tiers]
        return rounded({one.name: result.metric(one.name) for one in [*chosen, *every_tier(names)]})
    if name == "sessions":
        return rounded({one.name: result.metric(one.name) for one in [*chosen, *every_session()]})
    chosen += map(metric_named, METRICS)
    if name == "pipeline":
        chosen += map(metric_named, PIPELINE_METRICS)
    if result.engines:
        chosen += [*every_fleet(), metric_named("engine_busy_share(engine=1)")]
    return rounded({metric.name: result.metric(metric.name) for metric in chosen})


# -- searches: every value that is tried, and what is said ----------------------------------------

BRACKETS: dict[str, dict[str, Any]] = {
    "open": {"truth": 37.3},
    "open below": {"truth": 0.013, "start": 4.0},
    "range": {"truth": 7.7, "between": (1.0, 40.0), "tolerance": 0.1},
    "integers": {"truth": 23.5, "between": (1.0, 300.0), "whole": True},
    "beyond": {"truth": 1e9, "between": (2.0, 50.0)},
    "never": {"truth": -1.0, "between": (2.0, 50.0)},
}


def bracket(name: str) -> dict[str, Any]:
    """Search where a line crosses zero."""
    keys = dict(BRACKETS[name])
    truth = keys.pop("truth")
    return {"found": rounded(tuple(searched(lambda value: value - truth, **keys))[:4])}


TUNINGS: dict[str, dict[str, Any]] = {
    "bar": {},
    "no bar": {"at_most": {"p99_itl_ms": 1e9}},
    "none holds": {"at_most": {"p99_itl_ms": 1}},
    "short": {"max_settings": 17},
}


def tuning(name: str) -> dict[str, Any]:
    """Tune two limits over a known surface."""
    found = tuned(**TUNINGS[name])
    tried = [[*trial.values.values(), trial.goal.mean, trial.excess] for trial in found.trials]
    digest = hashlib.sha256(json.dumps(rounded(tried)).encode()).hexdigest()[:16]
    said = [found.best.values, found.given.values, found.verdict, *found.remarks]
    return {"tried": digest, "num_invalid": found.num_invalid, "said": rounded(said)}


# -- defaults --------------------------------------------------------------------------------


def defaults(kind: str) -> dict[str, Any]:
    """Return what is taken where nothing is said, and what a class says of itself."""
    if kind == "policies":
        facts = ("needs_prediction", "starves", "pauses")
        return {
            name: {
                **_knobs(registry.policy_class(name).knobs()),
                **{fact: getattr(registry.policy_class(name), fact) for fact in facts},
            }
            for name in registry.names()
        }
    if kind == "predictors":
        return {n: _knobs(predictors.predictor_class(n).knobs()) for n in predictors.names()}
    if kind == "cost models":
        return {name: _knobs(cost_models.knobs(name)) for name in cost_models.names()}
    return _knobs(inspect.signature(EngineConfig).parameters)


DEFAULTS = ("policies", "predictors", "cost models", "engine")


def _knobs(parameters: Any) -> dict[str, str]:
    return {
        name: repr(parameter.default)
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }


# -- all of it -------------------------------------------------------------------------------

PINNED = {
    **{f"workload {name}": (workload, name) for name in WORKLOADS},
    **{f"metrics {name}": (metrics, name) for name in RUNS},
    **{f"bracket {name}": (bracket, name) for name in BRACKETS},
    **{f"tuning {name}": (tuning, name) for name in TUNINGS},
    **{f"defaults {name}": (defaults, name) for name in DEFAULTS},
    **wild.CASES,
    **told.CASES,
    **told_of_fleets.CASES,
    **thresholds.CASES,
    **combined.CASES,
    **whole.CASES,
    **called.CASES,
    **parts.CASES,
    **numbers.CASES,
    **prices.CASES,
    **fleets.CASES,
    **figures.CASES,
    **files.CASES,
    **damaged.CASES,
    **drawn.CASES,
    **said.CASES,
    **asked.CASES,
    **backend.CASES,
    **measured_by_stand_ins.CASES,
    **lawful.CASES,
    **benched.CASES,
    **commanded.CASES,
    **defaults_of_code.CASES,
}
# What not every machine can compute.
NEED_MORE = {**backend.NEED_TORCH, **measured_by_stand_ins.NEED_TRITON}


def pinned(name: str) -> dict[str, Any]:
    """Compute one of `PINNED`, as JSON gives it back."""
    of, case = PINNED[name]
    return json.loads(json.dumps(rounded(of(case))))


def how_to_look(name: str) -> str:
    """Return what a failing test says beside the lines that moved."""
    if name in whole.CASES:
        return "python -m tests.golden.whole NUMBER prints an experiment and all that came of it"
    if name in called.CASES:
        of = name.removeprefix("answers of ")
        return f"python -m tests.golden.called {of}.NAME prints every question and its answer"
    if name in damaged.CASES:
        return (
            f"python -m tests.golden.damaged {name.removeprefix('damaged ')!r} prints every change"
        )
    return ""


def kept() -> dict[str, dict[str, Any]]:
    """Read what is kept."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def write() -> None:
    """Write it anew; what this machine cannot compute, for want of a library, stays as it is."""
    found = {name: pinned(name) for name in PINNED}
    there = NEED_MORE.keys() - found.keys()
    found |= {name: table for name, table in kept().items() if name in there}
    tables = [f"{json.dumps(name)}: {{\n  {_lines(table)}\n }}" for name, table in found.items()]
    KEPT.write_text("{\n " + ",\n ".join(tables) + "\n}\n", encoding="utf-8")


def _lines(table: dict[str, Any]) -> str:
    """Write a line a value, so that a difference in version control names what moved."""
    rows = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in table.items())
    return ",\n  ".join(rows)
