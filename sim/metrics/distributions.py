"""How latencies are distributed: means, percentiles, and what lies beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.metrics.weighted import WeightedSample, ratio
from schedlab.sim.record.columns import Floats

Latency = Literal["ttft", "tpot", "e2el", "queue_time", "normalized_latency", "itl"]

PERCENTILES = (50, 90, 95, 99)

_NS_PER_MS = 1e6
_LABELS = {
    "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL", "queue_time": "queue time",
    "normalized_latency": "latency per token", "itl": "ITL",
}  # fmt: skip
_WORDS = {
    "ttft": "first token - arrival",
    "tpot": "(E2EL - TTFT) / (n - 1), of requests with n > 1 output tokens",
    "e2el": "finish - arrival",
    "queue_time": "first scheduled - arrival",
    "normalized_latency": 'E2EL / n, the "normalized latency" of the Orca and vLLM papers',
    "itl": "all gaps between successive tokens of completed requests, in one list",
}
_STATISTICS = {
    "mean": "mean", "median": "median", "std": "std of",
    **{f"p{percent}": f"P{percent}" for percent in PERCENTILES},
}  # fmt: skip


def _statistic(statistic: str, latency: Latency) -> None:
    def of(run: Observation) -> float:
        return _of(run, statistic, latency)

    of.__doc__ = f"Return the {_STATISTICS[statistic]} {_LABELS[latency]}: {_WORDS[latency]}."
    register(
        f"{statistic}_{latency}_ms",
        label=f"{_STATISTICS[statistic]} {_LABELS[latency]}",
        every_run=True,
    )(of)


for _latency in _LABELS:
    for _name in _STATISTICS:
        _statistic(_name, _latency)  # type: ignore[arg-type]


@register(label="largest", unit="ms")
def largest(run: Observation, latency: Latency) -> float:
    """Return the largest latency of any completed request, in ms.

    Of itl it is the longest stall between two tokens.
    """
    if latency == "itl":
        gaps_ns, counts = run.token_gaps
        values = gaps_ns[counts > 0] / _NS_PER_MS
    else:
        values = _values(run, latency)
    return float(values.max()) if len(values) else float("nan")


@register()
def tail_ratio(run: Observation, latency: Latency) -> float:
    """Return the 99th percentile of a latency over its median."""
    return ratio(_of(run, "p99", latency), _of(run, "median", latency))


@register()
def worst_ratio(run: Observation, latency: Latency) -> float:
    """Return the largest latency over the median: how far the worst stands out.

    Of itl it is the longest stall over the usual gap.
    """
    return ratio(largest(run, latency), _of(run, "median", latency))


@register(unit="s")
def mean_max_waiting(run: Observation) -> float:
    """Return the mean over completed requests of max(TTFT, longest gap between tokens), in s.

    It is the `max_waiting_time` of Fu et al. (NeurIPS 2024), section 4.
    """
    arrival_ns = run.requests["arrival_ns"][run.completed].astype(np.int64)
    numbers = run.requests["id"][run.completed].tolist()
    longest_ns = [
        int(np.diff(run.token_times(number), prepend=since_ns).max())
        for number, since_ns in zip(numbers, arrival_ns.tolist(), strict=True)
    ]
    return float(np.mean(longest_ns)) / 1e9 if longest_ns else float("nan")


def _of(run: Observation, statistic: str, latency: Latency) -> float:
    if latency not in run.statistics:  # all at once: to find one percentile costs as much as four
        pooled = latency == "itl"
        run.statistics[latency] = (
            _of_pairs(run.gap_sample) if pooled else _of_values(_values(run, latency))
        )
    return run.statistics[latency][statistic]


def _values(run: Observation, latency: str) -> Floats:
    """Return a latency in ms of each request that has it."""
    values: Floats = getattr(run.latencies, latency)
    return values[~np.isnan(values)]


def _of_values(values: Floats) -> dict[str, float]:
    if not len(values):
        return dict.fromkeys(_STATISTICS, float("nan"))
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "std": float(np.std(values)),
        **_named(np.percentile(values, PERCENTILES).tolist()),
    }


def _of_pairs(sample: WeightedSample) -> dict[str, float]:
    return {
        "mean": sample.mean(),
        "median": sample.median(),
        "std": sample.std(),
        **_named(sample.percentiles(PERCENTILES)),
    }


def _named(percentiles: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)}
