"""How sure the means of one long run are, from its batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedlab.experiments.statistics import BatchMeans, batch_means
from schedlab.sim.metrics.fairness import measured_requests
from schedlab.sim.record.log import FINISHED, TRUNCATED
from schedlab.sim.record.result import RunResult


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
    rows = measured_requests(result)
    done = np.isin(rows["status"], (FINISHED, TRUNCATED))
    order = np.argsort(rows["arrival_ns"][done], kind="stable")

    def column(name: str) -> npt.NDArray[np.float64]:
        return rows[name][done][order].astype(np.float64)

    arrival, first, finish = column("arrival_ns"), column("first_token_ns"), column("finish_ns")
    tokens = column("generated_tokens")
    several = tokens > 1
    values = {
        "mean_ttft_ms": first - arrival,
        "mean_tpot_ms": ((finish - first) / np.maximum(tokens - 1, 1))[several],
        "mean_e2el_ms": finish - arrival,
        "mean_queue_time_ms": column("first_scheduled_ns") - arrival,
    }
    return {name: batch_means(value / 1e6, num_batches) for name, value in values.items()}
