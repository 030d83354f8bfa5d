"""Tables in plain text, at any width, that never cut a number."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

_GAP = "  "
_TIE = "\0"
_LEAST_TEXT = 20
# What stands in columns of numbers: 1,234, 12.3 ±0.4, [-0.1, 2], 45 %, >= 7, -, inf.
_NUMBER = re.compile(r"[-+±<>=~×\d.,:/%\[\]() ]*(e[-+]?\d+|inf)?[])% ]*")
# Inside a text: a number with its unit and its interval stay on one line.
_IN_TEXT = re.compile(r"[-+]?\d[\d.,]*( %)?( \[[-+\d., ]+\])?")


def text_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    num_keys: int = 1,
) -> str:
    r"""Return a table in plain text.

    Parameters
    ----------
    title : str
        The line above it; none if empty.
    header : sequence of str
        Names of the columns. Columns whose names share their first line (``"TTFT ms\nmean"``,
        ``"TTFT ms\nP99"``) stay beside each other.
    rows : sequence of sequence of str
        Cells. A column that holds nothing but numbers is set right.
    width : int, optional
        Characters a line. Too narrow for the table, texts are wrapped; if that is not enough,
        columns that do not fit follow below, in a table of their own with the same keys. A number
        is never cut or wrapped. Without a width, texts are wrapped at 180 and nothing else.
    num_keys : int
        Columns from the left that tell the rows apart, such as the policy and the rate.

    Returns
    -------
    str
        Lines without a line end after the last one.

    Examples
    --------
    >>> print(text_table("", ("policy", "req/s", "P99 ms"), [("fcfs", "1.5", "1,234")], 16))
    policy  req/s
    ──────  ─────
    fcfs      1.5
    <BLANKLINE>
    policy  P99 ms
    ──────  ──────
    fcfs     1,234
    """
    columns = [
        _Column(name, [row[i] for row in rows], i < num_keys) for i, name in enumerate(header)
    ]
    keys, others = columns[:num_keys], columns[num_keys:]
    _narrow(columns, width or 180)
    if width is None or _total(columns) <= width:
        blocks = [others]
    else:
        _narrow(keys, max(width // 2, _LEAST_TEXT))
        blocks = _blocks(others, width - _total(keys))
        for block in blocks:
            for column in block:  # alone, a text has more room
                column.width = column.natural
            _narrow([*keys, *block], width)
    lines = "\n\n".join("\n".join(_lines([*keys, *block])) for block in blocks)
    if title and width is not None:
        title = "\n".join(wrapped_text(title, width, "  "))
    return f"{title}\n\n{lines}" if title else lines


def html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str] = ()
) -> str:
    """Return a table as HTML for a notebook, with lines below it."""
    columns = [_Column(name, [row[i] for row in rows], False) for i, name in enumerate(header)]
    align = ["right" if column.is_number else "left" for column in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        inside = "".join(
            f'<{tag} style="text-align:{side}">{escape(cell).replace(chr(10), "<br>")}</{tag}>'
            for cell, side in zip(cells, align, strict=True)
        )
        return f"<tr>{inside}</tr>"

    caption = f"<caption>{escape(title)}</caption>" if title else ""
    body = "".join(line("td", row) for row in rows)
    below = "".join(f"<div>{escape(text)}</div>" for text in lines)
    return (
        f"<table>{caption}<thead>{line('th', header)}</thead><tbody>{body}</tbody></table>{below}"
    )


@dataclass
class _Column:
    """A column: its cells, and how wide it is to be."""

    name: str
    cells: list[str]
    is_key: bool

    def __post_init__(self) -> None:
        self.is_number = not self.is_key and all(_NUMBER.fullmatch(cell) for cell in self.cells)
        self.is_right = all(_NUMBER.fullmatch(cell) for cell in self.cells)
        longest = max(len(line) for text in self._texts() for line in text.split("\n"))
        self.natural = max(1, longest)  # of verdicts, say, that no row has
        self.width = self.natural

    def _texts(self) -> list[str]:
        return [self.name, *self.cells]

    def least(self) -> int:
        """Return how narrow it may become: words are never cut."""
        if self.is_number:
            return self.width
        pieces = [piece for text in self._texts() for piece in _tied(text).split()]
        words = max(map(len, pieces), default=0)
        return min(self.width, max(words, _LEAST_TEXT))

    def wrapped(self, text: str) -> list[str]:
        """Return the lines of a cell."""
        lines = [
            part for line in text.split("\n") for part in wrapped_text(line, self.width) or [""]
        ]
        return [
            line.rjust(self.width) if self.is_right else line.ljust(self.width) for line in lines
        ]


def wrapped_text(text: str, width: int, indent: str = "") -> list[str]:
    """Return a text in lines, broken between words; a number stays with its unit and interval."""
    lines = textwrap.wrap(
        _tied(text), width, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace(_TIE, " ") for line in lines]


def _tied(text: str) -> str:
    return _IN_TEXT.sub(lambda number: number[0].replace(" ", _TIE), text)


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.width + len(_GAP) for column in columns) - len(_GAP)


def _narrow(columns: Sequence[_Column], width: int) -> None:
    """Wrap the texts of columns, the widest first, until all fit or no text can give way."""
    while (excess := _total(columns) - width) > 0:
        giving = sorted(
            (column for column in columns if column.width > column.least()),
            key=lambda column: -column.width,
        )
        if not giving:
            return
        widest = giving[0]
        # Down to the next widest, so that the widest ones share what is missing.
        floor = max([widest.least(), *(column.width - 1 for column in giving[1:2])])
        widest.width = max(floor, widest.width - excess)


def _blocks(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Return columns in groups that fit beside the keys; those of one name stay together."""
    alike = [list(same) for _, same in groupby(columns, lambda c: c.name.split("\n")[0])]
    groups = [
        group
        for same in alike
        for group in ([same] if len(_GAP) + _total(same) <= width else [[c] for c in same])
    ]
    blocks: list[list[_Column]] = [[]]
    for group in groups:
        together = [*blocks[-1], *group]
        if blocks[-1] and len(_GAP) + _total(together) > width:
            blocks.append(group)
        else:
            blocks[-1] = together
    return blocks


def _lines(columns: Sequence[_Column]) -> list[str]:
    tops = [column.wrapped(column.name) for column in columns]
    depth = max(map(len, tops))
    # Names of one line stand at the rule, beside the last line of the others.
    lines = _joined([[""] * (depth - len(top)) + top for top in tops], columns)
    lines.append(_GAP.join("─" * column.width for column in columns))
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = [column.wrapped(cell) for column, cell in zip(columns, row, strict=True)]
        lines += _joined(cells, columns)
    return lines


def _joined(cells: Sequence[Sequence[str]], columns: Sequence[_Column]) -> list[str]:
    """Return the lines of a row whose cells have several."""
    depth = max(map(len, cells))
    return [
        _GAP.join(
            (cell[i] if i < len(cell) else "").ljust(column.width)
            for cell, column in zip(cells, columns, strict=True)
        ).rstrip()
        for i in range(depth)
    ]
