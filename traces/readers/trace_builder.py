"""The one gate through which every reader's rows become a `Trace`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.read_report import ReadReport, merged
from schedlab.traces.readers.source import Records
from schedlab.traces.row_error import RowError
from schedlab.traces.trace import Int64, Trace
from schedlab.traces.turns import Turns

MOST_TOKENS = 2**31
"""No request has so many tokens of a prompt or an answer."""

EMPTY_HINT = (
    "(drop_empty leaves such rows out; for an experiment, schedlab trace convert --drop-empty does)"
)
"""What to do about rows without tokens."""

Column = npt.NDArray[Any] | PrefixHashes | Turns


class TraceBuilder:
    """Check the rows of one file, in order, and make traces of them.

    Parameters
    ----------
    report : ReadReport
        What the reader says of the file.
    rebase : bool
        Make the arrival of the first kept row time 0.
    empty_reason : str or None
        Reason to give when a row without prompt or output tokens is left out; `None` makes such
        a row an error.
    """

    def __init__(
        self, report: ReadReport, *, rebase: bool = False, empty_reason: str | None = None
    ) -> None:
        self._base = report
        self._pending = report
        self._rebase = rebase
        self._empty_reason = empty_reason
        self._last_ns: int | None = None
        self._zero_ns: int | None = None if rebase else 0
        self._held: Trace | None = None

    def note(self, text: str) -> None:
        """Say something about the whole file, once."""
        if text not in self._base.notes:
            self._base = self._base.noted(text)
            self._pending = self._pending.noted(text)

    def drop(self, reason: str, num_rows: int) -> None:
        """Count rows that the reader itself left out."""
        self._pending = replace(self._pending, rows_read=self._pending.rows_read + num_rows)
        self._pending = self._pending.dropped(reason, num_rows)

    def trace(
        self,
        records: Records,
        *,
        prompt_tokens: Int64,
        output_tokens: Int64,
        arrival_ns: Int64 | None = None,
        **columns: Column | None,
    ) -> Trace | None:
        """Take rows in, and return the trace of the rows taken before, if there is one.

        One trace is held back, so that rows dropped after it can still be told in its report.

        Raises
        ------
        TraceError
            If a length is impossible or the times run backwards; file and line are named.
        """
        num_rows = len(records.lines)
        self._pending = replace(self._pending, rows_read=self._pending.rows_read + num_rows)
        keep = self._kept(records, prompt_tokens, "prompt tokens")
        keep &= self._kept(records, output_tokens, "output tokens")
        if arrival_ns is not None:
            self._check_order(records, arrival_ns)
        if self._empty_reason:
            self._pending = self._pending.dropped(self._empty_reason, int((~keep).sum()))
        if not keep.any():
            return None
        if arrival_ns is not None:
            if self._zero_ns is None:
                self._zero_ns = int(arrival_ns[keep][0])
            arrival_ns = arrival_ns - self._zero_ns
            if int(arrival_ns[0]) < 0 and not self._rebase:
                raise TraceError(f"{records.at(0)}: arrival is before time 0")
            arrival_ns = np.maximum(arrival_ns, 0)
            columns["arrival_ns"] = arrival_ns
        rows = _built(
            records, prompt_tokens=prompt_tokens, output_tokens=output_tokens, keep=keep, **columns
        )
        ready, self._held = self._held, replace(rows, report=self._pending)
        self._pending = self._base
        return ready

    def finish(self) -> Trace:
        """Return the last trace.

        Raises
        ------
        TraceError
            If the file gave no request at all.
        """
        if self._held is not None:
            return replace(self._held, report=merged([self._held.report, self._pending]))
        path, report = self._base.path, self._pending
        dropped = ", ".join(f"{n:,} {why}" for why, n in report.rows_dropped.items())
        seen = f"{report.rows_read:,} rows, none usable ({dropped})" if dropped else "no rows"
        raise TraceError(f"{path}: {seen}")

    def _kept(self, records: Records, tokens: Int64, name: str) -> npt.NDArray[np.bool_]:
        """Return which rows have tokens; raise where a count is impossible."""
        lowest = 0 if self._empty_reason else 1
        if tokens.min() < lowest:
            row = int(np.argmax(tokens < lowest))
            hint = f" {EMPTY_HINT}" if tokens[row] == 0 else ""
            raise TraceError(f"{records.at(row)}: {tokens[row]} {name}, expected >= 1{hint}")
        if tokens.max() >= MOST_TOKENS:
            row = int(np.argmax(tokens >= MOST_TOKENS))
            raise TraceError(f"{records.at(row)}: {tokens[row]} {name}, expected less than 2^31")
        keep: npt.NDArray[np.bool_] = tokens >= 1
        return keep

    def _check_order(self, records: Records, arrival_ns: Int64) -> None:
        """Raise where a row arrives before the row above it."""
        before = arrival_ns[0] if self._last_ns is None else self._last_ns
        steps = np.diff(arrival_ns, prepend=before)
        if (steps < 0).any():
            row = int(np.argmax(steps < 0))
            raise TraceError(
                f"{records.at(row)}: arrives {-steps[row] / 1e9:g} s before the row above it; "
                "sort the file by time"
            )
        self._last_ns = int(arrival_ns[-1])


def _built(records: Records, keep: npt.NDArray[np.bool_], **columns: Column | None) -> Trace:
    """Return the trace of the kept rows; a value that is impossible is reported with its line."""
    parts: dict[str, Any] = dict(columns)
    if not keep.all():
        parts = {name: _kept_rows(column, keep) for name, column in columns.items()}
    try:
        return Trace(**parts)
    except RowError as error:
        record = int(np.flatnonzero(keep)[error.row])
        raise TraceError(f"{records.at(record)}: {error.problem}") from None


def _kept_rows(column: Column | None, keep: npt.NDArray[np.bool_]) -> Column | None:
    """Return the kept rows of any column, ragged or not."""
    if isinstance(column, PrefixHashes | Turns):
        return column.take(np.flatnonzero(keep))
    return None if column is None else column[keep]
