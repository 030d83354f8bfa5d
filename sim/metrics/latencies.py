"""Latencies of single requests: the one place that computes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from schedlab.sim.record.columns import Columns, Floats, completed, whole_numbers

_NS_PER_MS = 1e6


class Latencies(NamedTuple):
    """What each request of a run waited, in ms from its arrival; NaN if it was not completed.

    Attributes
    ----------
    ttft : ndarray, shape (requests,)
        First token - arrival.
    tpot : ndarray, shape (requests,)
        (E2EL - TTFT) / (n - 1) for n output tokens; NaN for n = 1 as well.
    e2el : ndarray, shape (requests,)
        Finish - arrival.
    queue_time : ndarray, shape (requests,)
        First scheduled - arrival.
    normalized_latency : ndarray, shape (requests,)
        E2EL / n.
    """

    ttft: Floats
    tpot: Floats
    e2el: Floats
    queue_time: Floats
    normalized_latency: Floats


def latencies(requests: Columns) -> Latencies:
    """Return the latencies of every request, in the order of the table.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request: arrival_ns, first_scheduled_ns, first_token_ns, finish_ns,
        generated_tokens, status; and first_token_seen_ns, finish_seen_ns where a front end stood
        between clients and engine: then TTFT and E2EL are those that clients saw.

    Notes
    -----
    The gaps between single tokens (ITL) are not one number a request: see
    `sim.record.log.RunLog.token_gaps`.
    """
    done = completed(requests)
    arrival_ns = whole_numbers(requests, "arrival_ns")
    tokens = whole_numbers(requests, "generated_tokens")

    def until(name: str) -> Floats:
        waited_ms = (whole_numbers(requests, name) - arrival_ns) / _NS_PER_MS
        return np.where(done, waited_ms, np.nan)

    names = "first_token_ns", "finish_ns"
    if "finish_seen_ns" in requests:
        names = "first_token_seen_ns", "finish_seen_ns"
    ttft, e2el = map(until, names)
    tpot = np.where(tokens > 1, (e2el - ttft) / np.maximum(tokens - 1, 1), np.nan)
    per_token = e2el / np.maximum(tokens, 1)
    return Latencies(ttft, tpot, e2el, until("first_scheduled_ns"), per_token)
