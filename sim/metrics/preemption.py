"""What preemption costs requests."""

from __future__ import annotations

from typing import Literal

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import rows_of, whole_numbers


@register(every_run=True)
def num_preemptions(run: Observation) -> int:
    """Return the evictions of requests from KV memory."""
    return int(whole_numbers(run.requests, "num_preemptions").sum())


@register(every_run=True)
def num_preempted_requests(run: Observation) -> int:
    """Return the requests that were evicted at least once."""
    return int(np.count_nonzero(run.requests["num_preemptions"]))


@register(label="recomputed", unit="tokens", every_run=True)
def recomputed_tokens(run: Observation) -> int:
    """Return the tokens whose KV was thrown away by an eviction."""
    return int(whole_numbers(run.requests, "recomputed_tokens").sum())


@register()
def preempted_share(run: Observation) -> float:
    """Return the share of requests that were preempted at least once."""
    return ratio(num_preempted_requests(run), len(run.requests["id"]))


@register(unit="%", scale=100.0)
def preemption_loss_at_tail(run: Observation, latency: Literal["tpot", "e2el"] = "tpot") -> float:
    """Return the share of their decode time that the slowest hundredth spent preempted.

    Time from eviction to resumption over time from first token to finish in the engine, summed
    over the completed requests at or above the 99th percentile of `latency` (a one-token answer
    counts with its decode time). Of an eviction before the first token only what lies behind it
    counts. Recomputation after the resumption is not in it.
    """
    done = run.completed
    if not done.any():
        return float("nan")
    decode_ms = (run.latencies.e2el - run.latencies.ttft)[done]
    slow = run.latencies.e2el[done]
    if latency == "tpot":
        slow = decode_ms / np.maximum(
            run.requests["generated_tokens"][done].astype(np.int64) - 1, 1
        )
    tail = slow >= np.percentile(slow, 99)
    ids, first_ns, finish_ns = (
        whole_numbers(run.requests, name)[done][tail]
        for name in ("id", "first_token_ns", "finish_ns")
    )
    order = np.argsort(ids)
    lost = rows_of(run.preemptions, np.isin(run.preemptions["id"], ids))  # completed: all resumed
    of = order[np.searchsorted(ids, lost["id"], sorter=order)]
    since_ns = np.maximum(whole_numbers(lost, "evicted_ns"), first_ns[of])
    away_ns = np.maximum(whole_numbers(lost, "resumed_ns") - since_ns, 0)
    return ratio(float(away_ns.sum()), float((finish_ns - first_ns).sum()))
