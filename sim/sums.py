"""Sums of floats that are the same on every Python."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add


def in_order(values: Iterable[float]) -> float:
    """Return a sum that is added from left to right.

    `sum` does so up to Python 3.11; since 3.12 it compensates for what is rounded away.

    Examples
    --------
    >>> in_order([1e16, 1.0, -1e16])
    0.0
    """
    return reduce(add, values, 0.0)
