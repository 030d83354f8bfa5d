"""Whole experiments drawn over all that a specification may ask for, and all that a result tells.

`combined` draws engines and fleets by their classes. Here the draw is what a user writes: so
readers, pools, predictors, windows, front ends, metrics, provenance and files lie on the way, too.

``python -m tests.golden.whole 17`` prints experiment 17 as JSON, which ``schedlab run`` takes, and
all that its digests are of: two checkouts are compared by a diff.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.policies.static import Static
from schedlab.sim.errors import SchedlabError
from schedlab.sim.metrics import concurrency
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import Metric, metric_named
from schedlab.sim.record import columns, log, saved_log, steps, stored_token_times
from schedlab.sim.result import RunResult
from tests.golden import combined
from tests.golden.every_field import Measured
from tests.golden.fleets import ROUTERS
from tests.golden.rounding import rounded
from tests.policy_cases import CASES as POLICIES
from tests.policy_cases import PARAMS, make

Spec = dict[str, Any]
Draw = Callable[..., Any]

EXPERIMENTS = 280
_AT_ONCE = 20
_LONGER = 1e4
"""A step of these experiments beside the microsecond that `PARAMS` are written for."""

KINDS = (
    "engine", "engine", "tiers", "drafts", "pipeline", "lockstep", "kinds", "handover",
    "scaling", "failing", "moving", "handover, failing", "scaling, failing", "handover, scaling",
    "moving, scaling", "kinds, failing", "tiers, failing", "drafts, kinds", "handover, moving",
    "tiers, scaling",
)  # fmt: skip
"""What experiments are about, one after the other."""
METRICS = (
    "stall_free_goodput(ttft_ms=300, stall_ms=60)", "deadline_misses", "preempted_share",
    "kv_waste", "slot_utilization(slots=4)", "mean_max_waiting", "longest_wait",
    "finished_within(seconds=1)", "tokens_within(seconds=1)", "time_to_finish(num_requests=9)",
    "mean_tokens_per_step", "mean_acceptance_length", "draft_acceptance_share",
    "wasted_draft_tokens", "preemption_loss_at_tail", "queue_growth",
    "largest(latency=queue_time)", "tail_ratio(latency=itl)", "worst_ratio(latency=tpot)",
)  # fmt: skip
METRICS_OF_TENANTS = ("service_gap", "jain_fairness(column=tenant)")
_EVERY_FIELD = f"{Measured.__module__}:Measured"
_NOT_OF_THE_RUN = ("spec", "spec_hash", "versions", "core", "git_commit")
"""What provenance says of machine and version, or repeats of the specification."""


# -- what is drawn -----------------------------------------------------------------------------


def drawn(number: int) -> Spec:
    """Draw an experiment; some ask for what is refused, and the refusal is what comes of them."""
    draw, kind = combined._Draw(f"whole {number}"), KINDS[number % len(KINDS)]
    case = draw(*_able(kind))
    spec: Spec = {
        "name": f"whole {number}",
        "seed": draw(0, 1, 2**40),
        "policy": _policy(draw, case),
        "engine": _engine(draw, kind, isinstance(make(case), Static)),
        "workload": _workload(draw, kind),
        "cost_model": draw(
            "roofline", "roofline", *[{"name": _EVERY_FIELD, "spread": draw(False, True)}] * 2
        ),
    }
    length, load = spec["engine"]["max_model_len"], spec["workload"]
    if "trace" in load:
        load |= {
            "max_total_tokens": length + draw(0, 0, 60),
            "too_long": draw("clip_prompt", "clip_prompt", "clip_prompt", "drop"),
        }
    if cluster := _cluster(draw, kind):
        spec["cluster"] = cluster
    if draw(0, 0, 1) or "slo" in json.dumps(spec):
        spec["slo"] = _slo(draw) | {"tpot_ms": 14}
    comes_late = load.get("arrivals") not in ("all_at_once", "closed_loop")
    if draw(0, 0, 1) and comes_late:
        spec["measure"] = draw(
            {"warm_up_s": 0.05}, {"cool_down_s": 0.05}, {"warm_up_requests": 4},
            {"warm_up_s": 0.04, "cool_down_s": 0.02}, {"warm_up_requests": 2, "cool_down_s": 0.03},
        )  # fmt: skip
    if draw(0, 0, 0, 1) and not {"sessions", "max_concurrency"} & load.keys():
        spec["frontend"] = {
            "latency_s": draw(0.0, 0.002), "request_s": draw(0.0, 0.004, 0.03),
            "prompt_token_s": draw(0.0, 1e-5), "output_token_s": draw(0.0, 1e-4, 3e-3),
            "servers": draw(1, 2),
        }  # fmt: skip
    return spec


@cache
def _able(kind: str) -> list[str]:
    """Return the policies that such engines can have."""
    made = {case: make(case) for case in POLICIES}
    if kind == "pipeline":
        return [case for case, policy in made.items() if policy.can_pipeline]
    if "tiers" in kind:  # which are for cached prefixes, and those need memory in pages
        return [case for case, policy in made.items() if not isinstance(policy, Static)]
    return POLICIES


def _policy(draw: Draw, case: str) -> Spec:
    knobs = {key: _scaled(key, value) for key, value in PARAMS.get(case, {}).items()}
    predictor = draw(
        "oracle", {"name": "noisy", "sigma": 0.5, "latency_s": draw(0.0, 0.004)},
        {"name": "noisy", "kendall_tau": 0.6, "factor": 1.5}, {"name": "constant", "tokens": 20},
        {"name": "refined", "first_mae_tokens": 9, "refined_mae_tokens": 4, "every_tokens": 3},
        {"name": "bucketed", "num_buckets": 3, "accuracy": 0.7},
    )  # fmt: skip
    return {"name": case.partition("/")[0], **knobs, "predictor": predictor}


def _scaled(key: str, value: Any) -> Any:
    if key.endswith("_s") and value is not None and value < 1.0:
        return value * _LONGER
    return value / _LONGER if key.endswith("_per_s") else value


def _engine(draw: Draw, kind: str, sets_aside: bool) -> Spec:
    block_size, length = draw(1, 4, 16, 16), draw(130, 200, 300)
    budget = draw(21, 48, 64, 400)
    found: Spec = {
        "block_size": block_size,
        "max_model_len": length,
        "num_gpu_blocks_override": -(-length // block_size) + draw(1, 3, 9, 40),
        "max_num_seqs": draw(2, 3, 6, 20),
        "max_num_batched_tokens": budget,
    }
    alone = not ({"handover", "moving"} & set(kind.split(", ")))
    draws, tiered, staged = "drafts" in kind, "tiers" in kind, kind == "pipeline"
    switches: dict[str, tuple[Any, ...]] = {
        "max_num_resident": (4, 30),
        "enable_chunked_prefill": (budget < length,),
        "long_prefill_token_threshold": (8, 40),
        "threshold_spares_lone_request": (True,),
        "watermark": (0.01, 0.1),
        "scheduler_reserve_full_isl": (True,),
        "free_uncached_first": (True,),
        "arrivals_between_steps": (alone,),
        "chunked_pipeline_parallelism": (staged,),
        "async_scheduling": (alone and not (staged or draws),),
        "overrun_at_stop": (True,),
        "cuda_graph_padding": (True,),
        "reserve_null_block": (True,),
        "preempt_in_order": (True,),
        "serve_behind_preempted": (True,),
        "names_accepted_drafts": (True,),
        "tensor_parallel_size": (2,),
        "dtype": ("fp16",),
        "weight_dtype": ("fp8", "int4"),
        "kv_cache_dtype": ("fp8",),
        "check_horizon": (not staged,),
        "profile": (("vllm-0.19", "vllm-0.24", "vllm-0.33") if alone and not staged else (None,)),
        "trial_requests": (0, 12),
        "scheduling_overhead": (
            {"base_s": 0.001, "per_running_s": 1e-4, "per_waiting_s": 3e-5},
            {"per_prefill_step_s": 0.002, "first_step_s": 0.03},
        ),
    }
    for key, values in switches.items():
        value = draw(*values)
        if draw(*((0,) * 7 if key == "profile" else (0,) * 3), 1):
            found[key] = value
    if found.get("overrun_at_stop"):
        found["async_scheduling"] = found["overrun_at_stop"] = alone and not (staged or draws)
    if alone and not (staged or draws or tiered or "overrun_at_stop" in found) and draw(0, 0, 0, 1):
        found["kv_allocator"] = draw("contiguous_pow2", "contiguous_exact", "contiguous_max")
    elif sets_aside:
        found["enable_prefix_caching"] = False
    elif alone and draw(0, 1):
        found["enable_prefix_caching"] = True
    if draw(0, 0, 1):
        found |= {"preemption_mode": "swap", "swap_space": draw(0.01, 1)}
    if tiered:
        found |= _tiers(draw, kind != "tiers")
    if draws:
        found["speculation"] = _speculation(draw)
    if staged:
        found |= {"pipeline_parallel_size": draw(2, 4), "pipeline_link": "nvlink"}
    if kind == "lockstep":
        found |= {"data_parallel_size": draw(2, 3), "data_parallel_lockstep": draw(True, False)}
    return found


def _tiers(draw: Draw, shares: bool) -> Spec:
    tiers = [
        {
            "name": name, "num_blocks": draw(9, 40, 150), "load_gb_per_s": draw(0.5, 20),
            "store_gb_per_s": draw(0.5, 20), "latency_us": draw(0, 900),
            "write": draw("through", "back"),
        }
        for name in ("cpu", "disk")[: draw(1, 2)]
    ]  # fmt: skip
    if len(tiers) == 2 and shares and draw(0, 1):
        tiers[-1] = {"name": "common", "num_blocks": 90, "link": "nvme-4", "shared": True}
    return {
        "enable_prefix_caching": True,
        "kv_allocator": "paged",
        "preemption_mode": draw("recompute", "swap"),
        "kv_offload": {"tiers": tiers, "load": draw("always", "when_faster")},
        "offloading_connector": not shares and draw(False, False, True),
    }


def _speculation(draw: Draw) -> Spec:
    method = draw(
        {"method": "ngram", "request_s": draw(0.0, 0.001)}, {"method": "eagle", "num_layers": 2},
        {"method": "mtp"}, {"method": "draft_model", "model": "llama-3.2-1b"},
    )  # fmt: skip
    acceptance = draw(0.0, 0.7, 1.0, {"rates": [0.9, 0.5, 0.1]}, {"rate": 0.6, "spread": 0.2})
    length = draw(
        "fixed", {"name": "by_batch_size", "schedule": [[2, 1], [4, 0]]},
        {"name": "goodput", "prior_tokens": 4.0}, {"name": "slo", "budget_tokens": 8},
    )  # fmt: skip
    return {
        **method,
        "num_speculative_tokens": draw(1, 3, 5),
        "acceptance": acceptance,
        "draft_length": length,
    }


def _lengths(draw: Draw, mean: int) -> Any:
    return draw(
        mean, {"distribution": "exponential", "mean": mean, "cap": 2 * mean},
        {"distribution": "uniform", "low": 1, "high": 2 * mean},
        {"distribution": "lognormal", "mu": 3.0, "sigma": 0.7, "cap": 3 * mean},
    )  # fmt: skip


def _slo(draw: Draw) -> Spec:
    keys = {"ttft_ms": (40, 200), "tpot_ms": (12, 30), "e2el_ms": (400, 2000)}
    found = {key: draw(None, *values) for key, values in keys.items()}
    return {key: value for key, value in found.items() if value is not None} or {"ttft_ms": 90}


def _workload(draw: Draw, kind: str) -> Spec:
    if draw(0, 0, 0, 1) or ("tiers" in kind and draw(0, 1)):
        return _sessions(draw)
    found: Spec = {"num_requests": draw(9, 18, 26)}
    if draw(0, 0, 0, 1):
        found["trace"] = "azure-code"
    else:
        found |= {"prompt_tokens": _lengths(draw, 50), "output_tokens": _lengths(draw, 22)}
    rate = draw(8.0, 25.0, 80.0)
    clients = draw(None, None, None, 1, 5)
    if clients is not None:
        found["max_concurrency"] = clients
    process = draw("poisson", "gamma", "on_off", "constant", "all_at_once", "linear_ramp")
    if process == "gamma":
        found["arrivals"] = {"process": "gamma", "rate": rate, "burstiness": 0.3}
    elif process == "on_off":
        found["arrivals"] = {"process": "on_off", "rate": rate, "mean_on_s": 0.3, "mean_off_s": 0.4}
    elif process == "linear_ramp":
        ramp = {"start_rate": rate / 4, "end_rate": rate, "num_requests": found["num_requests"]}
        found["arrivals"] = {"process": "linear_ramp", **ramp}
    elif process == "all_at_once":
        found["arrivals"] = "closed_loop" if clients else "all_at_once"
    else:
        found["arrivals"] = {"process": process, "rate": rate}
    if draw(0, 1):
        found["classes"] = {
            name: {
                "share": share, "priority": draw(-1, 0, 2), "slo": _slo(draw),
                **draw({}, {"shared_prefix": {"tokens": 32, "groups": 2}}),
                **draw({}, {"output_tokens": _lengths(draw, 9)}),
            }
            for name, share in (("paying", 1), ("free", 2), ("batch", 1))[: draw(2, 3)]
        }  # fmt: skip
    return found


def _sessions(draw: Draw) -> Spec:
    think = draw(0.05, {"distribution": "exponential", "mean_s": 0.3})
    sessions: Spec = {
        "count": draw(3, 6),
        "turns": draw(2, {"distribution": "uniform", "low": 1, "high": 3}),
        "new_tokens": {"distribution": "exponential", "mean": 20, "cap": 40},
        "output_tokens": draw(6, {"distribution": "uniform", "low": 1, "high": 14}),
        "think_s": think,
    }
    if draw(0, 1):
        sessions["tools"] = {
            "search": {"share": 0.4, "seconds": 0.05, "tokens": 7},
            "shell": {"share": 0.2, "seconds": think, "tokens": 3},
        }
    if draw(0, 0, 1):
        sessions["fan_out"] = {"share": 0.3, "width": 2, "tokens": 4}
    if draw(0, 1):
        sessions["shared_prefix"] = {"tokens": 32, "groups": 2}
    found: Spec = {"session_rate": draw(2.0, 9.0, 40.0), "sessions": sessions}
    if draw(0, 0, 1):
        found["max_concurrency"] = 2
    return found


def _cluster(draw: Draw, kind: str) -> Spec:
    about = set(kind.split(", ")) & {"kinds", "handover", "scaling", "failing", "moving"}
    if not about:
        return {}
    name = draw(*ROUTERS)
    router = {"name": name.partition("/")[0], "staleness_ms": draw(0, 0, 15), **ROUTERS[name]}
    found: Spec = {"router": router}
    size = 3
    if "handover" in about:
        pools = draw(
            {"p": {"role": "prefill"}, "d": {"role": "decode", "count": 2}},
            {"p": {"role": "prefill", "count": 2}, "m": {}, "d": {"role": "decode"}},
        )  # fmt: skip
        found |= {
            "pools": pools,
            "link": {
                "gb_per_s": draw(0.05, 40), "latency_us": draw(0, 900),
                "by_layer": draw(True, False),
            },
            "decode_router": draw("least_kv", "round_robin", "jsq", "least_outstanding_tokens"),
        }  # fmt: skip
        if draw(0, 1):
            found["local"] = {
                "max_prompt_tokens": draw(0, 30), "max_queued_tokens": draw(0, 40, 100),
                "when_full": draw(True, False),
            }  # fmt: skip
    elif "kinds" in about:
        found["pools"] = {
            "old": {"count": 2, "engine": {"max_num_seqs": 2, "tensor_parallel_size": 2}},
            "new": {"hardware": "h100-80gb", "policy": {"name": draw("fcfs", "vtc", "sarathi")}},
        }
    else:
        found["count"] = size = draw(2, 3)
    if "scaling" in about or "failing" in about:
        found["start_up"] = {"load_gb_per_s": draw(400, 4000), "warm_up_s": draw(0.0, 0.1)}
    if "scaling" in about:
        scaler = _scaler(draw) | {"every_s": draw(0.05, 0.2), "min": 1, "max": draw(3, 5)}
        if "pools" in found:
            for pool in list(found["pools"].values())[: draw(1, 2)]:
                pool["autoscaler"] = scaler
        else:
            found["autoscaler"] = scaler
    if "failing" in about:
        found["failures"] = _failures(draw, size, bool({"handover", "moving"} & about))
    if "moving" in about:
        found |= {
            "migration": {
                "name": "llumnix", "every_ms": draw(5, 40), "leave_below": draw(1.0, 9.0),
                "enter_above": 9.0, "last_stage_blocks": draw(1, 2), "max_stages": draw(1, 3, 6),
            },
        }  # fmt: skip
        found.setdefault("link", {"gb_per_s": draw(0.05, 10), "latency_us": draw(0, 50)})
    return found


def _scaler(draw: Draw) -> Spec:
    scaler: Spec = draw(
        {"name": "hpa", "metric": "num_in_flight", "target": 2, "stabilization_s": 0.2},
        {"name": "hpa", "metric": "num_waiting", "target": 1, "stabilization_s": 0.0},
        {"name": "hpa", "metric": "kv_use", "target": 0.5, "stabilization_s": 0.1},
        {"name": "kv_thresholds", "up": 0.6, "down": 0.2},
        {"name": "slo_attainment", "target": 0.75, "patience": 2},
        {"name": "schedule", "times": [[0, 1], [0.3, 3], [0.7, 2]], "period_s": 1.1},
        {"name": "dynamo_planner", "ttft_ms": 60, "itl_ms": 15},
    )
    return dict(scaler)


def _failures(draw: Draw, size: int, has_links: bool) -> Spec:
    found: Spec = {
        "engines": [
            {"engine": draw(*range(size)), "at_s": draw(0.0, 0.1, 0.45), "down_s": draw(0.05, 0.4)}
            for _ in range(draw(0, 1, 2))
        ],
        "stragglers": [
            {"engine": draw(*range(size)), "from_s": 0.1, "to_s": 0.5, "slowdown": 3}
            for _ in range(draw(0, 1))
        ],
        "links": [
            {"engine": draw(*range(size)), "at_s": draw(0.1, 0.4), "down_s": 0.1}
            for _ in range(draw(0, 1) * has_links)
        ],
        "max_retries": draw(0, 2, 10),
    }
    if draw(0, 1):
        found |= {"mtbf_s": draw(0.4, 2.0), "mttr_s": 0.1}
    if draw(0, 0, 1):
        found["deadline_s"] = 0.2
    return found


# -- what comes of it --------------------------------------------------------------------------


def outcome(number: int) -> dict[str, Any]:
    """Run an experiment; return all that its result tells, by part."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = run(make_spec(drawn(number)))
        except SchedlabError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        found = {**told(result), "facts": _facts(result)}
        if number % 3 == 0:
            found["more"] = _more(result)
        if number % 13 == 3:
            found["in pieces"] = "same" if _in_pieces(number) == told(result) else "other"
    found["facts"]["warned"] = sorted(
        str(one.message) for one in warned if issubclass(one.category, UserWarning)
    )
    if number % 7 == 0:
        found["files"] = _files(result)
    return found


