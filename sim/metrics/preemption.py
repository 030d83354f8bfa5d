"""What preemption costs requests."""

from __future__ import annotations

from typing import Literal

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import ratio
from schedlab.sim.record.columns import whole_numbers


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

    Time from eviction to resumption over time from first token to finish, summed over the
    completed requests at or above the 99th percentile of `latency` (a one-token answer counts with
    its decode time). Recomputation after the resumption is not in it.
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
    lost = run.preemptions
    in_tail = np.isin(lost["id"], run.requests["id"][done][tail])  # completed, so all resumed
    away_ns = (whole_numbers(lost, "resumed_ns") - whole_numbers(lost, "evicted_ns"))[in_tail]
    return ratio(float(away_ns.sum()) / 1e6, float(decode_ms[tail].sum()))
