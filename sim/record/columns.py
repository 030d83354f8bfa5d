"""The tables of a run: how their columns are typed, and what the codes in them mean."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Columns = Mapping[str, npt.NDArray[np.generic]]
Pairs = tuple[Ints, Ints]
"""Values, and how often each occurs."""

FINISHED, REJECTED, TRUNCATED = 0, 1, 3
"""Codes of the `status` column of requests; `TRUNCATED` was cut off by a length limit."""


def completed(requests: Columns) -> Bools:
    """Say of each request whether it got its answer: it finished, or a length limit ended it.

    Parameters
    ----------
    requests : mapping of str to ndarray
        One row a request, with a column `status`.
    """
    status = requests["status"]
    return np.asarray((status == FINISHED) | (status == TRUNCATED))


def rows_of(columns: Columns, rows: Bools) -> Columns:
    """Return some rows of a table."""
    return {name: columns[name][rows] for name in columns}


def whole_numbers(columns: Columns, name: str) -> Ints:
    """Return a column of integers as int64."""
    return columns[name].astype(np.int64, copy=False)
