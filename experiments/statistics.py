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


LEAST_SEEDS = 5
"""Seeds below which there is no verdict: an interval over fewer says little of what is usual."""

SMALLEST = 0.01
"""Smallest relative difference of interest: 1 %."""


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
    p_value : float
        Of no difference, two-sided; `corrected` makes it that of a whole family of comparisons.
    """

    change: float
    low: float
    high: float
    effect_size: float
    num_pairs: int
    p_value: float = math.nan


def paired_change(of: Sequence[float], against: Sequence[float]) -> Change:
    r"""Return by how much one thing differs from another over common random numbers.

    Parameters
    ----------
    of, against : sequence of float
        A value a replication; those at the same place had the same seed.

    Returns
    -------
    Change
        The geometric mean of the ratios, minus 1.

    Raises
    ------
    SpecError
        If there are fewer than two pairs: one run shows what happened, not what is usual.

    Notes
    -----
    Of positive values the interval is Student's t of :math:`\ln (x_r / y_r)`, so that it never
    says that something falls by more than 100 %. Where a value is zero or less it is that of the
    ratio of means (`compared`), cut at -100 % for values that cannot be negative.

    Examples
    --------
    >>> paired_change([11.0, 23.0, 30.0], [10.0, 20.0, 30.0]).change.__round__(3)
    0.082
    """
    if len(of) != len(against):
        raise SpecError(f"{len(of)} runs cannot be paired with {len(against)}")
    if len(of) < 2:
        raise SpecError(
            "no verdict from one run: it shows what one seed did, not what is usual; "
            "set replications to 5 or more"
        )
    if all(0.0 < value < math.inf for value in (*of, *against)):
        logs = [math.log(x / y) for x, y in zip(of, against, strict=True)]
        middle, half_width = estimate(logs)
        half = half_width or 0.0
        change, low, high = (math.expm1(one) for one in (middle, middle - half, middle + half))
    else:
        change, low, high = compared("increase", of, against)
        if all(value >= 0.0 for value in (*of, *against)):
            low = max(low, -1.0)
        logs = np.subtract(of, against).tolist()
    differences = np.subtract(of, against)
    mean, spread = float(differences.mean()), float(differences.std(ddof=1))
    constant = math.copysign(math.inf, mean) if mean else math.nan
    effect = mean / spread if spread else constant
    return Change(change, low, high, effect, len(of), _p_value(logs))


def _p_value(differences: Sequence[float]) -> float:
    """Return how likely a mean so far from zero is by chance (Student's t, two-sided)."""
    from scipy.special import stdtr

    n = len(differences)
    mean = math.fsum(differences) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (n - 1))
    if not math.isfinite(mean):
        return math.nan
    if spread == 0.0:
        return 0.0 if mean else 1.0
    return float(2.0 * stdtr(n - 1, -abs(mean) * math.sqrt(n) / spread))


def corrected(changes: Sequence[Change]) -> list[Change]:
    """Return changes with p-values that mind how many are looked at (Holm 1979).

    Parameters
    ----------
    changes : sequence of Change
        All that are told together.

    Returns
    -------
    list of Change
        In the same order. Of all verdicts made by them, the chance that one or more is wrong
        though nothing differs is 5 % at most. Intervals stay those of each alone.

    Examples
    --------
    >>> told = [Change(0.1, 0.0, 0.2, 1.0, 5, p) for p in (0.03, 0.01)]
    >>> [one.p_value for one in corrected(told)]
    [0.03, 0.02]
    """
    known = [i for i, one in enumerate(changes) if not math.isnan(one.p_value)]
    found = list(changes)
    largest = 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: changes[i].p_value)):
        largest = max(largest, min(1.0, changes[i].p_value * (len(known) - rank)))
        found[i] = changes[i]._replace(p_value=largest)
    return found


def is_decided(change: Change) -> bool:
    """Say whether two things differ: in enough runs, by enough, and not by chance."""
    by_chance = change.p_value > 1.0 - LEVEL  # an unknown one leaves it to the interval
    holds_zero = change.low <= 0.0 <= change.high
    enough = change.num_pairs >= LEAST_SEEDS and abs(change.change) >= SMALLEST
    return enough and not holds_zero and not by_chance


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
        "A beats B in M by x % [low, high]" if there are five seeds, the interval excludes no
        difference, the p-value is 5 % at most and the difference is 1 % at least; and then only.
        The per cent are of B: so much less for a metric that is better when it is small.

    Examples
    --------
    >>> verdict("sjf", "fcfs", "mean_ttft_ms", Change(-0.25, -0.3, -0.2, -4.0, 5, 0.001), False)
    'sjf beats fcfs in mean_ttft_ms by 25.0 % [20.0, 30.0]'
    """
    if math.isnan(change.change):
        return f"no verdict on {metric}: nothing to compare"
    if change.change == change.low == change.high == 0.0:
        return f"{of} and {against} are equal in {metric}"
    told = f"{100 * change.change:+.1f} % [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    if change.num_pairs < LEAST_SEEDS:
        return (
            f"no verdict on {of} and {against} in {metric} from {change.num_pairs} seeds, "
            f"{LEAST_SEEDS} are needed: {told}"
        )
    if change.low >= -SMALLEST and change.high <= SMALLEST:
        return f"{of} and {against} are equal within {SMALLEST:.0%} in {metric}: {told}"
    if not is_decided(change):
        if change.p_value > 1.0 - LEVEL and not change.low <= 0.0 <= change.high:
            told += f", but p = {change.p_value:.2f} among all that are told together"
        return f"no difference shown between {of} and {against} in {metric}: {told}"
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
