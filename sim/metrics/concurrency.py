"""The most that was under way at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from schedlab.sim.metrics.latencies import seen_column
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register
from schedlab.sim.record.columns import BATCH_ROWS, Ints, Pairs, whole_numbers

_NS_PER_S = 1_000_000_000


@register(better="higher", every_run=True)
def max_concurrent_requests(run: Observation) -> int:
    """Return the most completed requests that some second saw, however briefly.

    Of seconds from the first arrival on, as vLLM's client counts up to 0.32; `most_in_flight`,
    which its later sources have (009e6d4), is exact.
    """
    arrival_ns, finish_ns = _intervals(run)
    if not len(arrival_ns):
        return 0
    first_ns = arrival_ns[0]
    begins, ends = (arrival_ns - first_ns) // _NS_PER_S, (finish_ns - first_ns) // _NS_PER_S
    return _most_open(begins, ends + 1)


@register(better="neither")
def most_in_flight(run: Observation) -> int:
    """Return the most completed requests in flight at one instant.

    Over half-open intervals [arrival, finish): departures come before arrivals.
    """
    return _most_open(*_intervals(run))


def _intervals(run: Observation) -> tuple[Ints, Ints]:
    """Return when completed requests came and when they were answered, each in order."""
    arrival_ns = whole_numbers(run.requests, "arrival_ns")[run.completed]
    finish_ns = whole_numbers(run.requests, seen_column(run.requests, "finish"))[run.completed]
    return np.sort(arrival_ns), np.sort(finish_ns)


def _most_open(begins: Ints, ends: Ints) -> int:
    """Return the most half-open intervals that overlap, by their begins and ends in order."""
    most = 0
    for low in range(0, len(begins), BATCH_ROWS):
        here = begins[low : low + BATCH_ROWS]
        begun = np.arange(low + 1, low + len(here) + 1)
        most = max(most, int((begun - np.searchsorted(ends, here, side="right")).max()))
    return most


@register(unit="tokens/s", better="higher", label="most output tokens in a second", every_run=True)
def max_output_tokens_per_s(run: Observation) -> float:
    """Return the most pieces of streams that completed requests got in one of the seconds.

    Of seconds from the first arrival on, as vLLM's client counts: one for each step that gives a
    request tokens, however many. With drafts that is fewer than `most_output_tokens_per_s`.

    References
    ----------
    vllm/benchmarks/serve.py, ``calculate_metrics``: one token for the TTFT and one for each ITL.
    """
    return _most_in_a_second(run, run.piece_count_batches())


@register(unit="tokens/s", better="higher")
def most_output_tokens_per_s(run: Observation) -> float:
    """Return the most tokens of completed requests in one of the seconds from the first arrival."""
    return _most_in_a_second(run, run.token_count_batches(answered=True))


def _most_in_a_second(run: Observation, counts: Iterable[Pairs]) -> float:
    by_second: dict[int, int] = {}
    for times_ns, number in counts:
        seconds, place = np.unique(
            (times_ns - run.first_arrival_ns) // _NS_PER_S, return_inverse=True
        )
        sums = np.bincount(place, weights=number, minlength=len(seconds)).tolist()
        # Only the first of these seconds, and the last of those before, may be the same.
        for second, num_here in zip(seconds.tolist(), sums, strict=True):
            by_second[second] = by_second.get(second, 0) + num_here
    return float(max(by_second.values(), default=0))
