"""How well a request could know its latency beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.record.log import FINISHED, TRUNCATED

if TYPE_CHECKING:
    from schedlab.sim.record.result import RunResult

_ENDS = {"ttft": "first_token_ns", "e2el": "finish_ns"}


def explained_by_lengths(result: RunResult, latency: str) -> float:
    """Return the share of the variance of a latency that a request's own lengths explain.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : str
        `ttft` or `e2el`.

    Returns
    -------
    float
        R2 of the least-squares fit ``latency = a + b * prompt tokens + c * output tokens`` over
        the completed requests: 1 if nothing but its own lengths decides how long a request
        takes, 0 if they say nothing. NaN if all latencies are equal.

    Raises
    ------
    SpecError
        If the latency is another.
    """
    if latency not in _ENDS:
        raise SpecError(f"latency: no {latency!r}; {nearest(latency, _ENDS)}")
    rows = result.requests
    done = (rows["status"] == FINISHED) | (rows["status"] == TRUNCATED)
    names = ("arrival_ns", _ENDS[latency], "prompt_tokens", "generated_tokens")
    arrival, end, *lengths = (rows[name][done].astype(np.float64) for name in names)
    values = end - arrival
    if not len(values):
        return float("nan")
    known = np.column_stack([np.ones(len(values)), *lengths])
    fitted = known @ np.linalg.lstsq(known, values, rcond=None)[0]
    total = float(np.square(values - values.mean()).sum())
    rest = float(np.square(values - fitted).sum())
    return 1.0 - rest / total if total > 0 else float("nan")
