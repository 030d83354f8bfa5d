"""How sure the means of one long run are, from its batches."""

from __future__ import annotations

import numpy as np

from schedlab.experiments.statistics import BatchMeans, batch_means
from schedlab.sim.result import RunResult

_AVERAGED = ("ttft", "tpot", "e2el", "queue_time")


def run_intervals(result: RunResult, num_batches: int = 20) -> dict[str, BatchMeans]:
    """Return the mean latencies of a run with intervals by batch means.

    Parameters
    ----------
    result : RunResult
        One run; cut its warm-up off with `measure`, or it is in the mean.
    num_batches : int
        Batches of successive arrivals.

    Returns
    -------
    dict
        mean_ttft_ms, mean_tpot_ms, mean_e2el_ms and mean_queue_time_ms of completed requests, as
        in `request_metrics` but for up to `num_batches` - 1 first ones that fill no batch.

    Raises
    ------
    SpecError
        If there are too few requests.
    """
    observed = result.observation()
    order = np.argsort(observed.requests["arrival_ns"], kind="stable")
    found = {}
    for name in _AVERAGED:
        values = getattr(observed.latencies, name)[order]
        found[f"mean_{name}_ms"] = batch_means(values[~np.isnan(values)], num_batches)
    return found
