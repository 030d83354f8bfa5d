"""When the tokens of requests came out, kept by stints of decode steps."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from schedlab.sim.record.columns import Columns, Ints, batches, whole_numbers

STINT_COLUMNS = ("id", "entry_ns", "first_decode", "last_decode")
"""A request got a token at `entry_ns` from its prefill (-1: it did not), and then one in each of
the decode steps first..last-1, counted over the whole run; where steps verify drafts one or more,
as `bursts` say. In a pipeline these are counted through one micro-batch after the other."""

MICRO_BATCH = "micro_batch"
"""The column of a step that says which micro-batch of a pipeline decodes in it."""

MICRO_BATCH_BITS = 40
"""While a pipeline runs, a micro-batch counts its own steps, and has its number above these."""


class TokenTimes:
    """The times of all tokens of a run.

    Parameters
    ----------
    stints : ndarray of int64, shape (num_stints, 4)
        Columns as in `STINT_COLUMNS`; those of one request in order of time.
    decode_ends_ns : ndarray of int64, shape (num_decode_steps,)
        When each step that decodes anything ends.
    bursts : ndarray of int64, optional
        Tokens that came out in each decode step of each stint, stint by stint; one in each if not
        given.
    """

    def __init__(self, stints: Ints, decode_ends_ns: Ints, bursts: Ints | None = None) -> None:
        self._stints = stints
        self._decode_ends_ns = decode_ends_ns
        self.bursts = bursts

    @classmethod
    def of_steps(cls, stints: Ints, steps: Columns, bursts: Ints | None = None) -> TokenTimes:
        """Return the times of tokens that came out in steps, one row each.

        Of several engines the steps are counted engine by engine, in the order of each, and of
        a pipeline micro-batch by micro-batch.
        """
        decodes = whole_numbers(steps, "num_decodes") > 0
        ends_ns = whole_numbers(steps, "end_ns")[decodes]
        keys = [
            whole_numbers(steps, key)[decodes] for key in (MICRO_BATCH, "engine") if key in steps
        ]
        if keys:
            ends_ns = ends_ns[np.lexsort(keys)]
        return cls(stints, ends_ns, bursts)

    def in_order_of_time(self) -> TokenTimes:
        """Return the same with the stints of every request in order of time."""
        entry, first = self._stints[:, 1], self._stints[:, 2]
        ends = np.append(self._decode_ends_ns, -1)  # stints may end before any decode
        begins = np.where(entry >= 0, entry, ends[first])
        order = np.lexsort((begins, self._stints[:, 0]))
        stints, bursts = self._stints[order], self.bursts
        if bursts is not None:
            lengths = stints[:, 3] - stints[:, 2]
            bursts = bursts[np.repeat(burst_starts(self._stints)[order], lengths) + within(lengths)]
        return TokenTimes(stints, self._decode_ends_ns, bursts)

    def stints(self) -> Columns:
        """Return the stints, in the order in which they ended."""
        return dict(zip(STINT_COLUMNS, self._stints.T, strict=True))

    def of(self, request_id: int) -> Ints:
        """Return when each token of a request came out, in ns, in order."""
        low, high = np.searchsorted(self._by_id[:, 0], [request_id, request_id + 1])
        times: list[Ints] = []
        for row, (_, entry, first, last) in enumerate(self._by_id[low:high].tolist(), int(low)):
            if entry >= 0:
                times.append(np.array([entry]))
            ends_ns = self._decode_ends_ns[first:last]
            if self.bursts is not None:
                begin = self._bursts_by_id[row]
                ends_ns = np.repeat(ends_ns, self.bursts[begin : begin + last - first])
            times.append(ends_ns)
        return np.concatenate(times) if times else np.zeros(0, dtype=np.int64)

    def gaps(self, ids: Ints | None = None) -> Columns:
        """Return all gaps between tokens of the same request: gap_ns, and count, how many.

        Tokens that come out together arrive together: there is no gap between them, as there is
        none for a client that receives them in one piece.

        A decode step gives the same gap to every request that also took part in the one before,
        so the rows are about as many as the steps. With `ids` only of those requests.
        """
        stints = self._some(ids)
        decode_ends = np.append(self._decode_ends_ns, -1)  # stints may end before any decode
        ids, entry, first, last = (stints[:, i] for i in range(4))
        # Gaps inside stints: decode step s counts once for each stint with first < s < last.
        change = np.zeros(len(decode_ends) + 1, dtype=np.int64)
        inside = last - first >= 2
        np.add.at(change, first[inside] + 1, 1)
        np.add.at(change, last[inside], -1)
        counts = np.cumsum(change)[: len(decode_ends)]
        gaps = np.diff(decode_ends, prepend=0)
        # Gaps at the seams: the token before a stint's first one.
        order = np.argsort(ids, kind="stable")
        ids, entry, first, last = ids[order], entry[order], first[order], last[order]
        has_entry, has_decodes = entry >= 0, last > first
        first_decode = decode_ends[first]
        final = np.where(has_decodes, decode_ends[last - 1], entry)
        head = np.where(has_entry, entry, first_decode)
        same = np.zeros(len(ids), dtype=bool)
        same[1:] = ids[1:] == ids[:-1]
        before = np.roll(final, 1)
        seams = np.concatenate([
            (head - before)[same],
            (first_decode - entry)[has_entry & has_decodes],
        ])  # fmt: skip
        used = counts > 0
        return {
            "gap_ns": np.concatenate([gaps[used], seams]),
            "count": np.concatenate([counts[used], np.ones(len(seams), dtype=np.int64)]),
        }

    def counts(self, ids: Ints | None = None, pieces: bool = False) -> Columns:
        """Return time_ns and count, the tokens that came out then.

        Parameters
        ----------
        ids : ndarray of int64, optional
            Only those of these requests.
        pieces : bool
            Whether to count what a request gets in one step once, as it comes in one piece of its
            stream, however many tokens that are.
        """
        _, entry, first, last = self._some(ids).T
        change = np.zeros(len(self._decode_ends_ns) + 1, dtype=np.int64)
        np.add.at(change, first[last > first], 1)
        np.add.at(change, last[last > first], -1)
        decoded = np.cumsum(change)[:-1]
        if self.bursts is not None and not pieces:
            decoded = self._decoded(ids)
        entered = entry[entry >= 0]
        times, place = np.unique(
            np.concatenate([self._decode_ends_ns[decoded > 0], entered]), return_inverse=True
        )
        weights = np.concatenate([decoded[decoded > 0], np.ones(len(entered), dtype=np.int64)])
        tokens = np.zeros(len(times), dtype=np.int64)
        np.add.at(tokens, place, weights)
        return {"time_ns": times, "count": tokens}

    def _some(self, ids: Ints | None) -> Ints:
        return self._stints if ids is None else self._stints[np.isin(self._stints[:, 0], ids)]

    def _decoded(self, ids: Ints | None) -> Ints:
        """Return how many tokens came out of each decode step, shape (num_decode_steps,)."""
        assert self.bursts is not None
        wanted = slice(None) if ids is None else np.isin(self._stints[:, 0], ids)
        first, last = self._stints[wanted, 2], self._stints[wanted, 3]
        lengths = last - first
        steps = np.repeat(first, lengths) + within(lengths)
        places = np.repeat(burst_starts(self._stints)[wanted], lengths) + within(lengths)
        decoded = np.zeros(len(self._decode_ends_ns), dtype=np.int64)
        np.add.at(decoded, steps, self.bursts[places])
        return decoded

    @cached_property
    def _order(self) -> Ints:
        order: Ints = np.argsort(self._stints[:, 0], kind="stable")
        return order

    @cached_property
    def _by_id(self) -> Ints:
        rows: Ints = self._stints[self._order]
        return rows

    @cached_property
    def _bursts_by_id(self) -> Ints:
        return burst_starts(self._stints)[self._order]


def decodes_before(steps: Columns) -> Ints:
    """Count the decode steps of all micro-batches before each, shape (num_micro_batches + 1,)."""
    counts = np.zeros(1, dtype=np.int64)
    for some in batches(steps):
        here = np.bincount(whole_numbers(some, MICRO_BATCH)[whole_numbers(some, "num_decodes") > 0])
        size = max(len(here), len(counts))
        counts = np.pad(counts, (0, size - len(counts))) + np.pad(here, (0, size - len(here)))
    return np.concatenate([[0], np.cumsum(counts)])


def in_order_of_steps(stints: Ints, before: Ints) -> Ints:
    """Return stints whose decode steps are counted through all micro-batches.

    Parameters
    ----------
    stints : ndarray of int64, shape (num_stints, 4)
        Of a pipeline, as they were written (`MICRO_BATCH_BITS`).
    before : ndarray of int64
        What `decodes_before` says.
    """
    counted = stints.copy()
    steps = stints[:, 2:]
    number = np.minimum(steps >> MICRO_BATCH_BITS, len(before) - 1)  # one may have no step yet
    counted[:, 2:] = before[number] + (steps & (1 << MICRO_BATCH_BITS) - 1)
    return counted


def within(lengths: Ints) -> Ints:
    """Count 0, 1, .. through each of some stretches, one after the other: shape (sum,)."""
    places: Ints = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return places


def one_a_step(stints: Ints) -> Ints:
    """Return the bursts of stints in which nothing is drafted, shape (num_decode_steps,)."""
    return np.ones((stints[:, 3] - stints[:, 2]).sum(), dtype=np.int64)


def burst_starts(stints: Ints) -> Ints:
    """Return where in `bursts` each stint begins, shape (num_stints,)."""
    steps = stints[:, 3] - stints[:, 2]
    starts: Ints = np.cumsum(steps) - steps
    return starts