def told(result: RunResult) -> dict[str, Any]:
    """Return the tables of a result and its metrics."""
    found = result.log
    tables = [result.requests, found.steps(), found.preemptions()]
    tables += [found.token_gaps(), found.token_counts(), result.copies, result.copy_waits]
    measured: dict[str, Any] = dict(result.metrics())
    if "tenant" in result.requests:
        measured["tenant"] = result.metrics_by("tenant")
    times = found.token_times_of_all()
    return {
        "tables": [{name: _plain(table[name]) for name in table} for table in tables],
        "tokens": [_plain(times.of(n)) for n in result.requests["id"].tolist()],
        "metrics": rounded({str(key): value for key, value in measured.items()}),
    }


def _in_pieces(number: int) -> dict[str, Any]:
    """Run an experiment that outgrows what may lie in memory, and read it a few rows at a time."""
    few: list[tuple[Any, str, int]] = [
        (log, "MOST_NUMBERS_IN_MEMORY", 400), (steps, "_MARKED", 5),
        (stored_token_times, "_WINDOW_STEPS", 75),
        *[(one, "BATCH_ROWS", 37)
          for one in (columns, steps, saved_log, stored_token_times, concurrency)],
    ]  # fmt: skip
    with ExitStack() as patches:
        for module, name, value in few:
            patches.enter_context(patch.object(module, name, value))
        return told(run(make_spec(drawn(number))))


