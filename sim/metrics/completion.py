"""How much was done by when, counted from the first arrival."""

from __future__ import annotations

import numpy as np

from schedlab.sim.metrics.latencies import seen_column
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.record.columns import Floats, whole_numbers


@register(unit="requests", better="higher")
def finished_within(run: Observation, seconds: float) -> float:
    """Return the requests that finished at most so long after the first arrival."""
    return float(np.count_nonzero(_finishes_s(run) <= seconds))


@register(unit="tokens", better="higher")
def tokens_within(run: Observation, seconds: float) -> float:
    """Return the output tokens that came out at most so long after the first arrival.

    Those of requests that finish later included.
    """
    until_ns = run.first_arrival_ns + round(seconds * 1e9)
    return float(sum(int(n[at_ns <= until_ns].sum()) for at_ns, n in run.token_count_batches()))


@register(unit="s")
def time_to_finish(run: Observation, num_requests: int) -> float:
    """Return the seconds from the first arrival until the n-th request finished, whichever.

    NaN if fewer finished.
    """
    finish_s = _finishes_s(run)
    if not 1 <= num_requests <= len(finish_s):
        return float("nan")
    return float(np.sort(finish_s)[num_requests - 1])


def _finishes_s(run: Observation) -> Floats:
    finish_ns = whole_numbers(run.requests, seen_column(run.requests, "finish"))[run.completed]
    return np.asarray((finish_ns - run.first_arrival_ns) / 1e9)
