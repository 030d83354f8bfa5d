"""Describe a trace in numbers: arrivals, lengths, their correlation, shared prefixes.

Conventions: percentiles by linear interpolation; standard deviations and variances divide by n;
the coefficient of variation (CV) is standard deviation over mean; fits are maximum likelihood with
location 0; KS is the Kolmogorov-Smirnov distance between data and fit, to be read as a distance (0
is perfect), not as a test.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.traces.prefix_statistics import describe_prefixes
from schedlab.traces.session_statistics import describe_sessions
from schedlab.traces.trace import Trace
from schedlab.traces.turns import session_starts

Float64 = npt.NDArray[np.float64]

FANO_WINDOW_S = 10
MINUTE_S = 60
_ARRIVAL_NUMBERS = (
    "rate",
    "rate_per_minute_min",
    "rate_per_minute_max",
    "cv",
    "gamma_shape_from_cv",
    "zero_gap_share",
    "gamma_shape",
    "gamma_scale_s",
    "gamma_ks",
    "exponential_ks",
    "fano_10s",
)


def describe(trace: Trace) -> dict[str, Any]:
    """Return the statistics of `trace` as plain numbers in nested dictionaries.

    Parameters
    ----------
    trace : Trace
        At least one request; what needs more (a gap, a spread) is `None` where there is less.

    Returns
    -------
    dict
        ``num_requests``; ``arrivals`` (see `describe_arrivals`) or `None`; ``prompt_tokens`` and
        ``output_tokens`` (see `describe_lengths`); ``correlation`` (see `describe_correlation`);
        ``prefix`` (see `schedlab.traces.prefix_statistics.describe_prefixes`) or `None`. Of
        sessions ``arrivals`` are those of their starts, and there is ``sessions`` (see
        `schedlab.traces.session_statistics.describe_sessions`).
    """
    if trace.turns is not None:
        return _describe_sessions(trace)
    return {
        "num_requests": len(trace),
        "arrivals": None if trace.arrival_ns is None else describe_arrivals(trace),
        "prompt_tokens": describe_lengths(trace.prompt_tokens),
        "output_tokens": describe_lengths(trace.output_tokens),
        "correlation": describe_correlation(trace),
        "prefix": describe_prefixes(trace) if trace.prefix and len(trace.prefix.ids) else None,
    }


def _describe_sessions(trace: Trace) -> dict[str, Any]:
    """Describe a trace whose requests wait for answers."""
    assert trace.session is not None
    starts = session_starts(trace.session)
    timed = trace.arrival_ns is not None and len(starts) > 1
    first = replace(trace, turns=None).take(starts)
    return {
        "num_requests": len(trace),
        "arrivals": describe_arrivals(first) if timed else None,
        "prompt_tokens": describe_lengths(trace.prompt_tokens),
        "output_tokens": describe_lengths(trace.output_tokens),
        "correlation": describe_correlation(trace),
        "prefix": None,
        "sessions": describe_sessions(trace),
    }


def describe_arrivals(trace: Trace) -> dict[str, Any]:
    """Return rate and burstiness of the arrivals.

    Returns
    -------
    dict
        ``duration_s`` (first to last arrival); ``rate`` = (n - 1) / duration;
        ``rate_per_minute_min`` and ``_max`` over whole minutes from the first arrival (n over
        duration if there is none); ``cv`` of the gaps; ``gamma_shape_from_cv`` = 1 / CV**2, what
        a gamma process needs to be as bursty (1 = Poisson, smaller = burstier);
        ``zero_gap_share``; and of the gaps that are not zero ``gamma_shape``, ``gamma_scale_s``,
        ``gamma_ks`` and ``exponential_ks``; ``fano_10s`` = variance over mean of the counts in
        10 s windows from the first arrival, the last one, cut short, included.
    """
    arrival_s = trace.require_arrivals() / 1e9
    arrival_s = arrival_s - arrival_s[0]
    duration_s = float(arrival_s[-1])
    stats: dict[str, Any] = {"duration_s": duration_s, **dict.fromkeys(_ARRIVAL_NUMBERS)}
    if duration_s == 0:
        return stats
    gaps_s = np.diff(arrival_s)
    minutes = np.bincount((arrival_s // MINUTE_S).astype(int))[:-1] / MINUTE_S
    if len(minutes) == 0:
        minutes = np.array([len(trace) / duration_s])
    windows = np.bincount((arrival_s // FANO_WINDOW_S).astype(int))
    cv = float(gaps_s.std() / gaps_s.mean())
    stats.update(
        rate=(len(trace) - 1) / duration_s,
        rate_per_minute_min=float(minutes.min()),
        rate_per_minute_max=float(minutes.max()),
        cv=cv,
        gamma_shape_from_cv=1 / cv**2 if cv > 0 else None,
        zero_gap_share=float((gaps_s == 0).mean()),
        fano_10s=float(windows.var() / windows.mean()),
    )
    positive = gaps_s[gaps_s > 0]
    fit = fit_gamma(positive)
    stats.update(gamma_shape=fit["shape"], gamma_scale_s=fit["scale"], gamma_ks=fit["ks"])
    stats["exponential_ks"] = _ks(-np.expm1(-np.sort(positive) / positive.mean()))
    return stats


def describe_lengths(tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return moments and percentiles of token counts, and how well two families fit them.

    Returns
    -------
    dict
        ``mean``, ``std``, ``p50``, ``p90``, ``p99``, ``max``, ``lognormal`` (mu, sigma, ks) and
        ``gamma`` (shape, scale, ks).
    """
    p50, p90, p99 = np.percentile(tokens, [50, 90, 99])
    values = tokens.astype(np.float64)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(tokens.max()),
        "lognormal": fit_lognormal(values),
        "gamma": fit_gamma(values),
    }


