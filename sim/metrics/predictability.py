"""How well a request could know its latency beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.latencies import latencies
from schedlab.sim.record.columns import Floats, completed

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

_LENGTHS = ("prompt_tokens", "generated_tokens")
_EXPLAINED = ("ttft", "e2el")


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
    if latency not in _EXPLAINED:
        raise SpecError(f"latency: no {latency!r}; {nearest(latency, _EXPLAINED)}")
    rows = result.requests
    done = completed(rows)
    values: Floats = getattr(latencies(rows), latency)[done]
    lengths = [rows[name][done].astype(np.float64) for name in _LENGTHS]
    if not len(values):
        return float("nan")
    known = np.column_stack([np.ones(len(values)), *lengths])
    fitted = known @ np.linalg.lstsq(known, values, rcond=None)[0]
    total = float(np.square(values - values.mean()).sum())
    rest = float(np.square(values - fitted).sum())
    return 1.0 - rest / total if total > 0 else float("nan")
