"""Batches that are being formed while they wait, in columns: each arrival looks at all of them."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from schedlab.policies.sjf import predicted_tokens
from schedlab.sim.request import WAITS, RequestState

_ROWS = 64
_SIZE, _LONGEST, _LAST, _HALF, _USEFUL, _TIME_NS = range(6)

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
    longest : int
        Their longest prompt.
    last : float
        Their longest predicted answer.
    useful : float
        Tokens that they would read without the others.
    arrivals_ns : int
        Sum of their arrivals.
    number : int
        Its place in the order in which batches were opened.
    is_open : bool
        Whether it is one of `QueuedBatches`.
    """

    def __init__(self, first: RequestState) -> None:
        self._first = first
        self.members: dict[int, RequestState] = {}
        self.size = 0
        self.longest = 0
        self.last = 0.0
        self._products = 0.0
        self._triangles = 0.0
        self.useful = 0.0
        self.arrivals_ns = 0
        self.number = -1
        self.is_open = False

    def add(self, state: RequestState) -> None:
        """Take a request in."""
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        self.members[state.id] = state
        self.size += 1
        self.longest = max(self.longest, prompt)
        self.last = max(self.last, output)
        self._products += output * prompt
        self._triangles += output * (output - 1.0) / 2.0
        self.useful = self._products + self._triangles
        self.arrivals_ns += state.request.arrival_ns

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
    """The batches that others may join, a row each, in the order they were opened.

    An arrival looks at all rows by some ten calls of numpy; what depends on a batch alone is worked
    out when the batch changes.

    Sums of times are whole numbers, exact while all members of a batch together have waited less
    than 2^53 ns, a hundred days.
    """

    def __init__(self) -> None:
        self._num_opened = 0
        # Those that have changed since somebody asked how long they take.
        self._changed: dict[QueuedBatch, None] = {}
        self._batches: list[QueuedBatch] = []
        self._numbers: list[int] = []
        # Size with one more, longest prompt, longest answer, half of that less one, useful tokens,
        # serving time in ns, infinite of those that are not compared.
        self._columns: _Floats = np.zeros((6, _ROWS))
        # Longest prompt, longest answer and half of that less one of whoever is compared with them.
        self._new: _Floats = np.zeros((3, 1))
        # Size, sum of arrivals.
        self._arrivals_ns: npt.NDArray[np.int64] = np.zeros((2, _ROWS), dtype=np.int64)

    def open(self, batch: QueuedBatch) -> None:
        """Let others join a batch, from now on."""
        if len(self._batches) == self._columns.shape[1]:
            self._columns = np.hstack((self._columns, np.zeros_like(self._columns)))
            self._arrivals_ns = np.hstack((self._arrivals_ns, np.zeros_like(self._arrivals_ns)))
        batch.number = self._num_opened
        batch.is_open = True
        self._num_opened += 1
        self._batches.append(batch)
        self._numbers.append(batch.number)
        self._write(batch)

    def add(self, batch: QueuedBatch, state: RequestState) -> None:
        """Let a request join a batch that is open."""
        batch.add(state)
        self._write(batch)

    def _row(self, batch: QueuedBatch) -> int:
        return bisect_left(self._numbers, batch.number)

    def _write(self, batch: QueuedBatch) -> None:
        row, columns, arrivals_ns = self._row(batch), self._columns, self._arrivals_ns
        columns[_SIZE, row] = batch.size + 1
        columns[_LONGEST, row] = batch.longest
        columns[_LAST, row] = batch.last
        columns[_HALF, row] = (batch.last - 1.0) / 2.0
        columns[_USEFUL, row] = batch.useful
        columns[_TIME_NS, row] = np.inf
        self._changed[batch] = None
        arrivals_ns[0, row] = batch.size
        arrivals_ns[1, row] = batch.arrivals_ns

    def note_started(self, batch: QueuedBatch) -> None:
        """Learn that somebody in a batch has got a seat: nobody joins any more once its first has.

        Until then it is open, but no longer among those that `highest_response_ratio` compares.
        """
        if not batch.is_open:
            return
        self._changed.pop(batch, None)
        row, end = self._row(batch), len(self._batches)
        if batch.is_queued:
            self._columns[_TIME_NS, row] = np.inf
            return
        batch.is_open = False
        del self._batches[row], self._numbers[row]
        for table in (self._columns, self._arrivals_ns):
            table[:, row : end - 1] = table[:, row + 1 : end]

    def _waste(self, prompt: int, output: float) -> _Floats:
        r"""Return the tokens that each would read for nothing, with one more request.

        Every row reads from its prompt, padded to the longest, to the batch's last step:
        :math:`n (G L + G(G-1)/2)` tokens with the largest G and L. Useful are
        :math:`\sum_i G_i L_i + G_i (G_i - 1) / 2`.
        """
        columns, new = self._columns[:, : len(self._batches)], self._new
        new[0, 0], new[1, 0], new[2, 0] = prompt, output, (output - 1.0) / 2.0
        largest: tuple[_Floats, ...] = tuple(np.maximum(columns[_LONGEST:_USEFUL], new))
        context, waste, half = largest
        context += half
        waste *= columns[_SIZE]
        waste *= context
        waste -= columns[_USEFUL]
        waste -= output * (prompt + (output - 1.0) / 2.0)
        return waste

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
        prompt, output = state.request.prompt_tokens, predicted_tokens(state)
        waste = self._waste(prompt, output)
        best = int(waste.argmin())
        batch = self._batches[best]
        peak_tokens = (batch.size + 1) * (max(batch.longest, prompt) + max(batch.last, output))
        if waste[best] < limit_tokens and (batch.size >= most or peak_tokens > capacity_tokens):
            size, longest, last = self._columns[:_HALF, : len(self._batches)]
            peaks_tokens = size * (np.maximum(longest, prompt) + np.maximum(last, output))
            waste[(size > most) | (peaks_tokens > capacity_tokens)] = np.inf
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
        batches = self._batches
        if not batches:
            return None
        times_ns = self._columns[_TIME_NS, : len(batches)]
        for batch in self._changed:
            if batch.is_whole:
                time_ns = serving_time_ns(batch.size, batch.longest, batch.last)
                times_ns[self._row(batch)] = time_ns
        self._changed.clear()
        size, arrivals_ns = self._arrivals_ns[:, : len(batches)]
        ratios = (size * now_ns - arrivals_ns) / size
        ratios /= times_ns
        ratios += 1.0
        first = int(ratios.argmax())
        if times_ns[first] == np.inf:
            ratios[times_ns == np.inf] = -np.inf
            first = int(ratios.argmax())
            if times_ns[first] == np.inf:
                return None
        best = float(ratios[first])
        is_best = ratios == best
        if np.count_nonzero(is_best) == 1:  # nearly always
            return best, batches[first]
        rows = np.flatnonzero(is_best & (times_ns < np.inf)).tolist()
        return best, min([batches[row] for row in rows], key=lambda batch: batch.waiting()[0].id)


def _is_new(state: RequestState) -> bool:
    return state.status is WAITS and state.first_scheduled_ns < 0
