"""Statistics of a list given as (value, how often) pairs, and of nothing."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from schedlab.sim.record.columns import Floats, Ints, Pairs

_BITS_A_PASS = 20


class WeightedSample:
    """A list in which each value, a whole number >= 0, occurs so many times.

    Parameters
    ----------
    batches : callable
        Gives the (values, counts) pairs of arrays, some rows at a time, anew at each call; in any
        order, repetitions are fine. It is called a few times if there is more than one batch.
    per : float
        Statistics are those of value / `per`.

    Raises
    ------
    ValueError
        If the shapes differ, or a value or count is negative.

    Notes
    -----
    Percentiles and median equal ``np.percentile`` (linear) and ``np.median`` of the expanded list
    to the last bit, however many batches there are: elements are found by counting, 20 bits of the
    value a pass. Mean and standard deviation equal those of the list up to rounding, because
    numpy's summation order over the list cannot be had without the list.

    Examples
    --------
    >>> sample = WeightedSample(lambda: [(np.array([20, 10]), np.array([3, 1]))])
    >>> sample.median(), sample.mean(), sample.percentiles([100])
    (20.0, 17.5, [20.0])
    """

    def __init__(self, batches: Callable[[], Iterable[Pairs]], per: float = 1.0) -> None:
        self._batches = batches
        self._per = per
        self._sorted: tuple[Floats, Ints, Ints] | None = None
        self._known: dict[int, int] = {}
        self.size = self._most = num_batches = 0
        for values, counts in batches():
            if values.shape != counts.shape or values.ndim != 1:
                raise ValueError(
                    f"values {values.shape} and counts {counts.shape} must be equal, 1-D"
                )
            if len(values) and min(values.min(), counts.min()) < 0:
                raise ValueError("values and counts must be >= 0")
            self.size += int(counts.sum())
            self._most = max(self._most, int(values.max()) if len(values) else 0)
            num_batches += 1
            first = values, counts
        if num_batches == 1:
            order = np.argsort(first[0], kind="stable")
            counts = first[1][order]
            self._sorted = first[0][order] / per, counts, np.cumsum(counts, dtype=np.int64)

    def mean(self) -> float:
        """Return the mean, NaN for an empty list."""
        if not self.size:
            return float("nan")
        # Not a dot product: BLAS rounds it differently with every number of threads.
        sums = [float((values * counts).sum()) for values, counts in self._scaled()]
        return math.fsum(sums) / self.size

    def std(self) -> float:
        """Return the population standard deviation (ddof 0), NaN for an empty list."""
        if not self.size:
            return float("nan")
        mean = self.mean()
        sums = [float(((values - mean) ** 2 * counts).sum()) for values, counts in self._scaled()]
        return math.sqrt(math.fsum(sums) / self.size)

    def median(self) -> float:
        """Return the middle value, or the mean of the two middle ones; NaN for an empty list."""
        if not self.size:
            return float("nan")
        middle = self._at(np.array([(self.size - 1) // 2, self.size // 2]))
        return float(np.mean(middle) if self.size % 2 == 0 else middle[0])

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return the percentiles by linear interpolation, NaN for an empty list.

        Notes
        -----
        The position is ``h = (n - 1) * p / 100`` and the result ``a + (b - a) * t`` between the
        neighbours, written as ``b - (b - a) * (1 - t)`` from t = 0.5 on, as numpy does.
        """
        if not self.size:
            return [float("nan")] * len(percents)
        position = (self.size - 1) * (np.asarray(percents, dtype=np.float64) / 100.0)
        below = np.floor(position)
        t = position - below
        neighbours = np.minimum([below, below + 1], self.size - 1).astype(np.int64)
        a, b = self._at(neighbours.ravel()).reshape(neighbours.shape)
        step = b - a
        result: list[float] = np.where(t >= 0.5, b - step * (1 - t), a + step * t).tolist()
        return result

    def _scaled(self) -> Iterator[tuple[Floats, Ints]]:
        if self._sorted is not None:
            yield self._sorted[:2]
        else:
            yield from ((values / self._per, counts) for values, counts in self._batches())

    def _at(self, index: Ints) -> Floats:
        """Return the elements of the sorted, expanded list at these positions."""
        if self._sorted is not None:
            values, _, ends = self._sorted
            return values[np.searchsorted(ends, index, side="right")]
        self._select([i for i in set(index.tolist()) if i not in self._known])
        return np.array([self._known[i] for i in index.tolist()]) / self._per

    def _select(self, places: Sequence[int]) -> None:
        """Find the elements at some places of the sorted list without sorting it.

        Each is known to lie in [low, low + 2^bits); a pass counts how many there are in each of
        up to 2^20 equal parts of that span, and so narrows it down to one of them.
        """
        bits = self._most.bit_length()
        lows = {0: {place: place for place in places}}
        """Start of a span to the elements sought in it: their place in the list, and inside."""
        while bits and places:
            coarse = max(bits - _BITS_A_PASS, 0)
            counts = {low: np.zeros(1 << (bits - coarse), dtype=np.int64) for low in lows}
            for values, weights in self._batches():
                for low, count in counts.items():
                    inside = (values >= low) & (values < low + (1 << bits))
                    part = (values[inside] - low) >> coarse
                    np.add.at(count, part, weights[inside])
            narrower: dict[int, dict[int, int]] = {}
            for low, sought in lows.items():
                ends = np.cumsum(counts[low])
                for place, rank in sought.items():
                    part_of = int(np.searchsorted(ends, rank, side="right"))
                    before = int(ends[part_of] - counts[low][part_of])
                    span = narrower.setdefault(low + (part_of << coarse), {})
                    span[place] = rank - before
            lows, bits = narrower, coarse
        for low, sought in lows.items():
            self._known |= dict.fromkeys(sought, low)


def ratio(amount: float, per: float) -> float:
    """Return one over the other, NaN if there is nothing to divide by."""
    return amount / per if per > 0 else float("nan")