def _more(result: RunResult) -> dict[str, Any]:
    """Return metrics that no result has by itself; some look at each request's tokens."""
    of, seen = [metric_named(name) for name in METRICS], result.observation()
    if "tenant" in result.requests:
        of += [metric_named(name) for name in METRICS_OF_TENANTS]
    return rounded({one.name: _measured(one, seen) for one in of})


def _measured(metric: Metric, run: Observation) -> float | str:
    try:
        return metric.of(run)
    except SchedlabError as error:  # e.g. between two tenants, where there are three
        return str(error)


def _plain(column: Any) -> Any:
    return rounded(np.asarray(column).tolist())


def _facts(result: RunResult) -> dict[str, Any]:
    ours = result.to_vllm_json()["schedlab"]
    assert isinstance(ours, dict)
    origin = {k: v for k, v in ours.pop("provenance").items() if k not in _NOT_OF_THE_RUN}
    del ours["metrics"]
    moved = {
        name: [list(map(str, one)) if isinstance(one, tuple) else str(one) for one in found]
        for name in ("losses", "transfers", "moves", "places")
        if (found := getattr(result.log, name, ()))
    }
    return {"facts": rounded(ours), "origin": rounded(origin), "moved": moved}


def _files(result: RunResult) -> dict[str, Any]:
    """Return what is read back of the files of a result, and the events of its trace."""
    with TemporaryDirectory() as folder:
        result.save(Path(folder))
        back = RunResult.load(Path(folder))
        found = told(back)
        result.to_perfetto(Path(folder, "trace.json"), max_requests=12, max_steps=40)
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))
    return {**found, "facts": _facts(back), "events": rounded(events)}


