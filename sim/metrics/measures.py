"""Measures of a run that take parameters, or that need more of its log than the metrics do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.deadlines import deadline_misses
from schedlab.sim.metrics.fairness import jain_fairness, longest_wait
from schedlab.sim.metrics.metrics import request_metrics
from schedlab.sim.metrics.predictability import explained_by_lengths
from schedlab.sim.metrics.tenant_service import service_gap
from schedlab.sim.record.columns import completed

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult

_NAN = float("nan")
_LATENCIES = ("ttft", "tpot", "itl", "e2el", "queue_time", "normalized_latency")

Int64 = npt.NDArray[np.int64]


def finished_within(result: RunResult, seconds: float) -> float:
    """Count the requests that finished at most so long after the first arrival.

    Parameters
    ----------
    result : RunResult
        A run.
    seconds : float
        Length of the window.

    Returns
    -------
    float
        Requests with ``finish - first arrival <= seconds``.
    """
    finish_s = _finishes(result)
    return float(np.count_nonzero(finish_s <= seconds))


def tokens_within(result: RunResult, seconds: float) -> float:
    """Count the output tokens that came out at most so long after the first arrival.

    Parameters
    ----------
    result : RunResult
        A run.
    seconds : float
        Length of the window.

    Returns
    -------
    float
        Tokens, those of requests that finish later included.
    """
    times_ns, counts = result.log.token_counts()
    limit_ns = int(result.requests["arrival_ns"].min()) + round(seconds * 1e9)
    return float(counts[times_ns <= limit_ns].sum())


def time_to_finish(result: RunResult, num_requests: int) -> float:
    """Return when the n-th request finished, in seconds from the first arrival.

    Parameters
    ----------
    result : RunResult
        A run.
    num_requests : int
        n, counted from 1; which requests does not matter.

    Returns
    -------
    float
        Seconds; NaN if fewer finished.
    """
    finish_s = _finishes(result)
    if not 1 <= num_requests <= len(finish_s):
        return _NAN
    return float(np.sort(finish_s)[num_requests - 1])


def largest(result: RunResult, latency: str) -> float:
    """Return the largest latency of any completed request, in ms.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : str
        ttft, tpot, itl, e2el, queue_time or normalized_latency, as in `request_metrics`. Of itl
        it is the longest stall between two tokens.

    Raises
    ------
    SpecError
        If there is no such latency.
    """
    if latency not in _LATENCIES:
        raise SpecError(f"latency: no {latency!r}; {nearest(latency, _LATENCIES)}")
    if latency == "itl":
        gaps, counts = result.log.token_gaps()
        gaps = gaps[counts > 0]
        return float(gaps.max()) / 1e6 if len(gaps) else _NAN
    rows = _completed(result)
    arrival, tokens = rows["arrival_ns"], rows["generated_tokens"]
    ttft, e2el = rows["first_token_ns"] - arrival, rows["finish_ns"] - arrival
    values: npt.NDArray[np.float64] = {
        "ttft": ttft.astype(np.float64),
        "e2el": e2el.astype(np.float64),
        "queue_time": (rows["first_scheduled_ns"] - arrival).astype(np.float64),
        "normalized_latency": e2el / np.maximum(tokens, 1),
        "tpot": ((e2el - ttft) / np.maximum(tokens - 1, 1))[tokens > 1],
    }[latency]
    return float(values.max()) / 1e6 if len(values) else _NAN


def tail_ratio(result: RunResult, latency: str) -> float:
    """Return the 99th percentile of a latency over its median.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : str
        As in `largest`; `tpot` is the mean of each request, `itl` every single gap.

    Raises
    ------
    SpecError
        If there is no such latency.
    """
    if latency not in _LATENCIES:
        raise SpecError(f"latency: no {latency!r}; {nearest(latency, _LATENCIES)}")
    metrics = result.metrics()
    return _ratio(metrics[f"p99_{latency}_ms"], metrics[f"median_{latency}_ms"])


def worst_ratio(result: RunResult, latency: str) -> float:
    """Return the largest latency over the median: how far a step stands out at worst.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : str
        As in `largest`; of `itl` the longest stall over the usual gap.

    Raises
    ------
    SpecError
        If there is no such latency.
    """
    return _ratio(largest(result, latency), result.metrics()[f"median_{latency}_ms"])


def mean_max_waiting(result: RunResult) -> float:
    """Return how long a request waits for a token at worst, on average, in seconds.

    Parameters
    ----------
    result : RunResult
        A run with its log in memory.

    Returns
    -------
    float
        Mean over completed requests of ``max(TTFT, longest gap between tokens)``, the
        `max_waiting_time` of Fu et al. (NeurIPS 2024), section 4.
    """
    rows = _completed(result)
    longest = rows["first_token_ns"] - rows["arrival_ns"]
    for i, request_id in enumerate(rows["id"].tolist()):
        times = result.log.token_times(request_id)
        if len(times) > 1:
            longest[i] = max(longest[i], np.diff(times).max())
    return float(longest.mean()) / 1e9 if len(longest) else _NAN


def stall_free_goodput(result: RunResult, ttft_ms: float, stall_ms: float) -> float:
    """Return the requests a second that start in time and never stall for long.

    Parameters
    ----------
    result : RunResult
        A run with its log in memory.
    ttft_ms, stall_ms : float
        Most time to the first token, and most between any two tokens.

    Returns
    -------
    float
        Completed requests that hold both, over the run's duration: the service level agreement
        of Gong et al. (ASPLOS 2025), on TTFT and the maximal time per token (MTPOT).
    """
    rows = _completed(result)
    good = 0
    for arrival, request_id in zip(rows["arrival_ns"].tolist(), rows["id"].tolist(), strict=True):
        times = result.log.token_times(request_id)
        waits = np.diff(times, prepend=arrival) / 1e6
        good += bool(waits[0] <= ttft_ms and (waits[1:] <= stall_ms).all())
    return _ratio(float(good), result.metrics()["duration_s"])


def slot_utilization(result: RunResult, slots: int) -> float:
    """Return the share of batch slots that gave a token, over the steps that gave any.

    Parameters
    ----------
    result : RunResult
        A run.
    slots : int
        Slots of the batch.

    Returns
    -------
    float
        ``tokens / (slots * steps with tokens)``. For a sealed batch that is computed in one
        prefill, the sum of its output lengths over ``slots`` times the longest.
    """
    _, counts = result.log.token_counts()
    return _ratio(float(counts.sum()), float(slots * len(counts)))


def kv_waste(result: RunResult) -> float:
    """Return the share of KV memory held by requests in which no token lies, over busy time.

    Parameters
    ----------
    result : RunResult
        A run.

    Returns
    -------
    float
        ``1 - resident / held``: what is reserved for later, reserved for nothing, or the tail of
        a last block. Memory that nobody holds is not in it.
    """
    metrics = result.metrics()
    return 1.0 - _ratio(metrics["kv_utilization"], metrics["kv_allocated_share"])


def preempted_share(result: RunResult) -> float:
    """Return the share of requests that were preempted at least once.

    Parameters
    ----------
    result : RunResult
        A run.
    """
    metrics = result.metrics()
    return _ratio(metrics["num_preempted_requests"], metrics["num_requests"])


def preemption_loss_at_tail(result: RunResult, latency: str = "tpot") -> float:
    """Return the share of their decode time that the slowest hundredth spent preempted.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : str
        `tpot` or `e2el`: what makes a request slow.

    Returns
    -------
    float
        Time from eviction to resumption over time from first token to finish, summed over the
        completed requests at or above the 99th percentile. Recomputation after the resumption
        is not in it.

    Raises
    ------
    SpecError
        If the latency is another.
    """
    if latency not in ("tpot", "e2el"):
        raise SpecError(f"latency: must be tpot or e2el, got {latency!r}")
    rows = _completed(result)
    decode = (rows["finish_ns"] - rows["first_token_ns"]).astype(np.float64)
    slow = decode / np.maximum(rows["generated_tokens"] - 1, 1)
    if latency == "e2el":
        slow = (rows["finish_ns"] - rows["arrival_ns"]).astype(np.float64)
    if not len(slow):
        return _NAN
    tail = slow >= np.percentile(slow, 99)
    lost = result.log.preemptions()
    in_tail = np.isin(lost["id"], rows["id"][tail])
    away_ns = lost["resumed_ns"].astype(np.int64) - lost["evicted_ns"].astype(np.int64)
    away = float(away_ns[in_tail].sum())
    return _ratio(away, float(decode[tail].sum()))


def queue_growth(result: RunResult) -> float:
    """Return by how many requests a second the queue grows while requests arrive.

    Parameters
    ----------
    result : RunResult
        A run.

    Returns
    -------
    float
        Slope of the least-squares line through (step start, waiting requests), over the steps
        of the second half of the arrivals: near 0 in a stable system, rate minus capacity in an
        overloaded one.
    """
    steps = result.log.steps()
    arrival = result.requests["arrival_ns"].astype(np.int64)
    start, end = steps["start_ns"].astype(np.int64), steps["end_ns"].astype(np.int64)
    window = (start >= np.median(arrival)) & (start <= arrival.max())
    if np.count_nonzero(window) < 2:
        return _NAN
    seconds = (start[window] - start[window][0]) / 1e9
    if not seconds[-1]:
        return _NAN
    # Steps are dense where they are short: each counts for the time it took.
    weight = (end - start)[window].astype(np.float64)
    waiting = steps["num_waiting"][window].astype(np.float64)
    centred = seconds - np.average(seconds, weights=weight)
    return float((weight * centred * waiting).sum() / (weight * centred * centred).sum())


def of_class(
    result: RunResult,
    metric: str,
    column: str,
    low: float = -np.inf,
    high: float = np.inf,
) -> float:
    """Return a request metric of some requests only, e.g. those of one priority.

    Parameters
    ----------
    result : RunResult
        A run.
    metric : str
        A metric of `request_metrics`, but those of single tokens.
    column : str
        Column of the request table that tells the class: priority, prompt_tokens, ...
    low, high : float
        Requests with ``low <= column <= high`` are in it.

    Raises
    ------
    SpecError
        If there is no such metric or column.
    """
    if column not in result.requests:
        raise SpecError(f"column: no {column!r}; {nearest(column, result.requests)}")
    values = result.requests[column].astype(np.float64)
    rows = (values >= low) & (values <= high)
    metrics = request_metrics({name: data[rows] for name, data in result.requests.items()})
    if metric not in metrics:
        raise SpecError(f"metric: no {metric!r} of a class; {nearest(metric, metrics)}")
    return float(metrics[metric])


MEASURES: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        finished_within, tokens_within, time_to_finish, largest, tail_ratio, worst_ratio,
        mean_max_waiting, stall_free_goodput, slot_utilization, kv_waste, preempted_share,
        preemption_loss_at_tail, queue_growth, deadline_misses, of_class, service_gap,
        explained_by_lengths, jain_fairness, longest_wait,
    )
}  # fmt: skip
"""Measures by name; each takes a run and its parameters."""


def _completed(result: RunResult) -> dict[str, Int64]:
    done = completed(result.requests)
    names = (
        "id", "arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns",
        "generated_tokens",
    )  # fmt: skip
    return {name: result.requests[name][done].astype(np.int64) for name in names}


def _finishes(result: RunResult) -> npt.NDArray[np.float64]:
    """Return when completed requests finished, in seconds from the first arrival."""
    start = int(result.requests["arrival_ns"].min()) if len(result.requests["arrival_ns"]) else 0
    finish = _completed(result)["finish_ns"]
    return np.asarray((finish - start) / 1e9)


def _ratio(amount: float, per: float) -> float:
    return amount / per if per > 0 else _NAN
