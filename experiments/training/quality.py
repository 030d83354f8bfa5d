"""How well predictions order and size answers, with intervals and a trivial competitor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from schedlab.policies.predictors.predictor import Floats
from schedlab.sim.rng import stream
from schedlab.traces import rank_correlation

NUM_RESAMPLES = 400
LEVEL = 0.95
_ROWS_AT_ONCE = 500

Rows = npt.NDArray[np.int64]
Names = npt.NDArray[np.str_]
Drawn = npt.NDArray[np.float32]


def kendall_tau(predicted: npt.ArrayLike, true: npt.ArrayLike) -> float | None:
    """Return Kendall's tau-b; `None` where one side is constant.

    Parameters
    ----------
    predicted, true : array_like of float, shape (n,)
        Two orders of the same answers.
    """
    tau = rank_correlation.kendall_tau(predicted, true)
    return None if np.isnan(tau) else tau


def pairs_right(tau: float | None, predicted: npt.ArrayLike, true: npt.ArrayLike) -> float | None:
    r"""Return the share of pairs that a prediction orders rightly, equal ones counted as half.

    Of all pairs with different true lengths; what a scheduler gets that breaks ties at random.
    tau-b leaves pairs that the prediction holds equal out, and so flatters one of few values.

    Parameters
    ----------
    tau : float or None
        Kendall's tau-b of the two.
    predicted, true : array_like of float, shape (n,)
        Two orders of the same answers.

    Notes
    -----
    :math:`1/2 + (C - D) / 2 N_y`, where tau-b is :math:`(C - D) / \sqrt{N_x N_y}` with the numbers
    N of pairs that are not equal in prediction and truth.
    """
    if tau is None:
        return None
    return 0.5 + 0.5 * tau * float(np.sqrt(_unequal_pairs(predicted) / _unequal_pairs(true)))


def _unequal_pairs(values: npt.ArrayLike) -> float:
    same = np.unique(np.asarray(values), return_counts=True)[1].astype(np.float64)
    return float((same.sum() ** 2 - (same**2).sum()) / 2)


def application_means(true: Floats, applications: Names, asked: Names) -> Floats:
    """Return the mean length of each application's training answers, for each one asked.

    Applications that training did not see get the mean of all.
    """
    means = {name: float(true[applications == name].mean()) for name in np.unique(applications)}
    overall = float(true.mean())
    return np.array([means.get(str(name), overall) for name in asked])


def quality(
    predicted: Floats, true: Floats, applications: Names, baseline: Floats | None, seed: int = 0
) -> dict[str, Any]:
    """Return rank correlations with bootstrap intervals, overall and within each application.

    Parameters
    ----------
    predicted, true : ndarray of float64, shape (n,)
        Lengths in tokens.
    applications : ndarray of str, shape (n,)
        Where the prompts come from.
    baseline : ndarray of float64, shape (n,), optional
        A competitor's predictions, e.g. `application_means`.
    seed : int
        Of the resampling.

    Returns
    -------
    dict
        ``kendall_tau`` (tau-b), ``pairs_right`` (see `pairs_right`) and their intervals,
        ``mean_absolute_error_tokens``, ``by_application``, and for a baseline its own
        (``application_mean``) and ``gain``: the differences of both, resampled in pairs.
        Intervals are 95 % percentile bootstrap over prompts.
    """
    rng = stream(seed, "bootstrap")
    columns = [predicted] if baseline is None else [predicted, baseline]
    drawn = _resampled(columns, true, rng)
    found: dict[str, Any] = _figures(predicted, true, drawn[0])
    if baseline is not None:
        found["application_mean"] = own = _figures(baseline, true, drawn[1])
        if found["kendall_tau"] is not None and own["kendall_tau"] is not None:
            gain = drawn[0] - drawn[1]
            found["gain"] = {
                "kendall_tau": found["kendall_tau"] - own["kendall_tau"],
                "interval": _interval(gain[:, 0]),
                "pairs_right": found["pairs_right"] - own["pairs_right"],
                "pairs_right_interval": _interval(gain[:, 1]),
            }
    names = np.unique(applications)
    found["by_application"] = {}
    for name in names if len(names) > 1 else []:
        rows = np.flatnonzero(applications == name)
        inside = _resampled([predicted[rows]], true[rows], rng)[0]
        found["by_application"][str(name)] = _figures(predicted[rows], true[rows], inside)
    return found


def _figures(predicted: Floats, true: Floats, drawn: Floats) -> dict[str, Any]:
    """Return the figures of one predictor; `drawn` has tau and pairs of each resample."""
    tau = kendall_tau(predicted, true)
    return {
        "num_prompts": len(true),
        "kendall_tau": tau,
        "interval": _interval(drawn[:, 0]),
        "pairs_right": pairs_right(tau, predicted, true),
        "pairs_right_interval": _interval(drawn[:, 1]),
        "mean_absolute_error_tokens": float(np.abs(predicted - true).mean()),
    }


def _resampled(columns: list[Floats], true: Floats, rng: np.random.Generator) -> Floats:
    """Return (tau, pairs right) of each column on resamples, shape (columns, resamples, 2)."""
    n = len(true)
    times = rng.multinomial(n, np.full(n, 1 / n), NUM_RESAMPLES).T.astype(np.float32)
    unequal_true = _unequal_drawn_pairs(true, times)
    drawn = np.full((len(columns), NUM_RESAMPLES, 2), np.nan)
    for column, figures in zip(columns, drawn, strict=True):
        unequal = _unequal_drawn_pairs(column, times)
        balance = _concordance(column, true, times)
        known = (unequal > 0) & (unequal_true > 0)
        figures[known, 0] = balance[known] / np.sqrt(unequal[known] * unequal_true[known])
        figures[known, 1] = 0.5 + 0.5 * balance[known] / unequal_true[known]
    return drawn


def _concordance(x: Floats, y: Floats, times: Drawn) -> Floats:
    """Return concordant minus discordant pairs, where prompt i is drawn ``times[i]`` times."""
    balance = np.zeros(times.shape[1])
    for low in range(0, len(x), _ROWS_AT_ONCE):
        rows = slice(low, low + _ROWS_AT_ONCE)
        signs = np.sign(x[rows, None] - x) * np.sign(y[rows, None] - y)
        balance += (times[rows] * (signs.astype(np.float32) @ times)).sum(axis=0)
    return balance / 2


def _unequal_drawn_pairs(values: Floats, times: Drawn) -> Floats:
    order = np.argsort(values, kind="stable")
    first = np.flatnonzero(np.diff(values[order], prepend=np.nan) != 0)
    alike = np.add.reduceat(times[order].astype(np.float64), first, axis=0)
    return np.asarray((len(values) ** 2 - (alike**2).sum(axis=0)) / 2)


def _interval(taus: Floats) -> list[float] | None:
    known = taus[~np.isnan(taus)]
    if not len(known):
        return None
    tail = (1.0 - LEVEL) / 2
    return [float(q) for q in np.quantile(known, [tail, 1.0 - tail])]
