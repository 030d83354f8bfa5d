"""Latencies of single requests: in one run, over replications, and against an empty server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedlab.sim.errors import SchedlabError, SpecError, nearest
from schedlab.sim.metrics.latencies import Latencies
from schedlab.sim.record.columns import Floats, whole_numbers

if TYPE_CHECKING:
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.sim.result import RunResult

LATENCIES = ("ttft", "tpot", "e2el", "queue_time")
_MS_PER_S = 1e3


def latencies_s(result: RunResult, latency: str) -> Floats:
    """Return a latency of every request.

    Parameters
    ----------
    result : RunResult
        A run.
    latency : {"ttft", "tpot", "e2el", "queue_time"}
        As in `schedlab.sim.metrics.latencies`.

    Returns
    -------
    ndarray, shape (requests,)
        Seconds, by id; NaN where there is none (rejected, one token and TPOT, not measured).

    Raises
    ------
    SpecError
        If there is no such latency.
    """
    if latency not in LATENCIES:
        raise SpecError(f"latency: no {latency!r}; {nearest(latency, LATENCIES)}")
    values: Floats = getattr(measured_latencies(result), latency)
    return values / _MS_PER_S


def measured_latencies(result: RunResult) -> Latencies:
    """Return all latencies in ms, by id; NaN as well for who arrived outside the run's window."""
    if result.window is None:
        return Latencies(result.requests)
    inside = result.window.holds(whole_numbers(result.requests, "arrival_ns"))
    return Latencies(result.requests, inside)


def spread(replications: Sequence[RunResult], latency: str = "e2el") -> Floats:
    """Return how much one request's latency varies from run to run: its unpredictability.

    Parameters
    ----------
    replications : sequence of RunResult
        At least two runs of the same requests in other traffic: a trace whose arrivals are drawn
        anew with another seed, or a predictor with other errors.
    latency : str
        As for `latencies_s`.

    Returns
    -------
    ndarray, shape (requests,)
        Coefficient of variation over the runs, ``s / mean`` with the sample standard deviation
        s; NaN where a request did not finish in every run.

    Raises
    ------
    SchedlabError
        If there is one run only, or requests differ in length between runs: then latencies
        differ because the work does.
    """
    if len(replications) < 2:
        raise SchedlabError("the spread of a request's latency needs at least 2 replications")
    first = replications[0].requests
    for run in replications[1:]:
        for name in ("prompt_tokens", "output_tokens"):
            if not np.array_equal(run.requests[name], first[name]):
                raise SchedlabError(
                    f"the replications do not serve the same requests ({name} differ): replay a "
                    "trace file, and let only its arrivals or the predictor vary with the seed"
                )
    values = np.stack([latencies_s(run, latency) for run in replications])
    return np.asarray(values.std(axis=0, ddof=1) / values.mean(axis=0))


def alone_s(spec: ExperimentSpec) -> Floats:
    """Return how long each request of an experiment takes on a server of its own.

    Parameters
    ----------
    spec : ExperimentSpec
        One point.

    Returns
    -------
    ndarray, shape (requests,)
        End-to-end latency in seconds, by id, with the same engine and cost model, policy fcfs,
        and one request at a time; NaN where a request cannot be served at all.
    """
    from schedlab.experiments.running.run import run
    from schedlab.experiments.specification.policy import PolicySpec

    workload = spec.workload.model_copy(update={"max_concurrency": 1})
    one_by_one = spec.model_copy(update={"workload": workload, "policy": PolicySpec(name="fcfs")})
    return latencies_s(run(one_by_one), "e2el")


def slowdowns(result: RunResult, alone: Floats) -> Floats:
    """Return how many times longer each request took than on a server of its own.

    Parameters
    ----------
    result : RunResult
        A run.
    alone : ndarray, shape (requests,)
        What `alone_s` gives for it.

    Returns
    -------
    ndarray, shape (requests,)
        ``E2EL / alone``, the slowdown of queueing theory; NaN where there is none.

    Raises
    ------
    ValueError
        If the run has another number of requests.
    """
    latency = latencies_s(result, "e2el")
    if latency.shape != alone.shape:
        raise ValueError(f"the run has {len(latency)} requests, alone_s {len(alone)}")
    return latency / alone
