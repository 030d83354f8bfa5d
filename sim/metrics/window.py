"""The part of a run that is measured: after warm-up, before the arrivals end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.metrics import Metrics, request_metrics, step_metrics
from schedlab.sim.record.columns import Bools, Columns, Ints, Pairs, rows_of, whole_numbers
from schedlab.sim.record.log import RunLog

_NS_PER_S = 1_000_000_000


class Window(NamedTuple):
    """A span of a run, half-open.

    Attributes
    ----------
    begin_ns, end_ns : int
        On the run's clock.
    """

    begin_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S

    def holds(self, times_ns: Ints) -> Bools:
        """Say of each time whether it lies inside."""
        return np.asarray((times_ns >= self.begin_ns) & (times_ns < self.end_ns))


def measured_window(
    requests: Columns,
    *,
    warm_up_s: float | None = None,
    warm_up_requests: int | None = None,
    cool_down_s: float | None = None,
) -> Window:
    """Return the part of a run that is left when its ends are cut off.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request: arrival_ns, finish_ns (-1 = never).
    warm_up_s : float, optional
        The window begins so long after the first arrival.
    warm_up_requests : int, optional
        Instead, it begins with the arrival that so many came before.
    cool_down_s : float, optional
        The window ends so long before the last arrival; if absent with the run.

    Returns
    -------
    Window
        From the first to the last of what is measured.

    Raises
    ------
    SpecError
        If no request arrives inside.
    """
    arrival = np.sort(requests["arrival_ns"].astype(np.int64))
    if not len(arrival):
        raise SpecError("measure: there are no requests")
    first, last = int(arrival[0]), int(arrival[-1])
    begin = first + round((warm_up_s or 0.0) * _NS_PER_S)
    if warm_up_requests is not None:
        if warm_up_requests >= len(arrival):
            raise SpecError(
                f"measure.warm_up_requests: {warm_up_requests} of {len(arrival)} requests leaves "
                "nothing to measure"
            )
        begin = int(arrival[warm_up_requests])
    end = max(int(requests["finish_ns"].max()), last) + 1
    if cool_down_s is not None:
        end = last - round(cool_down_s * _NS_PER_S)
    window = Window(begin, end)
    if not window.holds(arrival).any():
        raise SpecError(
            f"measure: nothing is left: requests arrive for {(last - first) / _NS_PER_S:g} s only, "
            f"and what is measured would begin at {(begin - first) / _NS_PER_S:g} s and end at "
            f"{(end - first) / _NS_PER_S:g} s"
        )
    return window


def window_metrics(
    requests: Columns,
    steps: Columns,
    token_gaps: Pairs,
    token_counts: Pairs,
    window: Window,
    kv_capacity_tokens: int,
) -> Metrics:
    """Measure a part of a run.

    Parameters
    ----------
    requests, steps : mapping of str to ndarray
        Of the whole run, as `request_metrics` and `step_metrics` take them.
    token_gaps : (ndarray, ndarray)
        As `request_metrics` takes them, of the requests that arrive inside alone (`WindowLog`).
    token_counts : (ndarray, ndarray)
        Of the whole run.
    window : Window
        The part.
    kv_capacity_tokens : int
        Size of the KV cache.

    Returns
    -------
    dict
        The metrics of `request_metrics` and `step_metrics`.

    Notes
    -----
    Counts, latencies and attainments are of the requests that arrive inside, however long they
    stay. Rates are what happens inside over its length: requests that finish (whenever they
    arrived), good ones among them, and tokens that come out. So a steady system shows its steady
    rate; requests cut off at one end make up for those at the other. Step metrics are of the
    steps that start inside.
    """
    times, counts = token_counts
    inside = window.holds(times)
    metrics = request_metrics(
        arrived_inside(requests, window), token_gaps, (times[inside], counts[inside])
    )
    left = request_metrics(rows_of(requests, window.holds(whole_numbers(requests, "finish_ns"))))
    seconds = window.duration_s
    tokens = int(counts[inside].sum())
    metrics |= {
        "duration_s": seconds,
        "request_throughput": left["completed"] / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (left["total_input_tokens"] + tokens) / seconds,
        "request_goodput": left["num_slo_met"] / seconds
        if metrics["num_with_slo"]
        else float("nan"),
    }
    inside = window.holds(whole_numbers(steps, "start_ns"))
    return metrics | step_metrics(rows_of(steps, inside), kv_capacity_tokens)


def arrived_inside(requests: Columns, window: Window) -> Columns:
    """Return the rows of the requests that arrive inside a window."""
    return rows_of(requests, window.holds(whole_numbers(requests, "arrival_ns")))


class WindowLog:
    """A log whose token gaps are those of the requests that arrive in a window, and no others.

    Parameters
    ----------
    log : RunLog
        The log of the whole run, in memory.
    requests : mapping of str to ndarray
        Its requests.
    window : Window
        The part that is measured.
    """

    def __init__(self, log: RunLog, requests: Columns, window: Window) -> None:
        self._log = log
        self._ids = whole_numbers(arrived_inside(requests, window), "id")

    def steps(self) -> Columns:
        """Return one row a step, of the whole run."""
        return self._log.steps()

    def preemptions(self) -> Columns:
        """Return one row a preemption, of the whole run."""
        return self._log.preemptions()

    def token_gaps(self) -> Pairs:
        """Return the gaps of measured requests, as (gap in ns, how many)."""
        return self._log.token_gaps(self._ids)

    def token_counts(self) -> Pairs:
        """Return (time in ns, tokens that came out then), of the whole run."""
        return self._log.token_counts()

    def token_times(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns."""
        return self._log.token_times(request_id)
