"""Length distributions: how long prompts and outputs are.

A length distribution is its own quantile function: it turns numbers u, uniform in [0, 1), into
token counts, each >= 1. So one draw costs one random number whatever the distribution, and drawing
in pieces gives the same lengths as drawing at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.traces.trace import Trace

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Lengths = Callable[[Float64], Int64]
"""From u of shape (n,) to tokens of shape (n,)."""
LengthPairs = Callable[[Float64], tuple[Int64, Int64]]
"""From u of shape (n, 2) to prompt and output tokens, each of shape (n,)."""

MOST_TOKENS = 2**40
"""No request is longer."""

# The largest float64 below 1: keeps the quantile functions finite where u rounds to 1.
_BELOW_ONE = math.nextafter(1.0, 0.0)


def fixed(tokens: int) -> Lengths:
    """Return a distribution that is always `tokens`."""
    _check(tokens=tokens)
    return lambda u: np.full(len(u), tokens, dtype=np.int64)


def uniform(low: int, high: int) -> Lengths:
    """Return the whole numbers from `low` to `high`, both included, equally likely."""
    _check(low=low, high=high)
    if high < low:
        raise SpecError(f"uniform lengths need low <= high, got {low} and {high}")
    return lambda u: low + np.floor(np.minimum(u, _BELOW_ONE) * (high - low + 1)).astype(np.int64)


def exponential(mean: float, cap: int | None = None) -> Lengths:
    """Return an exponential distribution of `mean` tokens before rounding and capping at `cap`."""
    _check(mean=mean)
    return _whole(lambda u: -mean * np.log1p(-u), cap)


def lognormal(mu: float, sigma: float, cap: int | None = None) -> Lengths:
    """Return a lognormal distribution; `mu` and `sigma` are those of the natural logarithm."""
    _check(sigma=sigma)
    if not math.isfinite(mu):
        raise SpecError(f"mu must be a number, got {mu!r}")

    def quantile(u: Float64) -> Float64:
        from scipy.special import ndtri

        with np.errstate(over="ignore"):  # too long for a float is beyond every cap
            result: Float64 = np.exp(mu + sigma * ndtri(u))
        return result

    return _whole(quantile, cap)


def gamma(shape: float, scale: float, cap: int | None = None) -> Lengths:
    """Return a gamma distribution; its mean is ``shape * scale`` tokens."""
    _check(shape=shape, scale=scale)

    def quantile(u: Float64) -> Float64:
        from scipy.special import gammaincinv

        result: Float64 = scale * gammaincinv(shape, u)
        return result

    return _whole(quantile, cap)


def quantile_table(probabilities: Sequence[float], tokens: Sequence[float]) -> Lengths:
    """Return the distribution whose quantiles are given, linear in between.

    Parameters
    ----------
    probabilities : sequence of float
        Rising from 0 to 1.
    tokens : sequence of float
        Quantile at each probability, not falling, the first >= 1.

    Raises
    ------
    SpecError
        If the table is no quantile function.
    """
    try:
        p = np.array(probabilities, dtype=np.float64)
        q = np.array(tokens, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SpecError(f"a quantile table needs two lists of numbers ({error})") from None
    if p.ndim != 1 or q.ndim != 1:
        raise SpecError("a quantile table needs two lists of numbers, not of lists")
    if len(p) != len(q) or len(p) < 2:
        raise SpecError(f"a quantile table needs two equal columns, got {len(p)} and {len(q)}")
    if p[0] != 0 or p[-1] != 1 or (np.diff(p) <= 0).any():
        raise SpecError("the probabilities of a quantile table must rise from 0 to 1")
    if not np.isfinite(q).all() or q[0] < 1 or (np.diff(q) < 0).any():
        raise SpecError("the quantiles of a table must be >= 1 and must not fall")
    return _whole(lambda u: np.interp(u, p, q), None)


def independent(prompt: Lengths, output: Lengths) -> LengthPairs:
    """Return pairs whose prompt and output lengths have nothing to do with each other."""
    return lambda u: (prompt(u[:, 0]), output(u[:, 1]))


def rows_of(trace: Trace) -> LengthPairs:
    """Return the pairs of `trace`, drawn with replacement: every row equally likely.

    It keeps what no parametric family has: the shape of real lengths, and whatever prompt and
    output lengths have to do with each other.
    """

    def draw(u: Float64) -> tuple[Int64, Int64]:
        row = np.floor(np.minimum(u[:, 0], _BELOW_ONE) * len(trace)).astype(np.int64)
        return trace.prompt_tokens[row], trace.output_tokens[row]

    return draw


LENGTHS: dict[str, Callable[..., Lengths]] = {
    "fixed": fixed,
    "uniform": uniform,
    "exponential": exponential,
    "lognormal": lognormal,
    "gamma": gamma,
    "quantile_table": quantile_table,
}


def _whole(quantile: Callable[[Float64], Float64], cap: int | None) -> Lengths:
    """Return the distribution rounded to whole tokens, at least 1 and at most `cap`."""
    if cap is not None:
        _check(cap=cap)

    def lengths(u: Float64) -> Int64:
        tokens = np.maximum(1.0, np.rint(quantile(np.minimum(u, _BELOW_ONE))))
        return np.minimum(tokens, MOST_TOKENS if cap is None else cap).astype(np.int64)

    return lengths


def _check(**values: float) -> None:
    """Raise for the first value that is not a positive, finite number."""
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise SpecError(f"{name} must be a positive number, got {value!r}")
        if name in ("tokens", "low", "high", "cap") and value != int(value):
            raise SpecError(f"{name} must be a whole number of tokens, got {value!r}")
        if name in ("tokens", "low", "high", "cap", "mean") and value > MOST_TOKENS:
            raise SpecError(f"{name} must be at most {MOST_TOKENS:,} tokens, got {value:g}")
