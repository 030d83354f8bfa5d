"""The tables of a run: how their columns are typed, and what the codes in them mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Column = npt.NDArray[np.generic]
Columns = Mapping[str, Column]
Read = Callable[[int, int], Column]
"""Gives the rows of a column from one to another."""
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


BATCH_ROWS = 1_000_000
"""Of a table that may not fit in memory so many rows are held at a time."""


@runtime_checkable
class Batched(Protocol):
    """A table that is made or read when it is asked for, and can be in part."""

    @property
    def num_rows(self) -> int:
        """Return how many rows it has."""

    def rows(self, start: int, stop: int) -> Columns:
        """Return some rows of all columns."""


def batches(columns: Columns) -> Iterator[Columns]:
    """Yield a table some rows at a time, at least once.

    A table in memory comes at once, and any other in pieces of `BATCH_ROWS`: what is summed batch
    by batch is the same wherever the table lies.
    """
    if not isinstance(columns, Batched) or columns.num_rows <= BATCH_ROWS:
        yield columns
        return
    for start in range(0, columns.num_rows, BATCH_ROWS):
        yield columns.rows(start, min(start + BATCH_ROWS, columns.num_rows))


class LazyTable(Mapping[str, Column]):
    """A table whose columns are read when they are asked for, and not kept.

    Parameters
    ----------
    num_rows : int
        How many it has.
    readers : mapping of str to callable
        Reads some rows of a column.
    """

    def __init__(self, num_rows: int, readers: Mapping[str, Read]) -> None:
        self.num_rows = num_rows
        self._readers = dict(readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __getitem__(self, name: str) -> Column:
        """Return a whole column, shape (num_rows,).

        Raises
        ------
        KeyError
            If there is no such column.
        """
        return self._readers[name](0, self.num_rows)

    def rows(self, start: int, stop: int) -> Columns:
        """Return some rows of all columns."""
        return {name: read(start, stop) for name, read in self._readers.items()}

    def chosen(self, rows: Bools) -> LazyTable:
        """Return some rows, chosen by a mask; they are picked from a whole column."""

        def reader(name: str) -> Read:
            return lambda start, stop: self[name][rows][start:stop]

        return LazyTable(int(np.count_nonzero(rows)), {name: reader(name) for name in self})


def held(column: Column) -> Read:
    """Return what reads a column that is in memory."""
    return lambda start, stop: column[start:stop]


def with_columns(columns: Columns, added: Mapping[str, Read]) -> Columns:
    """Return a table with more columns, which are read where it is in memory."""
    if isinstance(columns, LazyTable):
        return LazyTable(columns.num_rows, {**columns._readers, **added})
    num_rows = len(next(iter(columns.values())))
    return {**columns, **{name: read(0, num_rows) for name, read in added.items()}}


def rows_of(columns: Columns, rows: Bools) -> Columns:
    """Return some rows of a table."""
    if isinstance(columns, LazyTable):
        return columns.chosen(rows)
    return {name: columns[name][rows] for name in columns}


def pairs(columns: Columns) -> Pairs:
    """Return the columns of a table of values and how often each occurs, as integers."""
    value, count = columns
    return whole_numbers(columns, value), whole_numbers(columns, count)


def whole_numbers(columns: Columns, name: str) -> Ints:
    """Return a column of integers as int64."""
    return columns[name].astype(np.int64, copy=False)
