"""Latencies of single requests: the one place that computes them."""

from __future__ import annotations

import numpy as np

from schedlab.sim.record.columns import Bools, Columns, Floats, completed, whole_numbers

_NS_PER_MS = 1e6


def seen_column(requests: Columns, what: str) -> str:
    """Return the column of when clients saw the ``first_token`` or the ``finish`` of requests.

    It is the engine's own where no front end stood in between.
    """
    return f"{what}_seen_ns" if f"{what}_seen_ns" in requests else f"{what}_ns"


class Latencies:
    """What each request of a run waited, in ms from its arrival; NaN if it was not completed.

    A latency is computed when it is asked for, and only the last one is kept: of ten million
    requests each takes 80 MB.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request: arrival_ns, first_scheduled_ns, first_token_ns, finish_ns,
        generated_tokens, status; and first_token_seen_ns, finish_seen_ns where a front end stood
        between clients and engine: then TTFT and E2EL are those that clients saw.
    measured : ndarray of bool, shape (requests,), optional
        Those that count; the others have no latency either.

    Notes
    -----
    The gaps between single tokens (ITL) are not one number a request: see
    `sim.record.log.RunLog.token_gaps`.
    """

    def __init__(self, requests: Columns, measured: Bools | None = None) -> None:
        self._requests = requests
        self._done = completed(requests) if measured is None else completed(requests) & measured
        self._kept: tuple[str, Floats] | None = None

    @property
    def ttft(self) -> Floats:
        """First token - arrival, shape (requests,)."""
        return self._until(seen_column(self._requests, "first_token"))

    @property
    def e2el(self) -> Floats:
        """Finish - arrival, shape (requests,)."""
        return self._until(seen_column(self._requests, "finish"))

    @property
    def queue_time(self) -> Floats:
        """First scheduled - arrival, shape (requests,)."""
        return self._until("first_scheduled_ns")

    @property
    def tpot(self) -> Floats:
        """(E2EL - TTFT) / (n - 1) for n output tokens, shape (requests,); NaN for n = 1 as well."""
        if self._kept is None or self._kept[0] != "tpot":
            found = self.e2el - self.ttft
            tokens = whole_numbers(self._requests, "generated_tokens")
            found /= np.maximum(tokens - 1, 1)
            found[tokens <= 1] = np.nan
            self._kept = "tpot", found
        return self._kept[1]

    @property
    def normalized_latency(self) -> Floats:
        """E2EL / n for n output tokens, shape (requests,)."""
        if self._kept is None or self._kept[0] != "normalized_latency":
            tokens = whole_numbers(self._requests, "generated_tokens")
            self._kept = "normalized_latency", self.e2el / np.maximum(tokens, 1)
        return self._kept[1]

    def _until(self, name: str) -> Floats:
        if self._kept is None or self._kept[0] != name:
            waited = whole_numbers(self._requests, name) - whole_numbers(
                self._requests, "arrival_ns"
            )
            waited_ms = waited / _NS_PER_MS
            waited_ms[~self._done] = np.nan
            self._kept = name, waited_ms
        return self._kept[1]
