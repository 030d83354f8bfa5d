"""Distributions of times: how long users think and tools work.

Like a length distribution (`schedlab.traces.lengths`) each is its own quantile function: it turns
numbers uniform in [0, 1) into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError

Float64 = npt.NDArray[np.float64]
Durations = Callable[[Float64], Float64]
"""From u of shape (n,) to seconds of shape (n,)."""

_LONGEST_S = 1e9
_BELOW_ONE = math.nextafter(1.0, 0.0)


def fixed(seconds: float) -> Durations:
    """Return a distribution that is always `seconds`."""
    _check(seconds=seconds)
    return lambda u: np.full(len(u), float(seconds))


def uniform(low_s: float, high_s: float) -> Durations:
    """Return the times from `low_s` to `high_s`, equally likely."""
    _check(low_s=low_s, high_s=high_s)
    if high_s < low_s:
        raise SpecError(f"uniform times need low_s <= high_s, got {low_s} and {high_s}")
    return lambda u: low_s + u * (high_s - low_s)


def exponential(mean_s: float, cap_s: float | None = None) -> Durations:
    """Return an exponential distribution of mean `mean_s` before it is capped at `cap_s`."""
    _check(mean_s=mean_s)
    return _capped(lambda u: -mean_s * np.log1p(-u), cap_s)


def lognormal(median_s: float, sigma: float, cap_s: float | None = None) -> Durations:
    """Return a lognormal distribution; `sigma` is that of the natural logarithm."""
    _check(median_s=median_s, sigma=sigma)

    def quantile(u: Float64) -> Float64:
        from scipy.special import ndtri

        with np.errstate(over="ignore"):  # too long for a float is beyond every cap
            result: Float64 = median_s * np.exp(sigma * ndtri(np.maximum(u, 1e-300)))
        return result

    return _capped(quantile, cap_s)


DURATIONS: dict[str, Callable[..., Durations]] = {
    "fixed": fixed,
    "uniform": uniform,
    "exponential": exponential,
    "lognormal": lognormal,
}


def _capped(quantile: Durations, cap_s: float | None) -> Durations:
    if cap_s is not None:
        _check(cap_s=cap_s)
    longest_s = _LONGEST_S if cap_s is None else cap_s
    return lambda u: np.minimum(quantile(np.minimum(u, _BELOW_ONE)), longest_s)


def _check(**values: float) -> None:
    """Raise for the first value that is no time."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and 0 <= value <= _LONGEST_S):
            raise SpecError(f"{name} must be a number of seconds, 0 to 1e9, got {value!r}")
