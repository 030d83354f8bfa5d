"""How evenly requests, or classes of them, are served, and who waits longest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.latencies import latencies
from schedlab.sim.metrics.window import arrived_inside
from schedlab.sim.record.columns import Columns, completed

if TYPE_CHECKING:
    from schedlab.sim.result import RunResult


def jain_index(shares: npt.ArrayLike) -> float:
    r"""Return Jain's fairness index of some shares.

    Parameters
    ----------
    shares : array_like of float, shape (n,)
        What each gets, >= 0.

    Returns
    -------
    float
        :math:`(\sum x_i)^2 / (n \sum x_i^2)`: 1 if all get the same, 1/n if one gets everything,
        k/n if k of n share equally. NaN if nobody gets anything.

    References
    ----------
    Jain, Chiu, Hawe, DEC-TR-301, 1984.

    Examples
    --------
    >>> jain_index([1.0, 1.0, 0.0, 0.0])
    0.5
    """
    x = np.asarray(shares, dtype=np.float64)
    below = len(x) * float(np.sum(x**2))
    return float(np.sum(x)) ** 2 / below if below > 0 else float("nan")


def jain_fairness(result: RunResult, column: str | None = None) -> float:
    """Return how evenly fast requests, or classes of them, are served.

    Parameters
    ----------
    result : RunResult
        A run.
    column : str, optional
        Column of the request table that tells classes apart, e.g. ``priority``; the speed of a
        class is the mean of its requests'. Every request is its own class if absent.

    Returns
    -------
    float
        `jain_index` of the speeds. The speed of a request is its output tokens over the time from
        arrival to finish, so that long answers may take longer; it is 0 if it did not finish.

    Raises
    ------
    SpecError
        If there is no such column.
    """
    rows = measured_requests(result)
    stay = rows["finish_ns"].astype(np.float64) - rows["arrival_ns"].astype(np.float64)
    tokens = rows["generated_tokens"].astype(np.float64)
    speed = np.where(completed(rows), tokens / np.maximum(stay, 1.0), 0.0)
    if column is None:
        return jain_index(speed)
    if column not in rows:
        raise SpecError(f"column: no {column!r}; {nearest(column, rows)}")
    return jain_index([speed[rows[column] == value].mean() for value in np.unique(rows[column])])


def longest_wait(result: RunResult) -> float:
    """Return the longest time that a request waited to be scheduled, in seconds.

    Parameters
    ----------
    result : RunResult
        A run.

    Returns
    -------
    float
        Over the completed requests: a policy that starves someone shows here, while percentiles
        hide it. NaN without any.
    """
    return longest_wait_of(measured_requests(result))


def longest_wait_of(rows: Columns) -> float:
    """Return the same of some requests."""
    waits_ms = latencies(rows).queue_time[completed(rows)]
    return float(waits_ms.max()) / 1e3 if len(waits_ms) else float("nan")


def measured_requests(result: RunResult) -> Columns:
    """Return the requests that the metrics of a run are of."""
    if result.window is None:
        return result.requests
    return arrived_inside(result.requests, result.window)
