"""How a metric is written for people, and which way it is better."""

from __future__ import annotations

import math
from typing import NamedTuple

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.metrics import metric_names

_STATISTICS = {
    "mean": "mean", "median": "median", "std": "std of",
    "p50": "P50", "p90": "P90", "p95": "P95", "p99": "P99",
}  # fmt: skip
_LATENCIES = {
    "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL",
    "queue_time": "queue time", "normalized_latency": "latency per token",
}  # fmt: skip
_IN_SECONDS = ("ttft", "e2el", "queue_time")
_NAMED = {
    "request_throughput": ("throughput", "requests/s", 1.0),
    "output_throughput": ("output throughput", "tokens/s", 1.0),
    "total_token_throughput": ("total throughput", "tokens/s", 1.0),
    "request_goodput": ("goodput", "requests/s", 1.0),
    "num_preemptions": ("preemptions", "", 1.0),
    "recomputed_tokens": ("recomputed", "tokens", 1.0),
    "rejected": ("rejected", "requests", 1.0),
    "prefix_hit_share": ("prompt tokens found in the cache", "%", 100.0),
}
_LARGER = (
    "completed", "num_slo_met", "busy_share", "mean_batch_size", "max_batch_size",
    "kv_utilization", "prefix_hit_share", "max_concurrent_requests", "max_output_tokens_per_s",
)  # fmt: skip
_NEITHER = (
    "num_requests", "total_input_tokens", "total_output_tokens", "offered_request_rate",
    "num_with_slo", "num_steps", "computed_tokens",
)  # fmt: skip


class Written(NamedTuple):
    """A metric as people read it.

    Attributes
    ----------
    name, unit : str
        The unit is empty for a count.
    scale : float
        The value times this is in the unit.
    """

    name: str
    unit: str
    scale: float

    @property
    def label(self) -> str:
        """Name and unit, as an axis has them."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def written(metric: str) -> Written:
    """Return how to write a metric.

    Parameters
    ----------
    metric : str
        Name of a metric of a run.

    Returns
    -------
    Written
        Time to first token, end-to-end latency and queue time in seconds, other latencies in
        milliseconds, shares and attainments in per cent.

    Raises
    ------
    SpecError
        If no run has such a metric.

    Examples
    --------
    >>> written("p99_ttft_ms").label
    'P99 TTFT (s)'
    >>> written("slo_attainment").label
    'SLO attainment (%)'
    """
    known = metric_names()
    if metric not in known:
        raise SpecError(f"no metric is called {metric!r}; {nearest(metric, known)}")
    if metric in _NAMED:
        return Written(*_NAMED[metric])
    statistic, _, rest = metric.partition("_")
    latency = rest.removesuffix("_ms")
    if statistic in _STATISTICS and latency in _LATENCIES and rest.endswith("_ms"):
        unit, scale = ("s", 1e-3) if latency in _IN_SECONDS else ("ms", 1.0)
        return Written(f"{_STATISTICS[statistic]} {_LATENCIES[latency]}", unit, scale)
    if metric.endswith("slo_attainment"):
        part = _LATENCIES.get(metric.removesuffix("_slo_attainment"))
        return Written(f"{part} attainment" if part else "SLO attainment", "%", 100.0)
    words = metric.replace("kv_", "KV ").replace("_", " ")
    if metric.endswith(("_share", "_utilization")):
        return Written(words.removesuffix(" share"), "%", 100.0)
    for suffix, unit in (("_s", "s"), ("_bytes", "bytes"), ("_tokens", "tokens")):
        if metric.endswith(suffix):
            return Written(words.removesuffix(f" {unit}"), unit, 1.0)
    return Written(words.removeprefix("num "), "", 1.0)


def larger_is_better(metric: str) -> bool | None:
    """Say which way a metric is better.

    Parameters
    ----------
    metric : str
        Name of a metric of a run.

    Returns
    -------
    bool or None
        True for throughputs, goodput, attainments and how well the device is used; False for
        latencies, waste and failures; None for what only describes the workload or the run.
    """
    if metric in _NEITHER:
        return None
    return metric in _LARGER or metric.endswith(("throughput", "goodput", "attainment"))


def with_interval(mean: float, half_width: float | None, scale: float = 1.0) -> str:
    """Return a mean with half its interval, in as many digits as tell something.

    Parameters
    ----------
    mean : float
        Finite.
    half_width : float or None
        None, zero or infinite: no interval is shown.
    scale : float
        Both are multiplied by it.

    Examples
    --------
    >>> with_interval(1234.567, 45.6), with_interval(0.12345, None), with_interval(7.0, None)
    ('1,235 ±46', '0.123', '7')
    """
    value = mean * scale
    half = half_width * scale if half_width is not None and math.isfinite(half_width) else 0.0
    # Two digits of the interval or three of the value, whichever are fewer.
    guide = max(10 * half, abs(value))
    whole = float(value).is_integer() and not half
    digits = 0 if whole or not guide else min(max(0, 2 - math.floor(math.log10(guide))), 4)
    text = f"{value:,.{digits}f}"
    return f"{text} ±{half:,.{digits}f}" if half else text
