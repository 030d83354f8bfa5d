"""When the tokens of a long run came out, worked out from tables on disk."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from schedlab.sim.record.columns import BATCH_ROWS, Bools, Columns, Ints, batches, whole_numbers
from schedlab.sim.record.spool import Spool
from schedlab.sim.record.token_times import (
    MICRO_BATCH,
    STINT_COLUMNS,
    TokenTimes,
    burst_starts,
    decodes_before,
)

_WINDOW_STEPS = 8_000_000
"""Decode steps whose gaps are counted in one pass over the stints: 8 bytes each."""
_FIRST, _LAST = 2, 3


class StoredTokenTimes:
    """The same as `TokenTimes`, a batch of stints and of steps at a time.

    Parameters
    ----------
    stints : Spool
        Columns as in `token_times.STINT_COLUMNS`; those of one request in order of time.
    steps : Columns
        The steps of one engine.
    bursts : Spool, optional
        Tokens of each decode step of each stint, one column; see `TokenTimes`.
    """

    def __init__(self, stints: Spool, steps: Columns, bursts: Spool | None = None) -> None:
        self._stints = stints
        self._bursts = bursts
        self._decode_ends_ns = Spool(1)
        num_passes = len(decodes_before(steps)) - 1 if MICRO_BATCH in steps else 1
        for number in range(num_passes):
            for some in batches(steps):
                counts = whole_numbers(some, "num_decodes") > 0
                if MICRO_BATCH in steps:
                    counts &= whole_numbers(some, MICRO_BATCH) == number
                ends_ns = whole_numbers(some, "end_ns")[counts]
                self._decode_ends_ns.append(ends_ns[:, np.newaxis])

    def stints(self) -> Columns:
        """Return the stints, in the order in which they ended."""
        return self._stints.table(STINT_COLUMNS)

    @property
    def bursts(self) -> Ints | None:
        """Tokens of each decode step of each stint, if they are not one."""
        return None if self._bursts is None else self._bursts.column(0)

    def of(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns, in order."""
        low, high = np.searchsorted(self._ids, [request_id, request_id + 1]).tolist()
        times: list[Ints] = [np.zeros(0, dtype=np.int64)]
        for row, (_, entry, first, last) in enumerate(self._by_id.rows(low, high).tolist(), low):
            if entry >= 0:
                times.append(np.array([entry]))
            ends_ns = self._decode_ends_ns.column(0, first, last)
            if self._bursts is not None:
                begin = int(self._bursts_by_id[row])
                ends_ns = np.repeat(ends_ns, self._bursts.column(0, begin, begin + last - first))
            times.append(ends_ns)
        return np.concatenate(times)

    def gaps(self, ids: Ints | None = None) -> Columns:
        """Return what `TokenTimes.gaps` does, in the same order."""
        return self._gaps_of_all if ids is None else self._gaps(ids)

    @cached_property
    def _gaps_of_all(self) -> Columns:
        """Both the metrics and the tables of a run ask for them; they lie in a file."""
        return self._gaps(None)

    def _gaps(self, ids: Ints | None) -> Columns:
        found = Spool(2)
        self._add_gaps_inside(found, ids)
        for at_joins in (True, False):
            self._add_seams(found, at_joins, ids)
        return found.table(("gap_ns", "count"))

    def counts(self, ids: Ints | None = None, pieces: bool = False) -> Columns:
        """Return what `TokenTimes.counts` does; of this stints and steps are held in memory."""
        stints = self._stints.rows(0, self._stints.num_rows)
        return TokenTimes(stints, self._decode_ends_ns.column(0), self.bursts).counts(ids, pieces)

    def _add_gaps_inside(self, found: Spool, ids: Ints | None) -> None:
        """Add the gaps between the decode steps of a stint, in order of time."""
        carried, previous_ns = 0, 0
        num_steps = self._decode_ends_ns.num_rows
        for start in range(0, num_steps, _WINDOW_STEPS):
            stop = min(start + _WINDOW_STEPS, num_steps)
            counts = self._change_of_counts(start, stop, ids)
            counts[0] += carried
            counts = np.cumsum(counts, out=counts)
            carried = int(counts[-1])
            for low in range(start, stop, BATCH_ROWS):
                high = min(low + BATCH_ROWS, stop)
                ends_ns = self._decode_ends_ns.column(0, low, high)
                gaps_ns = np.diff(ends_ns, prepend=previous_ns)
                previous_ns = int(ends_ns[-1])
                here = counts[low - start : high - start]
                used = here > 0
                found.append(np.column_stack([gaps_ns[used], here[used]]))

    def _change_of_counts(self, start: int, stop: int, ids: Ints | None) -> Ints:
        """Return by how many more stints each decode step of a window is inside of, shape (n,)."""
        change = np.zeros(stop - start, dtype=np.int64)
        for stints in self._stints.batches(BATCH_ROWS):
            some = stints if ids is None else stints[np.isin(stints[:, 0], ids)]
            first, last = some[:, _FIRST], some[:, _LAST]
            inside = last - first >= 2
            for at, sign in ((first[inside] + 1, 1), (last[inside], -1)):
                here = at[(at >= start) & (at < stop)] - start
                np.add.at(change, here, sign)
        return change

    def _add_seams(self, found: Spool, at_joins: bool, ids: Ints | None) -> None:
        """Add the gaps before the first token of a stint, or between that and its first decode."""
        before_id, before_ns = -1, 0
        for stints in self._by_id.batches(BATCH_ROWS):
            some = stints if ids is None else stints[np.isin(stints[:, 0], ids)]
            if not len(some):
                continue
            numbers, entry, first, last = some.T
            has_entry, has_decodes = entry >= 0, last > first
            first_ns = self._end_of(first, has_decodes)
            if at_joins:
                last_ns = np.where(has_decodes, self._end_of(last - 1, has_decodes), entry)
                same = np.diff(numbers, prepend=before_id) == 0
                head_ns = np.where(has_entry, entry, first_ns)
                gaps_ns = (head_ns - np.append(before_ns, last_ns[:-1]))[same]
                before_id, before_ns = int(numbers[-1]), int(last_ns[-1])
            else:
                gaps_ns = (first_ns - entry)[has_entry & has_decodes]
            found.append(np.column_stack([gaps_ns, np.ones_like(gaps_ns)]))

    def _end_of(self, decode_steps: Ints, known: Bools) -> Ints:
        """Return when decode steps ended, -1 where there is none."""
        ends_ns = np.full(len(decode_steps), -1, dtype=np.int64)
        ends_ns[known] = self._decode_ends_ns.take(0, decode_steps[known])
        return ends_ns

    @cached_property
    def _order(self) -> Ints:
        order: Ints = np.argsort(self._stints.column(0), kind="stable")
        return order

    @cached_property
    def _by_id(self) -> Spool:
        return self._stints.in_order(self._order)

    @cached_property
    def _bursts_by_id(self) -> Ints:
        return burst_starts(self._stints.rows(0, self._stints.num_rows))[self._order]

    @cached_property
    def _ids(self) -> Ints:
        return self._by_id.column(0)
