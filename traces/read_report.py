"""What a reader or a generator did to make a trace, for the user to check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ReadReport:
    """Where a trace comes from and what happened to it on the way.

    Attributes
    ----------
    format : str
        Name of the reader, or ``"synthetic"``, or ``"memory"`` for arrays.
    path : str or None
        The file, if there is one.
    rows_read : int
        Rows seen in the file, before any were dropped.
    rows_dropped : dict of str to int
        Number of rows left out, by reason.
    time_unit : str
        How the source writes time, e.g. ``"ms"``; empty if it has no times.
    time_zero : str
        Which instant became 0.
    tokens : str
        Who counted the tokens: the publisher, a tokenizer, or an estimate.
    notes : tuple of str
        Anything else that changes what a number means, in order.
    """

    format: str = "memory"
    path: str | None = None
    rows_read: int = 0
    rows_dropped: dict[str, int] = field(default_factory=dict)
    time_unit: str = ""
    time_zero: str = ""
    tokens: str = "as given"
    notes: tuple[str, ...] = ()

    def noted(self, note: str) -> ReadReport:
        """Return the report with one more note."""
        return replace(self, notes=(*self.notes, note))

    def dropped(self, reason: str, num_rows: int) -> ReadReport:
        """Return the report with `num_rows` more rows dropped for `reason`."""
        if num_rows == 0:
            return self
        total = self.rows_dropped.get(reason, 0) + num_rows
        return replace(self, rows_dropped={**self.rows_dropped, reason: total})

    def lines(self) -> list[str]:
        """Return the report as short lines of text."""
        where = f"{self.path} ({self.format})" if self.path else self.format
        lines = [f"source: {where}"]
        if self.rows_read:
            lines.append(f"rows read: {self.rows_read:,}")
        lines += [f"rows dropped: {n:,} ({why})" for why, n in self.rows_dropped.items()]
        if self.time_unit:
            lines.append(f"time: in {self.time_unit}; 0 is {self.time_zero}")
        lines.append(f"tokens: {self.tokens}")
        lines += [f"note: {note}" for note in self.notes]
        return lines


def merged(reports: Iterable[ReadReport]) -> ReadReport:
    """Return one report for traces joined in this order; counts add up."""
    total, *others = reports
    for other in others:
        for reason, num_rows in other.rows_dropped.items():
            total = total.dropped(reason, num_rows)
        same_source = (other.path, other.format) == (total.path, total.format)
        new = [note for note in other.notes if note not in total.notes]
        if not same_source:
            new.insert(0, f"joined with {other.path or other.format}")
        total = replace(
            total, rows_read=total.rows_read + other.rows_read, notes=(*total.notes, *new)
        )
    return total
