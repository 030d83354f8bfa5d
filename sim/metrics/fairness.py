"""How evenly requests, or classes of them, are served, and who waits longest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.latencies import seen_column
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import register


@register(better="higher", label="Jain's index")
def jain_fairness(run: Observation, column: str | None = None) -> float:
    """Return Jain's index of the speeds of requests, or of the classes in a column.

    The speed of a request is its output tokens over the time from arrival to finish, so that long
    answers may take longer; it is 0 if it was rejected. The speed of a class is the mean of its
    requests'. 1 is even, 1/n is all for one.
    """
    rows = run.requests
    finish_ns = rows[seen_column(rows, "finish")]
    stay_ns = finish_ns.astype(np.float64) - rows["arrival_ns"].astype(np.float64)
    tokens = rows["generated_tokens"].astype(np.float64)
    speed = np.where(run.completed, tokens / np.maximum(stay_ns, 1.0), 0.0)
    if column is None:
        return jain_index(speed)
    if column not in rows:
        raise SpecError(f"column: no {column!r}; {nearest(column, rows)}")
    classes, place = np.unique(rows[column], return_inverse=True)  # NaN is one, too
    return jain_index([speed[place == i].mean() for i in range(len(classes))])


@register(unit="s")
def longest_wait(run: Observation) -> float:
    """Return the longest time to be scheduled, in s, of completed requests.

    A policy that starves someone shows here, while percentiles hide it.
    """
    waits_ms = run.latencies.queue_time[run.completed]
    return float(waits_ms.max()) / 1e3 if len(waits_ms) else float("nan")


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
