"""Tables of numbers that outgrow memory: rows are moved to a temporary file as they come."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.record.columns import Ints, LazyTable, Read

Matrix = npt.NDArray[Any]
"""Rows and columns of numbers of one type."""

_MOST_ORDERED_NUMBERS = 4_000_000
"""A table of so many, 8 bytes each, is put into another order in memory, and else in a file."""


class SpoolFile:
    """A temporary file that several tables write to, each behind what is there.

    It has no name: it is gone with the last of them, however the process ends. It lies where
    Python's `tempfile` puts it, so that TMPDIR says where.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def open(self) -> IO[bytes]:
        """Return it; it is made when it is asked for first."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this
        return self._file

    def write(self, numbers: Matrix) -> None:
        """Write numbers where it stands, all of them.

        Raises
        ------
        OSError
            If there is no room for them.
        """
        # A disk that is nearly full takes a part, and Linux no more than 2 GiB at once.
        rest = np.ascontiguousarray(numbers).data.cast("B")
        while rest:
            rest = rest[self.open().write(rest) :]

    def read(self, place: int, numbers: Matrix) -> None:
        """Fill `numbers` with what lies at a place.

        Raises
        ------
        OSError
            If there is less of it.
        """
        self.open().seek(place)
        rest = numbers.data.cast("B")
        while rest:
            num_bytes = self.open().readinto(rest)  # type: ignore[attr-defined]
            if not num_bytes:
                raise OSError("a temporary file of this run was cut short")
            rest = rest[num_bytes:]


class Spool:
    """A table of which pieces of rows lie in a temporary file, and perhaps the last in memory.

    Parameters
    ----------
    num_columns : int
        Numbers in a row.
    dtype : data type
        Of all of them; 8 bytes.
    file : SpoolFile, optional
        Where they lie; one of its own, if not given.
    """

    def __init__(
        self, num_columns: int, dtype: npt.DTypeLike = np.int64, file: SpoolFile | None = None
    ) -> None:
        self.num_columns = num_columns
        self.dtype = np.dtype(dtype)
        self.num_rows = 0
        self._file = SpoolFile() if file is None else file
        self._pieces: list[int | Matrix] = []
        """Where in the file a piece begins, or the piece."""
        self._firsts: list[int] = []
        """The first row of each piece."""

    def append(self, rows: Matrix) -> None:
        """Write rows to the file, behind those that are there.

        Parameters
        ----------
        rows : ndarray, shape (n, num_columns)
            They are stored column by column, so that one is read without the others.
        """
        if len(rows):
            start = self._write(len(rows))
            self._file.write(np.asarray(rows.T, dtype=self.dtype))
            self._pieces.append(start)

    def followed_by(self, rows: Matrix) -> Spool:
        """Return the same table with more rows, which stay in memory."""
        whole = Spool(self.num_columns, self.dtype, self._file)
        whole._pieces, whole._firsts = [*self._pieces, rows], [*self._firsts, self.num_rows]
        whole.num_rows = self.num_rows + len(rows)
        return whole

    def column(self, index: int, start: int = 0, stop: int | None = None) -> Matrix:
        """Return a column, or some rows of it, shape (stop - start,)."""
        parts = list(self._parts(index, start, self.num_rows if stop is None else stop))
        return parts[0] if len(parts) == 1 else np.concatenate([self._empty(0), *parts])

    def rows(self, start: int, stop: int) -> Matrix:
        """Return some rows, shape (stop - start, num_columns)."""
        first = bisect_right(self._firsts, start) - 1
        if self._pieces and not isinstance(self._pieces[first], int):  # all of them in memory
            piece = self._pieces[first]
            assert not isinstance(piece, int)
            return piece[start - self._firsts[first] : stop - self._firsts[first]]
        found = np.empty((self.num_columns, stop - start), dtype=self.dtype)
        for index in range(self.num_columns):
            found[index] = self.column(index, start, stop)
        return found.T

    def take(self, index: int, rows: Ints) -> Matrix:
        """Return a column at some rows, in their order; a piece of it is in memory at a time."""
        found = self._empty(len(rows))
        piece_of = np.searchsorted(self._firsts, rows, side="right") - 1
        for piece in np.unique(piece_of).tolist():
            here = piece_of == piece
            first = self._firsts[piece]
            found[here] = self.column(index, first, self._end(piece))[rows[here] - first]
        return found

    def in_order(self, order: Ints) -> Spool:
        """Return a table of these rows in this order; of a long one a column is held at a time."""
        ordered = Spool(self.num_columns, self.dtype)
        if len(order) * self.num_columns <= _MOST_ORDERED_NUMBERS:
            whole = [self.column(index)[order] for index in range(self.num_columns)]
            return ordered.followed_by(np.array(whole, dtype=self.dtype).T)
        start = ordered._write(len(order))
        for index in range(self.num_columns):
            ordered._file.write(self.column(index)[order])
        ordered._pieces.append(start)
        return ordered

    def batches(self, num_rows: int) -> Iterator[Matrix]:
        """Yield the rows, so many at a time."""
        for start in range(0, self.num_rows, num_rows):
            yield self.rows(start, min(start + num_rows, self.num_rows))

    def readers(self, names: Sequence[str]) -> dict[str, Read]:
        """Return what reads its columns, under their names."""

        def reader(index: int) -> Read:
            return lambda start, stop: self.column(index, start, stop)

        return {name: reader(i) for i, name in enumerate(names)}

    def table(self, names: Sequence[str]) -> LazyTable:
        """Return it as a table with names for its columns."""
        return LazyTable(self.num_rows, self.readers(names))

    def _parts(self, index: int, start: int, stop: int) -> Iterator[Matrix]:
        piece = max(bisect_right(self._firsts, start) - 1, 0)
        while start < stop:
            first, end = self._firsts[piece], min(stop, self._end(piece))
            yield self._read(piece, index, start - first, end - first)
            start, piece = end, piece + 1

    def _read(self, piece: int, index: int, low: int, high: int) -> Matrix:
        place = self._pieces[piece]
        if not isinstance(place, int):
            return place[low:high, index]
        num_rows = self._end(piece) - self._firsts[piece]
        found = self._empty(high - low)
        self._file.read(place + (index * num_rows + low) * self.dtype.itemsize, found)
        return found

    def _write(self, num_rows: int) -> int:
        """Make ready to write a piece; return where it begins."""
        assert all(isinstance(piece, int) for piece in self._pieces)
        start = self._file.open().seek(0, 2)
        self._firsts.append(self.num_rows)
        self.num_rows += num_rows
        return start

    def _end(self, piece: int) -> int:
        return self._firsts[piece + 1] if piece + 1 < len(self._firsts) else self.num_rows

    def _empty(self, num_rows: int) -> Matrix:
        return np.empty(num_rows, dtype=self.dtype)
