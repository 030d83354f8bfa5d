"""Latency, throughput and goodput of a run, in the definitions of `vllm bench serve`."""

from __future__ import annotations

from functools import cache

import numpy as np

from schedlab.sim.metrics.latencies import Latencies, latencies
from schedlab.sim.metrics.weighted import WeightedSample
from schedlab.sim.record.columns import (
    REJECTED,
    TRUNCATED,
    Bools,
    Columns,
    Floats,
    Ints,
    Pairs,
    completed,
    whole_numbers,
)

Metrics = dict[str, float]
"""Flat and snake_case; counts are int. NaN where there is nothing to measure."""

PERCENTILES = (50, 90, 95, 99)

_NS_PER_MS = 1e6
_NS_PER_S = 1_000_000_000


def request_metrics(
    requests: Columns, token_gaps: Pairs | None = None, token_counts: Pairs | None = None
) -> Metrics:
    """Measure what the users of a run saw.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request: id, arrival_ns, prompt_tokens, generated_tokens, first_scheduled_ns,
        first_token_ns, finish_ns (-1 = never), num_preemptions, recomputed_tokens,
        prefix_hit_tokens, slo_ttft_ms, slo_tpot_ms, slo_e2el_ms (NaN = no target), status (0
        finished, 1 rejected, 3 finished but cut off by a length limit).
    token_gaps : (ndarray, ndarray) or None
        Gaps between successive tokens of one request, pooled: (gap in ns, how many). `None` leaves
        the ITL metrics out.
    token_counts : (ndarray, ndarray) or None
        (time in ns, tokens that came out then). `None` leaves `max_output_tokens_per_s` out.

    Returns
    -------
    dict
        Counts: num_requests, completed, rejected, failed, truncated,
        total_input_tokens, total_output_tokens. Rates: duration_s, request_throughput,
        output_throughput, total_token_throughput, offered_request_rate, request_goodput,
        max_output_tokens_per_s, max_concurrent_requests. SLO: num_with_slo, num_slo_met,
        slo_attainment, {ttft,tpot,e2el}_slo_attainment. Latency:
        {mean,median,std,p50,p90,p95,p99}_{ttft,tpot,itl,e2el,queue_time,normalized_latency}_ms.
        Waste: num_preemptions, num_preempted_requests, recomputed_tokens. Prefix caching:
        prefix_hit_share.

    Notes
    -----
    Latencies are of completed requests (status 0 and 3), in ms, from arrival:
    ``TTFT = first token - arrival``, ``E2EL = finish - arrival``,
    ``TPOT = (E2EL - TTFT) / (n - 1)`` for n > 1 output tokens, ITL all gaps of all requests in one
    list, ``queue_time = first scheduled - arrival``, ``normalized_latency = E2EL / n``.

    ``duration = last finish - first arrival``. vLLM's client starts its clock just before it sends
    the first request and stops it at the last response; here the clock starts at the first arrival,
    so the idle time before it does not count. Throughputs are sums over completed requests divided
    by it. Goodput counts completed requests that hold each of their targets (<=; TPOT of a
    one-token answer is 0); the attainments divide by all requests with a target, so that rejected
    ones are misses, and leave out requests without a target. `prefix_hit_share` is
    of the prompt tokens of completed requests, as found at their first admission.

    References
    ----------
    vllm/benchmarks/serve.py, ``calculate_metrics``.
    """
    status = requests["status"]
    done = completed(requests)
    waited = latencies(requests)
    arrival = whole_numbers(requests, "arrival_ns")
    finish = whole_numbers(requests, "finish_ns")[done]
    since = arrival[done]
    tokens = whole_numbers(requests, "generated_tokens")[done]
    duration_s = float(finish.max() - arrival.min()) / _NS_PER_S if len(finish) else 0.0
    span_s = float(arrival.max() - arrival.min()) / _NS_PER_S if len(arrival) else 0.0

    num_input = int(whole_numbers(requests, "prompt_tokens")[done].sum())
    num_output = int(tokens.sum())
    goodput = _goodput(requests, done, waited)
    rejected = int(np.count_nonzero(status == REJECTED))
    metrics: Metrics = {
        "num_requests": len(status),
        "completed": len(finish),
        "rejected": rejected,
        "failed": rejected,
        "truncated": int(np.count_nonzero(status == TRUNCATED)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "duration_s": duration_s,
        "request_throughput": _rate(len(finish), duration_s),
        "output_throughput": _rate(num_output, duration_s),
        "total_token_throughput": _rate(num_input + num_output, duration_s),
        "offered_request_rate": _rate(len(arrival) - 1, span_s),
        **goodput,
        "request_goodput": _rate(goodput["num_slo_met"], duration_s)
        if goodput["num_with_slo"]
        else float("nan"),
        "max_concurrent_requests": _max_concurrent(since, finish),
    }
    if token_counts is not None:
        start = int(arrival.min()) if len(arrival) else 0
        metrics["max_output_tokens_per_s"] = _max_per_second(*token_counts, start)
    for name, values in waited._asdict().items():
        metrics |= _summary(name, values[~np.isnan(values)])
    if token_gaps is not None:
        gaps, counts = token_gaps
        metrics |= _weighted_summary("itl", WeightedSample(gaps / _NS_PER_MS, counts))
    preemptions = whole_numbers(requests, "num_preemptions")
    metrics["num_preemptions"] = int(preemptions.sum())
    metrics["num_preempted_requests"] = int(np.count_nonzero(preemptions))
    metrics["recomputed_tokens"] = int(whole_numbers(requests, "recomputed_tokens").sum())
    hits = int(whole_numbers(requests, "prefix_hit_tokens")[done].sum())
    metrics["prefix_hit_share"] = _rate(hits, num_input)
    return metrics


def step_metrics(steps: Columns, kv_capacity_tokens: int) -> Metrics:
    """Measure how the engine spent its time and memory.

    Parameters
    ----------
    steps : mapping of str to ndarray
        One row a step: start_ns, end_ns (scheduling overhead inside), num_decodes, num_prefills,
        prefill_tokens, padding_tokens, num_running, num_waiting, kv_tokens, kv_allocated_tokens,
        kv_reserved_unused_tokens, kv_fragmentation_tokens, overhead_ns, swapped_bytes.
    kv_capacity_tokens : int
        Size of the KV cache.

    Returns
    -------
    dict
        num_steps, busy_s, idle_s, busy_share, overhead_share, mean_batch_size, max_batch_size,
        mean_num_running, mean_num_waiting, computed_tokens, padding_share, kv_utilization,
        kv_allocated_share, max_kv_allocated_share, kv_reserved_unused_share,
        kv_fragmentation_share, swapped_bytes.

    Notes
    -----
    Means weigh each step with its duration, so they describe the time the engine was busy, not the
    idle time between. Batch size counts requests: decodes and prefills.
    ``busy_share = busy / (last end - first start)``. `kv_utilization` and the allocated shares are
    of the capacity; reserved-unused and fragmentation shares are of the memory held.
    ``padding_share = padding / (decodes + prefill tokens + padding)``.
    """
    start, end = whole_numbers(steps, "start_ns"), whole_numbers(steps, "end_ns")
    length = (end - start).astype(np.float64)
    busy_ns = float(length.sum())
    span_ns = float(end[-1] - start[0]) if len(end) else 0.0

    def mean(values: Ints) -> float:
        return float((values * length).sum() / busy_ns) if busy_ns else float("nan")

    batch = whole_numbers(steps, "num_decodes") + whole_numbers(steps, "num_prefills")
    padding = int(whole_numbers(steps, "padding_tokens").sum())
    useful = int(
        whole_numbers(steps, "num_decodes").sum() + whole_numbers(steps, "prefill_tokens").sum()
    )
    held = whole_numbers(steps, "kv_allocated_tokens")
    mean_held = mean(held)
    return {
        "num_steps": len(end),
        "busy_s": busy_ns / _NS_PER_S,
        "idle_s": (span_ns - busy_ns) / _NS_PER_S,
        "busy_share": _rate(busy_ns, span_ns),
        "overhead_share": _rate(float(whole_numbers(steps, "overhead_ns").sum()), busy_ns),
        "mean_batch_size": mean(batch),
        "max_batch_size": int(batch.max()) if len(batch) else 0,
        "mean_num_running": mean(whole_numbers(steps, "num_running")),
        "mean_num_waiting": mean(whole_numbers(steps, "num_waiting")),
        "computed_tokens": useful + padding,
        "padding_share": _rate(padding, useful + padding),
        "kv_utilization": _rate(mean(whole_numbers(steps, "kv_tokens")), kv_capacity_tokens),
        "kv_allocated_share": _rate(mean_held, kv_capacity_tokens),
        "max_kv_allocated_share": _rate(int(held.max()) if len(held) else 0, kv_capacity_tokens),
        "kv_reserved_unused_share": _rate(
            mean(whole_numbers(steps, "kv_reserved_unused_tokens")), mean_held
        ),
        "kv_fragmentation_share": _rate(
            mean(whole_numbers(steps, "kv_fragmentation_tokens")), mean_held
        ),
        "swapped_bytes": int(whole_numbers(steps, "swapped_bytes").sum()),
    }


@cache
def metric_names() -> tuple[str, ...]:
    """Return the names of all metrics of a run, in order."""
    nothing = np.zeros(0, dtype=np.int64)

    class Empty(dict[str, Ints]):
        def __missing__(self, name: str) -> Ints:
            return nothing

    pairs = nothing, nothing
    return (*request_metrics(Empty(), pairs, pairs), *step_metrics(Empty(), 1))


def _rate(amount: float, per: float) -> float:
    return amount / per if per > 0 else float("nan")


def _summary(name: str, values: Floats) -> Metrics:
    if not len(values):
        return _weighted_summary(name, WeightedSample(values, np.zeros(0, dtype=np.int64)))
    result = {
        f"mean_{name}_ms": float(np.mean(values)),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(np.std(values)),
    }
    for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
        result[f"p{p}_{name}_ms"] = float(value)
    return result


def _weighted_summary(name: str, sample: WeightedSample) -> Metrics:
    result = {
        f"mean_{name}_ms": sample.mean(),
        f"median_{name}_ms": sample.median(),
        f"std_{name}_ms": sample.std(),
    }
    for p, value in zip(PERCENTILES, sample.percentiles(PERCENTILES), strict=True):
        result[f"p{p}_{name}_ms"] = value
    return result


def _goodput(requests: Columns, done: Bools, waited: Latencies) -> Metrics:
    """Count requests that hold their targets, per dimension and jointly."""
    any_target = np.zeros(len(done), dtype=bool)
    all_met = np.ones(len(done), dtype=bool)
    result: Metrics = {}
    # An answer of one token has no time per token to miss a target by.
    tpot = np.where(done & np.isnan(waited.tpot), 0.0, waited.tpot)
    for name, latency in (("ttft", waited.ttft), ("tpot", tpot), ("e2el", waited.e2el)):
        target = requests[f"slo_{name}_ms"].astype(np.float64, copy=False)
        stated = ~np.isnan(target)
        met = latency <= target  # False where there is no target or no latency
        any_target |= stated
        all_met &= met | ~stated
        result[f"{name}_slo_attainment"] = _rate(
            int(np.count_nonzero(met & stated)), int(np.count_nonzero(stated))
        )
    num_met = int(np.count_nonzero(any_target & all_met & done))
    num_with_slo = int(np.count_nonzero(any_target))
    return {
        "num_with_slo": num_with_slo,
        "num_slo_met": num_met,
        "slo_attainment": _rate(num_met, num_with_slo),
        **result,
    }


def _max_concurrent(arrival: Ints, finish: Ints) -> int:
    """Sweep the half-open intervals [arrival, finish); departures come before arrivals."""
    if not len(arrival):
        return 0
    times = np.concatenate([finish, arrival])
    change = np.repeat(np.array([-1, 1]), len(arrival))
    # A stable sort keeps departures, listed first, ahead of arrivals at the same time.
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def _max_per_second(times: Ints, counts: Ints, start_ns: int) -> float:
    """Return the most tokens in one of the seconds [i, i + 1) counted from `start_ns`."""
    if not len(times):
        return 0.0
    _, second = np.unique((times - start_ns) // _NS_PER_S, return_inverse=True)
    return float(np.bincount(second, weights=counts).max())
