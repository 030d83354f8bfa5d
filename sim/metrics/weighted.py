"""Statistics of a list given as (value, how often) pairs, and of nothing."""

from collections.abc import Sequence

import numpy as np

from schedlab.sim.record.columns import Floats, Ints


class WeightedSample:
    """A list in which `values[i]` occurs `counts[i]` times.

    Parameters
    ----------
    values : ndarray of float, shape (n,)
        In any order; repetitions are fine.
    counts : ndarray of int, shape (n,)
        Each >= 0.

    Raises
    ------
    ValueError
        If the shapes differ or a count is negative.

    Notes
    -----
    Percentiles and median equal ``np.percentile`` (linear) and ``np.median`` of the expanded list
    to the last bit; mean and standard deviation equal those of the list up to rounding, because
    numpy's summation order over the list cannot be had without the list.

    Examples
    --------
    >>> sample = WeightedSample(np.array([20.0, 10.0]), np.array([3, 1]))
    >>> sample.median(), sample.mean(), sample.percentiles([100])
    (20.0, 17.5, [20.0])
    """

    def __init__(self, values: Floats, counts: Ints) -> None:
        if values.shape != counts.shape or values.ndim != 1:
            raise ValueError(f"values {values.shape} and counts {counts.shape} must be equal, 1-D")
        if len(counts) and counts.min() < 0:
            raise ValueError("counts must be >= 0")
        order = np.argsort(values, kind="stable")
        self._values = values[order].astype(np.float64)
        self._counts = counts[order]
        self._ends = np.cumsum(self._counts, dtype=np.int64)
        self.size = int(self._ends[-1]) if len(counts) else 0

    def mean(self) -> float:
        """Return the mean, NaN for an empty list."""
        if not self.size:
            return float("nan")
        # Not a dot product: BLAS rounds it differently with every number of threads.
        return float((self._values * self._counts).sum() / self.size)

    def std(self) -> float:
        """Return the population standard deviation (ddof 0), NaN for an empty list."""
        if not self.size:
            return float("nan")
        squares = (self._values - self.mean()) ** 2
        return float(np.sqrt((squares * self._counts).sum() / self.size))

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
        a = self._at(below.astype(np.int64))
        b = self._at(np.minimum(below.astype(np.int64) + 1, self.size - 1))
        step = b - a
        result: list[float] = np.where(t >= 0.5, b - step * (1 - t), a + step * t).tolist()
        return result

    def _at(self, index: Ints) -> Floats:
        """Return the elements of the sorted, expanded list at these positions."""
        return self._values[np.searchsorted(self._ends, index, side="right")]


def ratio(amount: float, per: float) -> float:
    """Return one over the other, NaN if there is nothing to divide by."""
    return amount / per if per > 0 else float("nan")
