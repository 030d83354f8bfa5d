"""Turn cells of text or JSON values into exact integer columns, or say which cell is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.readers.source import Records
from schedlab.traces.row_error import RowError

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Text = npt.NDArray[np.object_]

# Below this many nanoseconds a float64 holds seconds to better than half a nanosecond.
_EXACT_NS = 2.0**52
# Far beyond any 64-bit number, but cheap to compute with; 1e999999999 is not.
_SANE = 10**40

BROKEN_TEXT = "some texts held half a Unicode character, replaced by '?'"


def whole_numbers(values: Sequence[Any], name: str, records: Records) -> Int64:
    """Return int64 values of integers, or of text like ``"374"`` or ``"374.0"``.

    Raises
    ------
    TraceError
        If a value is no whole number; the message names file and line.
    """
    kinds = set(map(type, values))
    try:
        # int() would take "1_000", which no publisher writes: more likely a damaged cell.
        if kinds == {int} or (kinds == {str} and "_" not in "".join(values)):
            return np.array(list(map(int, values)), dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    return np.array([_whole(v, name, records, i) for i, v in enumerate(values)], dtype=np.int64)


def _whole(value: object, name: str, records: Records, index: int) -> int:
    """Return one whole number, slowly and strictly."""
    try:
        number = _decimal(value)
    except (InvalidOperation, TypeError):
        raise TraceError(f"{records.at(index)}: {name} is {value!r}, expected a number") from None
    if number.is_finite() and number.copy_abs() >= 2**63:
        raise TraceError(f"{records.at(index)}: {name} is {value!r:.80}, too large for 64 bits")
    if not number.is_finite() or number != number.to_integral_value():
        raise TraceError(f"{records.at(index)}: {name} is {value!r}, expected a whole number")
    return int(number)


def nanoseconds(values: Sequence[Any], ns_per_unit: int, name: str, records: Records) -> Int64:
    """Return exact int64 nanoseconds of times in a unit of `ns_per_unit` nanoseconds.

    Raises
    ------
    TraceError
        If a value is no finite number, or lies beyond 292 years.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        largest = max(max(values), -min(values))
        if largest * ns_per_unit < 2**63:
            return np.array(values, dtype=np.int64) * ns_per_unit
    try:
        if kinds <= {int, float} or (kinds == {str} and "_" not in "".join(values)):
            with np.errstate(over="ignore"):
                ns = np.array(list(map(float, values))) * ns_per_unit
            if np.isfinite(ns).all() and np.abs(ns).max(initial=0.0) < _EXACT_NS:
                return np.asarray(np.rint(ns), dtype=np.int64)
    except ValueError:
        pass
    return np.array(
        [_exact_ns(v, ns_per_unit, name, records, i) for i, v in enumerate(values)], dtype=np.int64
    )


def _exact_ns(value: object, ns_per_unit: int, name: str, records: Records, index: int) -> int:
    """Return one time in nanoseconds, in decimal arithmetic."""
    try:
        number = _decimal(value)
    except (InvalidOperation, TypeError):
        raise TraceError(f"{records.at(index)}: {name} is {value!r}, expected a time") from None
    if not number.is_finite():
        raise TraceError(f"{records.at(index)}: {name} is {value!r}, expected a finite time")
    ns = round(number * ns_per_unit) if number.copy_abs() < _SANE else 2**63
    if abs(ns) >= 2**63:
        raise TraceError(
            f"{records.at(index)}: {name} is {value!r:.80}, beyond 292 years: wrong unit?"
        )
    return ns


def _decimal(value: object) -> Decimal:
    """Return the number a JSON value or a cell of text spells, or raise."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    text = str(value).strip()
    if "_" in text:
        raise InvalidOperation
    return Decimal(text)


def optional_numbers(values: Sequence[Any], name: str, records: Records) -> Float64:
    """Return float64 values; empty cells and `None` become NaN.

    Raises
    ------
    TraceError
        If a value is there but is no finite number.
    """
    numbers = np.full(len(values), np.nan)
    for i, value in enumerate(values):
        if not absent(value):
            try:
                numbers[i] = float(_decimal(value))
            except (InvalidOperation, TypeError):
                numbers[i] = math.inf
            if not math.isfinite(numbers[i]):
                raise TraceError(f"{records.at(i)}: {name} is {value!r}, expected a number")
    return numbers


def optional_whole_numbers(
    values: Sequence[Any], name: str, records: Records, default: int
) -> Int64:
    """Return int64 values; empty cells and `None` become `default`."""
    return whole_numbers([default if absent(v) else v for v in values], name, records)


def texts(values: Sequence[Any]) -> Text:
    """Return an object column of text; empty cells and `None` become `None`.

    Equal texts share one object, so that a column of a few labels stays small.
    """
    shared: dict[str, str] = {}
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        if not absent(value):
            text = str(value)
            column[i] = shared.setdefault(text, text)
    return column


def valid_texts(values: Sequence[str]) -> tuple[list[str], int]:
    """Return the texts with lone surrogates replaced by ``?``, and how many texts had any.

    JSON can spell half of a surrogate pair, which no tokenizer and no file can take.
    """
    repaired = [text.encode("utf-8", "replace").decode("utf-8") for text in values]
    changed = sum(old != new for old, new in zip(values, repaired, strict=True))
    return repaired, changed


def given_ids(values: Sequence[Any]) -> list[Any] | None:
    """Return the block ids of each row, none where the cell is empty; `None` if no row has any."""
    rows = [[] if absent(value) else value for value in values]
    return rows if any(row != [] for row in rows) else None


def block_ids(rows: Sequence[Any], block_tokens: int, records: Records) -> PrefixHashes:
    """Return the prefix hashes of the rows.

    Raises
    ------
    TraceError
        If a row is no list of 64-bit integers; the message names file and line.
    """
    try:
        return PrefixHashes.from_rows(rows, block_tokens)
    except RowError as error:
        raise records.blame(error) from None


def absent(value: object) -> bool:
    """Tell whether a cell is empty."""
    return value is None or value == "" or value != value
