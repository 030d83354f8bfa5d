"""Batches that are being formed while they wait, in columns: each arrival looks at all of them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.request import WAITS, RequestState

_ROWS = 64
_PRODUCTS, _TIME_NS = 3, 5

_Floats = npt.NDArray[np.float64]


class QueuedBatch:
    """Requests that are to run together.

    Parameters
    ----------
    first : RequestState
        Who opened it; it is a member once it is added.

    Attributes
    ----------
    members : dict of int to RequestState
        Those that have not finished, by id.
    size : int
        Requests that were added.
    is_open : bool
        Whether it is one of `QueuedBatches`.
    """

    def __init__(self, first: RequestState) -> None:
        self._first = first
        self.members: dict[int, RequestState] = {}
        self.size = 0
        self.is_open = False

    @property
    def is_queued(self) -> bool:
        """Whether its first has never had a seat: then others may join."""
        return _is_new(self._first)

    @property
    def is_whole(self) -> bool:
        """Whether nobody in it has ever had a seat."""
        return len(self.members) == self.size and all(map(_is_new, self.members.values()))

    def waiting(self) -> list[RequestState]:
        """List who waits, in order of arrival."""
        waiting = [s for s in self.members.values() if s.status is WAITS]
        return sorted(waiting, key=lambda s: (s.request.arrival_ns, s.id))


class QueuedBatches:
    """The batches that others may join, by their sums: a row each, in the order they were opened.

    Sums of times are whole numbers, exact while all members of a batch together have waited less
    than 2^53 ns, a hundred days.
    """

    def __init__(self) -> None:
        self._batches: list[QueuedBatch] = []
        # Size, longest prompt, longest answer, products, triangles, serving time in ns.
        self._sums: _Floats = np.zeros((6, _ROWS))
        self._arrivals_ns: npt.NDArray[np.int64] = np.zeros((2, _ROWS), dtype=np.int64)

    def open(self, batch: QueuedBatch) -> None:
        """Let others join a batch, from now on."""
        row = len(self._batches)
        if row == self._sums.shape[1]:
            self._sums = np.hstack((self._sums, np.zeros_like(self._sums)))
            self._arrivals_ns = np.hstack((self._arrivals_ns, np.zeros_like(self._arrivals_ns)))
        self._sums[:, row] = 0.0
        self._arrivals_ns[:, row] = 0
        self._batches.append(batch)
        batch.is_open = True

    def add(self, batch: QueuedBatch, state: RequestState) -> None:
        """Let a request join a batch that is open."""
        batch.members[state.id] = state
        batch.size += 1
        row = self._batches.index(batch)
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        size, longest, last, products, triangles, _ = self._sums[:, row].tolist()
        self._sums[:, row] = (
            size + 1,
            max(longest, prompt),
            max(last, output),
            products + output * prompt,
            triangles + output * (output - 1.0) / 2.0,
            np.nan,
        )
        self._arrivals_ns[:, row] += 1, state.request.arrival_ns

    def note_started(self, batch: QueuedBatch) -> None:
        """Learn that somebody in a batch has got a seat: nobody joins any more once its first has.

        Until then it is open, but no longer among those that `highest_response_ratio` compares.
        """
        if not batch.is_open:
            return
        row, end = self._batches.index(batch), len(self._batches)
        if batch.is_queued:
            self._sums[_TIME_NS, row] = 0.0
            return
        batch.is_open = False
        del self._batches[row]
        for table in (self._sums, self._arrivals_ns):
            table[:, row : end - 1] = table[:, row + 1 : end]

    def wasted_tokens(self, state: RequestState) -> _Floats:
        r"""Return the tokens that each would read for nothing, with one more request.

        Every row reads from its prompt, padded to the longest, to the batch's last step:
        :math:`n (G L + G(G-1)/2)` tokens with the largest G and L. Useful are
        :math:`\sum_i G_i L_i + G_i (G_i - 1) / 2`.
        """
        return self._with(state)[2]

    def _with(self, state: RequestState) -> tuple[_Floats, _Floats, _Floats]:
        """Return the size of each with one more request, its memory at its end, and its waste."""
        size, longest, last, products, triangles, _ = self._sums[:, : len(self._batches)]
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        size, longest, last = size + 1.0, np.maximum(longest, prompt), np.maximum(last, output)
        read = size * last * (longest + (last - 1.0) / 2.0)
        useful = output * (prompt + (output - 1.0) / 2.0)
        return size, size * (longest + last), read - (products + triangles) - useful

    def least_waste(
        self, state: RequestState, most: int, capacity_tokens: int, limit_tokens: float
    ) -> QueuedBatch | None:
        """Return the batch that a request wastes least in, or None if none will do.

        Parameters
        ----------
        state : RequestState
            Who would join.
        most : int
            Requests that a batch may have.
        capacity_tokens : int
            Memory that a batch may take at its end.
        limit_tokens : float
            Tokens that a batch may waste, not included.
        """
        if not self._batches:
            return None
        size, peak_tokens, waste = self._with(state)
        waste[(size > most) | (peak_tokens > capacity_tokens)] = np.inf
        best = int(waste.argmin())
        return self._batches[best] if waste[best] < limit_tokens else None

    def highest_response_ratio(
        self, now_ns: int, serving_time_ns: Callable[[int, int, float], float]
    ) -> tuple[float, QueuedBatch] | None:
        """Return the batch with the highest ``1 + wait / time``, by the mean wait of its members.

        Among equals it is that of whom came first. Batches of which somebody has had a seat are
        left out.

        Parameters
        ----------
        now_ns : int
            The time.
        serving_time_ns : callable
            Says how long a batch takes, from its size, longest prompt and longest answer; asked
            once after each change.
        """
        num = len(self._batches)
        times_ns = self._sums[_TIME_NS, :num]
        for row in np.flatnonzero(np.isnan(times_ns)).tolist():
            size, longest, last = self._sums[:_PRODUCTS, row].tolist()
            whole = self._batches[row].is_whole
            times_ns[row] = serving_time_ns(int(size), int(longest), last) if whole else 0.0
        rows = np.flatnonzero(times_ns)
        if not len(rows):
            return None
        size_, arrivals_ns = self._arrivals_ns[:, rows]
        ratios = 1.0 + (size_ * now_ns - arrivals_ns) / size_ / times_ns[rows]
        best = ratios.max()
        equal = [self._batches[row] for row in rows[ratios == best].tolist()]
        return float(best), min(equal, key=lambda batch: batch.waiting()[0].id)


def _is_new(state: RequestState) -> bool:
    return state.status is WAITS and state.first_scheduled_ns < 0
