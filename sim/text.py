"""Numbers for people, tables in Markdown, and values as JSON: one rule for each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_MOST_DECIMALS = 6


def number(value: float, digits: int = 3, *, padded: bool = False) -> str:
    """Return a number in significant digits, with all digits before the point and no exponent.

    Parameters
    ----------
    value : float
        The number; NaN is a dash.
    digits : int
        Significant digits. A number has six decimals at most.
    padded : bool
        Whether whole numbers have decimals too, as measured values have.

    Examples
    --------
    >>> number(0.12345), number(1234.5), number(12.0), number(12.0, padded=True)
    ('0.123', '1,234', '12', '12.0')
    """
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "inf" if value > 0 else "-inf"
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0 or (float(value).is_integer() and not padded):
        return f"{int(value):,}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded if decimals else value:,.{min(decimals, _MOST_DECIMALS)}f}"


def percent(share: float, decimals: int = 1, *, signed: bool = False) -> str:
    """Return a share as per cent; a dash where it is not finite.

    Examples
    --------
    >>> percent(0.1234), percent(0.1234, 0, signed=True), percent(math.nan)
    ('12.3%', '+12%', '-')
    """
    if not math.isfinite(share):
        return "-"
    return f"{share:+.{decimals}%}" if signed else f"{share:.{decimals}%}"


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()
) -> list[str]:
    r"""Return the lines of a Markdown table.

    Parameters
    ----------
    header : sequence of str
        Names of the columns.
    rows : iterable of sequence of str
        Cells; bars and line ends in them are made harmless.
    right : iterable of int
        Columns that are set to the right.

    Examples
    --------
    >>> markdown_table(["policy", "requests/s"], [["a|b", "3"]], right=[1])
    ['| policy | requests/s |', '|---|---:|', '| a\\|b | 3 |']
    """
    right = set(right)
    marks = ("---:" if i in right else "---" for i in range(len(header)))
    # A column without a name has one space, as people write it.
    names = _line(header).replace("|  |", "| |")
    return [names, f"|{'|'.join(marks)}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def json_value(value: object, digits: int | None = None) -> object:
    """Return what JSON can hold.

    Parameters
    ----------
    value : object
        Mappings, sequences, numbers and arrays of numpy, paths, texts, None.
    digits : int, optional
        Significant digits that floats are rounded to, so that the last bits of a machine do not
        show; all of them if absent.

    Returns
    -------
    object
        The same in dicts, lists, numbers and strings. NaN becomes None, which reads as "could not
        be measured"; infinity becomes the string ``"inf"``, which ``float`` reads back.
    """
    if value is None or isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        if not math.isfinite(value):
            return None if math.isnan(value) else "inf" if value > 0 else "-inf"
        return value if digits is None else float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {str(key): json_value(item, digits) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [json_value(item, digits) for item in value]
    return str(value) if isinstance(value, Path) else value


def json_number(value: object) -> float:
    """Return a number that JSON may hold in words: what `json_value` made of it, undone.

    Examples
    --------
    >>> json_number(None), json_number("-inf"), json_number(1.5)
    (nan, -inf, 1.5)
    """
    if isinstance(value, int | float):
        return value
    return math.nan if value is None else float(str(value))


def json_text(value: object, indent: int | None = 1, digits: int | None = None) -> str:
    """Return a value as JSON, by the rule of `json_value`.

    Examples
    --------
    >>> json_text({"seconds": [1.5, math.inf, math.nan]}, indent=None)
    '{"seconds": [1.5, "inf", null]}'
    """
    return json.dumps(json_value(value, digits), indent=indent, allow_nan=False)
