"""How the requests of a trace depend on each other: turns of conversations, calls of agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import TraceError
from schedlab.traces.prefix_hashes import PrefixHashes
from schedlab.traces.row_error import RowError

Int64 = npt.NDArray[np.int64]
Text = npt.NDArray[np.object_]
Shared = tuple[tuple[str, int], ...]
"""What a prompt begins with that others begin with, too: names and tokens, in order."""


@dataclass(frozen=True, eq=False)
class Turns:
    """What each request of a trace of sessions waits for, and what its prompt is made of.

    The rows of a session lie one behind the other, each behind those that it needs, and all have
    the arrival time of the session's start.

    Attributes
    ----------
    rows_back : ndarray of int64, shape (num_needs,)
        For each answer that a row needs, how many rows before it that request is, >= 1; of all
        rows, one row after another.
    offsets : ndarray of int64, shape (num_rows + 1,)
        Row i owns ``rows_back[offsets[i]:offsets[i + 1]]``; who owns none starts with its session.
    delay_ns : ndarray of int64, shape (num_rows,)
        Time that passes before the request is sent, from the last answer it needs.
    tool : ndarray of object (str or None), shape (num_rows,), or None
        The tool that its answer calls; None if it is for the user.
    shared : ndarray of object (`Shared` or None), shape (num_rows,), or None
        What the prompts of rows that need nobody begin with.
    answers : PrefixHashes or None
        The blocks that answers fill, where the trace names its blocks (`Trace.prefix`): those that
        go on behind the full blocks of the prompt. Where it does not, a prompt begins with all of
        the first request it needs, prompt and answer; see `traces.session_blocks`.
    """

    rows_back: Int64
    offsets: Int64
    delay_ns: Int64
    tool: Text | None = None
    shared: Text | None = None
    answers: PrefixHashes | None = None

    @classmethod
    def from_rows(
        cls,
        needs: Sequence[Sequence[int]],
        delay_ns: Sequence[int] | Int64,
        tool: Text | None = None,
        shared: Text | None = None,
        answers: PrefixHashes | None = None,
    ) -> Turns:
        """Return the turns whose row i needs the rows ``needs[i]``, counted from 0."""
        offsets = np.zeros(len(needs) + 1, dtype=np.int64)
        np.cumsum([len(rows) for rows in needs], out=offsets[1:])
        back = [i - parent for i, rows in enumerate(needs) for parent in rows]
        return cls(
            np.array(back, dtype=np.int64),
            offsets,
            np.asarray(delay_ns, dtype=np.int64),
            tool,
            shared,
            answers,
        )

    def __len__(self) -> int:
        return len(self.delay_ns)

    def needs(self, row: int) -> list[int]:
        """Return the rows whose answers a row needs."""
        first, last = self.offsets[row], self.offsets[row + 1]
        parents: list[int] = (row - self.rows_back[first:last]).tolist()
        return parents

    def rows(self) -> list[tuple[list[int], int]]:
        """Return of each row the rows that it needs, and its delay in ns."""
        return [(self.needs(row), int(ns)) for row, ns in enumerate(self.delay_ns.tolist())]

    def numbers(self) -> Int64:
        """Return the turn of each row, from 1: one more than the latest that it needs."""
        numbers = [1] * len(self)
        bounds, back = self.offsets.tolist(), self.rows_back.tolist()
        for row in range(len(self)):
            for k in range(bounds[row], bounds[row + 1]):
                numbers[row] = max(numbers[row], numbers[row - back[k]] + 1)
        return np.array(numbers, dtype=np.int64)

    def take(self, rows: Int64) -> Turns:
        """Return some rows, in rising order.

        Raises
        ------
        TraceError
            If a row needs one that is not taken.
        """
        if (np.diff(rows) <= 0).any():
            raise TraceError("requests of sessions cannot be reordered or drawn at random")
        counts = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        old = np.repeat(rows, counts)
        parents = old - self.rows_back[np.repeat(self.offsets[:-1][rows], counts) + within]
        place = np.full(len(self), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        if (place[parents] < 0).any():
            k = int(np.argmax(place[parents] < 0))
            raise TraceError(
                f"row {old[k]} needs the answer of row {parents[k]}, which is left out"
            )
        return replace(
            self,
            rows_back=place[old] - place[parents],
            offsets=offsets,
            delay_ns=self.delay_ns[rows],
            tool=None if self.tool is None else self.tool[rows],
            shared=None if self.shared is None else self.shared[rows],
            answers=None if self.answers is None else self.answers.take(rows),
        )

    def without(self, dropped: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which rows are left if some are dropped and, with them, all that need them."""
        left = (~dropped).tolist()
        bounds, back = self.offsets.tolist(), self.rows_back.tolist()
        for row in range(len(self)):
            if left[row]:
                left[row] = all(left[row - back[k]] for k in range(bounds[row], bounds[row + 1]))
        return np.array(left)

    @classmethod
    def concat(cls, parts: Sequence[Turns]) -> Turns:
        """Return the rows of all `parts`, one part after another."""
        shifts = np.cumsum([0] + [len(part.rows_back) for part in parts[:-1]])
        offsets = [part.offsets[1:] + shift for part, shift in zip(parts, shifts, strict=True)]
        answers = [part.answers for part in parts if part.answers is not None]
        if answers and len(answers) < len(parts):
            raise TraceError("cannot join sessions with and without the blocks of their answers")
        return cls(
            np.concatenate([part.rows_back for part in parts]),
            np.concatenate([np.zeros(1, dtype=np.int64), *offsets]),
            np.concatenate([part.delay_ns for part in parts]),
            _joined([part.tool for part in parts], [len(part) for part in parts]),
            _joined([part.shared for part in parts], [len(part) for part in parts]),
            PrefixHashes.concat(answers) if answers else None,
        )

    def check(self, session: Text | None, arrival_ns: Int64 | None, origin: str) -> None:
        """Raise for the first row that cannot be.

        Raises
        ------
        RowError
            If a row needs itself, a later row or one of another session, a delay is negative, or
            the rows of a session do not lie together or differ in their start.
        """
        if session is None:
            raise TraceError(f"{origin}: turns belong to sessions, and there is no column session")
        row_of = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        for bad, problem in (
            (self.rows_back == 0, "needs its own answer"),
            (self.rows_back < 0, "needs the answer of a later request"),
            (self.rows_back > row_of, "needs the answer of a request that is not there"),
        ):
            if bad.any():
                raise RowError(origin, int(row_of[np.argmax(bad)]), problem)
        if (self.delay_ns < 0).any():
            row = int(np.argmax(self.delay_ns < 0))
            raise RowError(origin, row, f"delay must be >= 0, got {self.delay_ns[row] / 1e9:g} s")
        others = session[row_of] != session[row_of - self.rows_back]
        if others.any():
            row = int(row_of[np.argmax(others)])
            raise RowError(origin, row, "needs the answer of a request of another session")
        starts = np.flatnonzero(np.append(True, session[1:] != session[:-1]))
        names = session[starts].tolist()
        if len(set(names)) < len(names):
            again = next(i for i, name in enumerate(names) if name in names[:i])
            row = int(starts[again])
            raise RowError(origin, row, f"session {session[row]} goes on behind another one")
        if arrival_ns is not None:
            same = np.repeat(arrival_ns[starts], np.diff(np.append(starts, len(self))))
            if (same != arrival_ns).any():
                row = int(np.argmax(same != arrival_ns))
                raise RowError(origin, row, "does not have the arrival time of its session's start")


def session_starts(session: Text) -> Int64:
    """Return the first row of each session."""
    return np.flatnonzero(np.append(True, session[1:] != session[:-1]))


def _joined(columns: Sequence[Text | None], lengths: Sequence[int]) -> Text | None:
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [
            np.full(length, None, dtype=object) if column is None else column
            for column, length in zip(columns, lengths, strict=True)
        ]
    )