# -- what is kept ------------------------------------------------------------------------------


def digest(value: Any) -> str:
    """Return a short digest of a part."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:6]


def experiments(numbers: Iterable[int]) -> dict[str, str]:
    """Run some experiments; a digest of each part of each, and one of the facts of all.

    Facts hold every limit of an engine and what prices it: one more would move every line.
    """
    found: dict[str, str] = {}
    facts: list[Any] = []
    for number in numbers:
        parts: Mapping[str, Any] = outcome(number)
        facts.append([parts.get("facts"), parts.get("files", {}).get("facts")])
        rest = {k: v for k, v in parts.items() if k != "facts"}
        if "files" in rest:
            rest["files"] = {k: v for k, v in rest["files"].items() if k != "facts"}
        found[str(number)] = " ".join(
            f"{name} {part if name == 'in pieces' else digest(part)}" for name, part in rest.items()
        )
    return found | {"facts": digest(facts)}


CASES = {
    f"whole experiments {first}": (experiments, range(first, first + _AT_ONCE))
    for first in range(0, EXPERIMENTS, _AT_ONCE)
}


def main() -> None:
    """Print experiments, each with all that its digests are of."""
    for number in map(int, sys.argv[1:]):
        print(json.dumps({"experiment": drawn(number), **outcome(number)}, indent=1, default=str))


if __name__ == "__main__":
    main()
