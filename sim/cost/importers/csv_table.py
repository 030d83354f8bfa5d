"""CSV files of other projects' profiles: columns by name, errors that name file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from schedlab.sim.errors import SpecError, nearest


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file in columns of text.

    Attributes
    ----------
    path : Path
        Where it was read from.
    columns : dict of str to list of str
        By name, in the order of the file.
    """

    path: Path
    columns: dict[str, list[str]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def text(self, name: str) -> list[str]:
        """Return a column; raises `SpecError` if there is none of that name."""
        if name not in self.columns:
            raise SpecError(f"{self.path}: no column {name!r}; {nearest(name, self.columns)}")
        return self.columns[name]

    def numbers(
        self, name: str, *, allow_nan: bool = False, least: float = -math.inf
    ) -> list[float]:
        """Return a column of numbers; raises `SpecError` naming the line that has none, or less."""
        values = []
        for line, cell in enumerate(self.text(name), start=2):
            try:
                value = float(cell)
            except ValueError:
                value = math.inf
            if math.isinf(value) or (math.isnan(value) and not allow_nan):
                raise SpecError(f"{self.path}:{line}: {name} must be a number, got {cell!r}")
            if value < least:
                raise SpecError(
                    f"{self.path}:{line}: {name} must be at least {least:g}, got {cell!r}"
                )
            values.append(value)
        return values

    def whole(self, name: str, *, least: float = -math.inf) -> list[int]:
        """Return a column of whole numbers; raises `SpecError` as `numbers` does."""
        values = self.numbers(name, least=least)
        for line, value in enumerate(values, start=2):
            if value != int(value):
                raise SpecError(f"{self.path}:{line}: {name} must be whole, got {value!r}")
        return [int(value) for value in values]


def read_csv(path: Path, required: Sequence[str] = ()) -> CsvTable:
    """Read a CSV file with a header.

    Raises
    ------
    SpecError
        If it cannot be read, is empty, has two columns of one name or a row of another length, or
        lacks a required column.
    """
    try:
        # A byte order mark, which spreadsheets write, is no part of the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            try:
                rows = list(reader)
            except csv.Error as error:
                raise SpecError(f"{path}:{reader.line_num}: no CSV: {error}") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text") from error
    if len(rows) < 2:
        raise SpecError(f"{path}: needs a header and at least one row")
    header, *body = rows
    for name in header:
        if name and header.count(name) > 1:
            raise SpecError(f"{path}:1: there are several columns {name!r}")
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise SpecError(f"{path}:{line}: {len(row)} cells, the header has {len(header)}")
    table = CsvTable(
        path,
        {name: list(cells) for name, cells in zip(header, zip(*body, strict=True), strict=True)},
    )
    for name in required:
        table.text(name)
    return table


def medians(
    points: Iterable[tuple[float, float]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the distinct keys of some points, increasing, and the median of each one's values."""
    found: dict[float, list[float]] = {}
    for key, value in points:
        found.setdefault(key, []).append(value)
    keys = sorted(found)
    return tuple(keys), tuple(median(found[key]) for key in keys)
