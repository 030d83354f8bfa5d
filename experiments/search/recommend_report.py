"""What `recommend` came to: tables, sentences and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from schedlab.experiments.search.recommend import UNNAMED, Recommendation, Tried, serve_line
from schedlab.experiments.search.search_report import basis_lines
from schedlab.experiments.statistics import verdict, with_interval
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.text import number

Data = dict[str, Any]

_EXPECTED = (
    "request_throughput", "output_throughput", "slo_attainment", "median_ttft_ms", "p99_ttft_ms",
    "median_tpot_ms", "p99_tpot_ms", "median_e2el_ms", "p99_e2el_ms", "num_preemptions",
)  # fmt: skip
_AS_MUCH_AS_COMES = 0.99
HEADER = ("stage", "TP", "replicas", "max\nseqs", "max batched\ntokens", "policy", "requests/s")


def tried_rows(found: Recommendation) -> list[tuple[str, ...]]:
    """Return a row for everything tried: what it was, and what it serves within the targets."""
    return [
        (
            one.stage,
            *map(str, one.candidate[:4]),
            one.candidate.policy,
            _served(one),
        )
        for one in found.tried
    ]


def expected_rows(found: Recommendation) -> list[tuple[str, str]]:
    """Return a row for each metric that is expected of the choice."""
    rows = []
    for name in _EXPECTED:
        metric = metric_named(name)
        value = found.expected[name]
        rows.append((metric.axis, with_interval(value.mean, value.half_width, metric.scale)))
    return rows


def recommend_lines(found: Recommendation, cost_models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what to say of the choice: by how much it is better, what it costs, how sure it is."""
    asked = found.question
    targets = " and ".join(f"{key.removesuffix('_ms').upper()} <= {value:g} ms"
                           for key, value in asked.slo.items())  # fmt: skip
    beyond = {"at least": "at least ", "below": "below "}.get(found.best.found.bound, "")
    lines = [
        f"within {targets} for {asked.attainment:.0%} of requests it serves {beyond}"
        f"{_served(found.best)} requests/s on {found.best.candidate.num_gpus} x {asked.hardware}"
        + ", WHICH HAS NOT SETTLED (below)"
        * (found.best.found.settled is False)
    ]
    served = found.expected.get("request_throughput")
    if served is not None and served.mean < _AS_MUCH_AS_COMES * found.at_rate:
        lines.append(
            f"throughput is {number(served.mean)} where {number(found.at_rate)} requests/s come, "
            "for it counts until the last answer of a finite run is there; so do tokens/s and cost"
        )
    if not asked.served:
        lines.append(
            f"{UNNAMED} stands for what vLLM loads, a name on huggingface.co or a folder; "
            "--serve-as NAME writes it"
        )
    if asked.rate is not None:
        room = found.best.rate / asked.rate - 1.0
        lines.append(
            f"{asked.rate:g} requests/s are asked for: "
            + (f"{room:.0%} to spare" if room >= 0 else "NO DEPLOYMENT SERVES THEM")
        )
    if found.best.candidate == found.default.candidate:
        lines.append("that is what vLLM does by itself: no option is worth setting")
    elif found.change is not None:
        names = ("it", f"vLLM's own settings ({found.default.candidate.label})")
        lines.append(verdict(*names, "requests/s", found.change, True))
    if math.isnan(found.usd_per_million_tokens):
        lines.append(f"cost: no price of {asked.hardware} is known (--usd-per-hour)")
    else:
        source = "as given" if asked.usd_per_hour else gpu(asked.hardware).price_source
        lines.append(
            f"cost: ${found.usd_per_million_tokens:.2f} per million output tokens at "
            f"{number(found.at_rate)} requests/s ({source})"
        )
    lines.append(
        f"vLLM {asked.vllm} by itself: max_num_seqs {found.limits.max_num_seqs}, "
        f"max_num_batched_tokens {found.limits.max_num_batched_tokens} ({found.limits.source})"
    )
    if found.best.candidate.replicas > 1:
        lines.append(
            "replicas are independent engines behind vLLM's own balancing (reports every 100 ms)"
        )
    if found.is_cut:
        lines.append(
            f"KV memory holds {found.max_model_len:,} tokens, less than the model's longest "
            "request: without --max-model-len vLLM refuses to start"
        )
    lines += [f"left out: {name}: {why}" for name, why in found.excluded.items()]
    return [*lines, *found.best.found.remarks, *surety_lines(found, cost_models)]


def surety_lines(found: Recommendation, cost_models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how sure the answer is: seeds, cost model, and what is not in it."""
    lines = [
        f"how sure: {len(found.best.found.values)} seeds that the choice was not made by; step "
        "times are a model's, and near capacity a rate is off by about as much as they are",
        *basis_lines(cost_models),
    ]
    if any(one.get("calibration") == "UNCALIBRATED" for one in cost_models):
        lines.append(
            "no run on your machine is in this: which setting is better is surer than how many "
            "requests it serves; measure one rate (vllm bench serve --save-result --save-detailed) "
            "and hold it against this by schedlab validate before you buy"
        )
    lines.append(
        "not in it: HTTP, tokenisation and streaming in front of the engine (frontend:), time of "
        "vLLM's own scheduler, speculative decoding"
    )
    return lines


def recommend_data(
    found: Recommendation, cost_models: Sequence[Mapping[str, Any]], num_runs: int
) -> Data:
    """Return the same for JSON, with everything that was tried."""
    name = f"{found.question.model} on {found.question.num_gpus} x {found.question.hardware}"
    return {
        "name": name,
        "table": {"header": HEADER, "rows": tried_rows(found), "num_text": 1},
        "question": asdict(found.question),
        "serve": serve_line(found),
        "vllm_defaults": found.limits._asdict(),
        "best": _plain(found.best),
        "default": _plain(found.default),
        "change": None if found.change is None else found.change._asdict(),
        "at_rate": found.at_rate,
        "expected": {
            name: {"mean": found.expected[name].mean, "ci95": found.expected[name].half_width}
            for name in _EXPECTED
        },
        "usd_per_million_output_tokens": found.usd_per_million_tokens,
        "max_model_len": found.max_model_len,
        "excluded": dict(found.excluded),
        "tried": [_plain(one) for one in found.tried],
        "lines": recommend_lines(found, cost_models),
        "cost_models": list(cost_models),
        "num_runs": num_runs,
    }


def _plain(one: Tried) -> Data:
    found = one.found
    has_answer = not found.error
    return {
        "stage": one.stage,
        **one.candidate._asdict(),
        "label": one.candidate.label,
        "error": found.error or None,
        "bound": found.bound or None,
        "mean": found.value.mean if has_answer else None,
        "ci95": found.value.half_width if has_answer and one.stage == "confirmed" else None,
        "replications": [{"value": bracket.value} for bracket in found.brackets],
        "num_requests": found.num_requests,
        "remarks": list(found.remarks),
    }


def _served(one: Tried) -> str:
    if one.found.error:
        return "cannot run"
    if one.found.bound == "below":
        return "none"
    sign = ">= " if one.found.bound else ""
    mean, half_width = one.found.value
    # Two seeds choose well enough, but their interval says nothing.
    return sign + with_interval(mean, half_width if one.stage == "confirmed" else None)
