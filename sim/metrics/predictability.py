"""How well a request could know its latency beforehand."""

from __future__ import annotations

from typing import Literal

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.record.columns import Floats


@register(better="higher")
def explained_by_lengths(run: Observation, latency: Literal["ttft", "e2el"]) -> float:
    """Return the share of the variance of a latency that a request's own lengths explain.

    R2 of the least-squares fit latency = a + b * prompt tokens + c * output tokens over the
    completed requests: 1 if nothing but its own lengths decides how long a request takes, 0 if
    they say nothing. NaN if all latencies are equal.
    """
    done = run.completed
    values: Floats = getattr(run.latencies, latency)[done]
    if not len(values):
        return float("nan")
    lengths = (run.requests[name][done] for name in ("prompt_tokens", "generated_tokens"))
    known = np.column_stack([np.ones(len(values)), *lengths]).astype(np.float64)
    fitted = known @ np.linalg.lstsq(known, values, rcond=None)[0]
    total = float(np.square(values - values.mean()).sum())
    rest = float(np.square(values - fitted).sum())
    return 1.0 - rest / total if total > 0 else float("nan")