def describe_correlation(trace: Trace) -> dict[str, float | None]:
    """Return the correlation of prompt and output lengths: Pearson, Spearman, Pearson of logs.

    Each is `None` where a length does not vary.
    """
    prompt = trace.prompt_tokens.astype(np.float64)
    output = trace.output_tokens.astype(np.float64)
    return {
        "pearson": _pearson(prompt, output),
        "spearman": _pearson(_ranks(prompt), _ranks(output)),
        "log_pearson": _pearson(np.log(prompt), np.log(output)),
    }


def fit_lognormal(values: Float64) -> dict[str, float | None]:
    """Return mu and sigma of the natural logarithm, and the KS distance of the fit."""
    from scipy.special import ndtr

    logs = np.log(np.sort(values))
    mu, sigma = float(logs.mean()), float(logs.std())
    ks = _ks(ndtr((logs - mu) / sigma)) if sigma > 0 else None
    return {"mu": mu, "sigma": sigma, "ks": ks}


def fit_gamma(values: Float64) -> dict[str, float | None]:
    """Return shape and scale of the gamma fit and its KS distance; `None` without any spread.

    Notes
    -----
    The shape k solves ``log(k) - digamma(k) = log(mean) - mean(log)``, here by Newton steps from
    Minka's approximation ("Estimating a Gamma distribution", 2002); the scale is mean / k.
    """
    from scipy.special import digamma, gammainc, polygamma

    mean = float(values.mean())
    spread = math.log(mean) - float(np.log(values).mean())
    if spread < 1e-12:
        return {"shape": None, "scale": None, "ks": None}
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    for _ in range(20):
        slope = 1 / shape - float(polygamma(1, shape))
        step = (math.log(shape) - float(digamma(shape)) - spread) / slope
        # For a huge shape both terms cancel to rounding noise; Minka's value is exact enough.
        if not abs(step) < 0.5 * shape:
            break
        shape -= step
        if abs(step) < 1e-12 * shape:
            break
    scale = mean / shape
    return {"shape": shape, "scale": scale, "ks": _ks(gammainc(shape, np.sort(values) / scale))}


def _ks(fitted: Float64) -> float:
    """Return the KS distance, given the fitted distribution function at the sorted values."""
    n = len(fitted)
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - fitted).max(), (fitted - steps[:-1]).max()))


def _ranks(values: Float64) -> Float64:
    """Return ranks, ties sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Float64 = (last - (counts - 1) / 2)[inverse]
    return ranks


def _pearson(x: Float64, y: Float64) -> float | None:
    """Return the correlation coefficient, or `None` if one side is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / norm if norm > 0 else None
