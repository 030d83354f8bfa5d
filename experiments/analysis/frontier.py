"""Pareto frontiers: which of several results no other one beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def on_frontier(values: npt.ArrayLike, larger_is_better: Sequence[bool]) -> npt.NDArray[np.bool_]:
    """Say which points are not dominated.

    Parameters
    ----------
    values : array_like, shape (points, objectives)
        Anything comparable within a column; units need not agree between columns.
    larger_is_better : sequence of bool
        One an objective.

    Returns
    -------
    ndarray of bool, shape (points,)
        A point is dominated if another is at least as good in every objective and better in one.
        Equal points do not dominate each other, so all of them stay. A point with a NaN is not
        on the frontier and dominates nothing.

    Raises
    ------
    ValueError
        If the shapes do not agree.

    Examples
    --------
    >>> on_frontier([[1.0, 9.0], [2.0, 9.0], [3.0, 20.0], [2.5, 30.0]], [True, False]).tolist()
    [False, True, True, False]
    """
    points = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if points.ndim != 2 or points.shape[1] != len(larger_is_better):
        raise ValueError(
            f"values of shape {points.shape} do not have {len(larger_is_better)} objectives"
        )
    costs = np.where(np.asarray(larger_is_better), -points, points)
    known = np.asarray(~np.isnan(costs).any(axis=1))
    found: npt.NDArray[np.bool_] = known.copy()
    for i in np.flatnonzero(known):
        no_worse = (costs[known] <= costs[i]).all(axis=1)
        found[i] = not (costs[known][no_worse] < costs[i]).any()
    return found
