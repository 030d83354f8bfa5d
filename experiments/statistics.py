"""How sure a number is: intervals over replications, over batches of one run, and of pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from schedlab.sim.errors import SpecError
from schedlab.sim.text import number

LEVEL = 0.95
"""Confidence of every interval."""


class Estimate(NamedTuple):
    """A metric over the replications of a setting.

    Attributes
    ----------
    mean : float
        Mean over replications; NaN if there was nothing to measure.
    half_width : float or None
        Half the 95 % confidence interval (Student's t); None for one replication.
    """

    mean: float
    half_width: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and 95 % confidence half-width of independent replications.

    Parameters
    ----------
    values : sequence of float
        One value a replication.

    Returns
    -------
    Estimate
        ``half_width = t(0.975, n - 1) * s / sqrt(n)`` with the sample standard deviation s.

    Examples
    --------
    >>> estimate([1.0, 2.0, 3.0]).half_width.__round__(3)
    2.484
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None)
    from scipy.special import stdtrit

    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Estimate(mean, float(stdtrit(n - 1, (1 + LEVEL) / 2)) * math.sqrt(variance / n))


def compared(
    compare: str, of: Sequence[float], against: Sequence[float]
) -> tuple[float, float, float]:
    r"""Return a comparison of paired replications with its 95 % confidence interval.

    Parameters
    ----------
    compare : {"value", "ratio", "increase", "reduction", "difference"}
        What is compared.
    of, against : sequence of float
        A value a replication; replications at the same place had the same seed. `against` is
        empty for a value.

    Returns
    -------
    estimate, low, high : float
        NaN if a value is NaN, or a ratio has nothing below it.

    Notes
    -----
    Values and differences are means with Student's t. The ratio is that of the means, R, with
    the interval of the classical ratio estimator: the residuals
    :math:`d_r = (x_r - R y_r) / \bar y` have mean 0, and the half-width is
    :math:`t_{0.975, n-1}\, s_d / \sqrt n` (Cochran, Sampling Techniques, 6.4). Pairing is what
    makes it narrow: what a seed does to both sides cancels in the residual.

    Examples
    --------
    >>> compared("ratio", [2.0, 4.0], [1.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    if not all(math.isfinite(value) for value in (*of, *against)):
        return math.nan, math.nan, math.nan
    if compare == "value":
        middle, half = estimate(of)
    elif compare == "difference":
        middle, half = estimate([x - y for x, y in zip(of, against, strict=True)])
    else:
        below = math.fsum(against) / len(against)
        if not below > 0.0:
            return math.nan, math.nan, math.nan
        middle = math.fsum(of) / len(of) / below
        half = estimate([(x - middle * y) / below for x, y in zip(of, against, strict=True)])[1]
        if compare != "ratio":
            middle = middle - 1.0 if compare == "increase" else 1.0 - middle
    half = math.inf if half is None else half
    return middle, middle - half, middle + half


class Change(NamedTuple):
    """How a metric differs between two things that met the same random numbers.

    Attributes
    ----------
    change : float
        Relative to the second: 0.1 is 10 % more. NaN if there is nothing to relate it to.
    low, high : float
        Its 95 % confidence interval.
    effect_size : float
        Mean of the paired differences over their standard deviation (Cohen's d_z): how far apart
        two runs of one seed are, in units of how much that varies from seed to seed. Infinite
        if it does not vary, NaN if there is no difference at all.
    num_pairs : int
        Seeds.
    """

    change: float
    low: float
    high: float
    effect_size: float
    num_pairs: int


def paired_change(of: Sequence[float], against: Sequence[float]) -> Change:
    """Return by how much one thing differs from another over common random numbers.

    Parameters
    ----------
    of, against : sequence of float
        A value a replication; those at the same place had the same seed.

    Returns
    -------
    Change
        Ratio of means minus 1, with the interval of `compared`.

    Raises
    ------
    SpecError
        If there are fewer than two pairs: one run shows what happened, not what is usual.

    Examples
    --------
    >>> paired_change([11.0, 23.0, 30.0], [10.0, 20.0, 30.0]).change.__round__(3)
    0.067
    """
    if len(of) != len(against):
        raise SpecError(f"{len(of)} runs cannot be paired with {len(against)}")
    if len(of) < 2:
        raise SpecError(
            "no verdict from one run: it shows what one seed did, not what is usual; "
            "set replications to 5 or more"
        )
    change, low, high = compared("increase", of, against)
    differences = np.subtract(of, against)
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    constant = math.copysign(math.inf, mean) if mean else math.nan
    effect = mean / spread if spread else constant
    return Change(change, low, high, effect, len(of))


def verdict(of: str, against: str, metric: str, change: Change, larger: bool | None) -> str:
    """Say in a sentence how two things compare.

    Parameters
    ----------
    of, against : str
        Their names.
    metric : str
        What was measured.
    change : Change
        How `of` differs from `against`.
    larger : bool or None
        Whether larger is better; None if neither is.

    Returns
    -------
    str
        "A beats B in M by x % [low, high]" if the interval excludes no difference, and then
        only. The per cent are of B: so much less for a metric that is better when it is small.

    Examples
    --------
    >>> verdict("sjf", "fcfs", "mean_ttft_ms", Change(-0.25, -0.3, -0.2, -4.0, 5), False)
    'sjf beats fcfs in mean_ttft_ms by 25.0 % [20.0, 30.0]'
    """
    if math.isnan(change.change):
        return f"no verdict on {metric}: nothing to compare"
    if change.low <= 0.0 <= change.high:
        if change.low == change.high:
            return f"{of} and {against} are equal in {metric}"
        return (
            f"no difference shown between {of} and {against} in {metric}: "
            f"{100 * change.change:+.1f} % [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
        )
    more = change.change > 0
    ends = sorted((100 * abs(change.low), 100 * abs(change.high)))
    amount = f"{100 * abs(change.change):.1f} % [{ends[0]:.1f}, {ends[1]:.1f}]"
    if larger is None:
        return f"{metric} of {of} is {amount} {'above' if more else 'below'} that of {against}"
    if more == larger:
        return f"{of} beats {against} in {metric} by {amount}"
    return f"{of} is worse than {against} in {metric} by {amount}"


class BatchMeans(NamedTuple):
    """A mean over time of one long run, with an interval from its batches.

    Attributes
    ----------
    mean : float
        Over all values.
    half_width : float
        Half the 95 % confidence interval.
    num_batches : int
        Batches.
    lag1 : float
        Correlation of each batch with the next.
    long_enough : bool
        Whether that correlation is no larger than chance makes it; if not, the batches are
        too short, the interval is too narrow and the run should be longer.
    """

    mean: float
    half_width: float
    num_batches: int
    lag1: float
    long_enough: bool


def batch_means(values: npt.ArrayLike, num_batches: int = 20) -> BatchMeans:
    r"""Return a mean over one long run with a confidence interval that minds correlation.

    Parameters
    ----------
    values : array_like of float, shape (n,)
        In order of time, e.g. the latencies of requests by arrival, warm-up left out.
    num_batches : int
        Batches of equal length; 10 to 30 are usual. Values at the start that fill no batch are
        left out.

    Returns
    -------
    BatchMeans
        Successive requests wait in the same queue, so that treating them as independent gives an
        interval that is far too narrow; means over long batches are nearly independent.

    Raises
    ------
    SpecError
        If a batch would hold fewer than 10 values, or there are fewer than 5 batches.

    Notes
    -----
    With the batch means :math:`\bar y_1 .. \bar y_b` the half-width is
    :math:`t_{0.975, b-1}\, s_{\bar y} / \sqrt b`. ``long_enough`` is
    :math:`r_1 \le 1.64 / \sqrt b`, a one-sided test of their lag-1 correlation at 5 %.

    References
    ----------
    Law, Simulation Modeling and Analysis, 5th edition, section 9.5.3.
    """
    sample = np.asarray(values, dtype=np.float64)
    size = len(sample) // max(num_batches, 1)
    if num_batches < 5 or size < 10:
        raise SpecError(
            f"batch means need 5 batches of 10 values at least; {len(sample)} values in "
            f"{num_batches} batches are too few"
        )
    means = sample[len(sample) - size * num_batches :].reshape(num_batches, size).mean(axis=1)
    centre = estimate(means.tolist())
    assert centre.half_width is not None
    away = means - centre.mean
    power = float(np.sum(away**2))
    lag1 = float(np.sum(away[:-1] * away[1:])) / power if power else 0.0
    return BatchMeans(
        centre.mean, centre.half_width, num_batches, lag1, lag1 <= 1.64 / math.sqrt(num_batches)
    )


def with_interval(mean: float, half_width: float | None, scale: float = 1.0) -> str:
    """Return a mean with half its interval, in as many digits as tell something.

    Parameters
    ----------
    mean : float
        A dash is shown where it is NaN.
    half_width : float or None
        None, zero or infinite: no interval is shown.
    scale : float
        Both are multiplied by it.

    Examples
    --------
    >>> with_interval(1234.567, 45.6), with_interval(0.12345, None), with_interval(7.0, None)
    ('1,235 ±46', '0.123', '7')
    """
    value = mean * scale
    if not math.isfinite(value):
        return number(value)
    half = half_width * scale if half_width is not None and math.isfinite(half_width) else 0.0
    # Two digits of the interval or three of the value, whichever are fewer.
    guide = max(10 * half, abs(value))
    whole = float(value).is_integer() and not half
    digits = 0 if whole or not guide else min(max(0, 2 - math.floor(math.log10(guide))), 4)
    text = f"{value:,.{digits}f}"
    return f"{text} ±{half:,.{digits}f}" if half else text
