"""The most that was under way at once."""

from __future__ import annotations

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.record.columns import whole_numbers

_NS_PER_S = 1_000_000_000


@register(better="higher", every_run=True)
def max_concurrent_requests(run: Observation) -> int:
    """Return the most completed requests in flight.

    Over half-open intervals [arrival, finish): departures come before arrivals.
    """
    arrival_ns = whole_numbers(run.requests, "arrival_ns")[run.completed]
    finish_ns = whole_numbers(run.requests, "finish_ns")[run.completed]
    if not len(arrival_ns):
        return 0
    times_ns = np.concatenate([finish_ns, arrival_ns])
    change = np.repeat(np.array([-1, 1]), len(arrival_ns))
    # A stable sort keeps departures, listed first, ahead of arrivals at the same time.
    return int(np.cumsum(change[np.argsort(times_ns, kind="stable")]).max())


@register(unit="tokens/s", better="higher", label="most output tokens in a second", every_run=True)
def max_output_tokens_per_s(run: Observation) -> float:
    """Return the most tokens in one of the seconds counted from the first arrival."""
    by_second: dict[int, int] = {}
    for times_ns, tokens in run.token_count_batches():
        seconds, place = np.unique(
            (times_ns - run.first_arrival_ns) // _NS_PER_S, return_inverse=True
        )
        sums = np.bincount(place, weights=tokens, minlength=len(seconds)).tolist()
        # Only the first of these seconds, and the last of those before, may be the same.
        for second, num_tokens in zip(seconds.tolist(), sums, strict=True):
            by_second[second] = by_second.get(second, 0) + num_tokens
    return float(max(by_second.values(), default=0))
