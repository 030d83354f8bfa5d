"""Measured against simulated runs, metric by metric: errors, spreads, intervals, rankings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schedlab.experiments.analysis.latencies import measured_latencies
from schedlab.sim.record.columns import Floats
from schedlab.sim.result import RunResult
from schedlab.sim.rng import stream
from schedlab.traces.rank_correlation import kendall_tau

METRICS = (
    "request_throughput", "output_throughput",
    *(
        f"{statistic}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for statistic in ("mean", "p50", "p90", "p99")
    ),
    "num_preemptions", "kv_utilization",
)  # fmt: skip
"""What is compared."""

RANKED = ("request_throughput", "mean_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "mean_e2el_ms")
"""By which policies are ranked on both backends."""

_RESAMPLES = 1000

_PRETENDED = 1000
"""So often simulated runs are taken for the measured ones."""


@dataclass(frozen=True)
class Compared:
    """One metric of one policy on both backends.

    Attributes
    ----------
    policy, metric : str
        What was measured.
    measured : float
        Mean over the measured runs.
    low, high : float
        Smallest and largest of them: what repeating the measurement changes.
    simulated : float
        The simulation's, the mean if it was repeated.
    error : float
        ``simulated / measured - 1``; NaN if the measured value is 0.
    interval : tuple of float or None
        95 % bootstrap interval of the error over requests (same requests on both sides); `None`
        where a metric is not one of single requests.
    num_runs : int
        How often it was measured.
    deviation : float
        Standard deviation of the measured runs (of a sample, n - 1); NaN of a single one.
    bar : float
        The largest error that holds whatever the spread.
    off_by_chance : float or None
        In what share of trials the simulation would not hold if runs that it drew itself were taken
        for the measured ones; `None` where it drew too few to tell.
    """

    policy: str
    metric: str
    measured: float
    low: float
    high: float
    simulated: float
    error: float
    interval: tuple[float, float] | None
    num_runs: int
    deviation: float
    bar: float
    off_by_chance: float | None = None

    @property
    def spread(self) -> float:
        """Half the range of repeated measurements, relative to their mean; NaN of a single one."""
        if self.num_runs < 2 or not self.measured:
            return math.nan
        return (self.high - self.low) / 2 / self.measured

    @property
    def deviations(self) -> float:
        """By how many standard deviations of measured runs the simulation is beside their mean.

        NaN where that is unknown: of a single run, or of runs that are all alike.
        """
        apart = self.simulated - self.measured
        return apart / self.deviation if self.deviation > 0 else math.nan

    @property
    def in_spread(self) -> bool:
        """Whether the simulation lies among the repeated measurements."""
        return self.low <= self.simulated <= self.high

    @property
    def holds(self) -> bool:
        """Whether the error is within its bar, or the simulation within the spread."""
        return self.in_spread or abs(self.error) <= self.bar


def compare_runs(
    policy: str,
    measured: Sequence[RunResult],
    simulated: Sequence[RunResult],
    seed: int = 0,
    *,
    throughput_bar: float = 0.05,
    latency_bar: float = 0.1,
) -> list[Compared]:
    """Compare repeated measured runs with simulated ones of the same workload.

    Parameters
    ----------
    policy : str
        How to name it.
    measured : sequence of RunResult
        At least one.
    simulated : sequence of RunResult
        The same requests on the simulated backend; several if its steps scatter, then at the level
        of each of the measured runs in turn.
    seed : int
        Of the bootstrap, and of which runs are taken for measured ones.
    throughput_bar, latency_bar : float
        Errors to stay within; the second is of whatever is no throughput.

    Returns
    -------
    list of Compared
        One for each of `METRICS`.
    """
    columns = [run.metrics() for run in measured]
    others = [run.metrics() for run in simulated]
    intervals = _bootstrap(measured, simulated, seed)
    rows = []
    for metric in METRICS:
        values = [float(column[metric]) for column in columns]
        mean = math.fsum(values) / len(values)
        draws = [float(other[metric]) for other in others]
        found = math.fsum(draws) / len(draws)
        error = found / mean - 1 if mean else math.nan
        bar = throughput_bar if metric.endswith("throughput") else latency_bar
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        row = Compared(
            policy, metric, mean, min(values), max(values), found, error,
            intervals.get(metric), len(values), deviation, bar,
            _off_by_chance(np.array(draws), len(values), bar, seed),
        )  # fmt: skip
        rows.append(row)
    return rows


def _off_by_chance(draws: Floats, num_runs: int, bar: float, seed: int) -> float | None:
    """Return how often a simulation without any error would be off.

    Of the draws at the level of each measured run one is taken for that run, and the mean of all
    others is held against them.
    """
    if len(draws) < 4 * num_runs:
        return None
    rng = stream(seed, "taken for measured")
    nth = [rng.integers(len(draws[one::num_runs]), size=_PRETENDED) for one in range(num_runs)]
    runs = draws[np.stack(nth, axis=1) * num_runs + np.arange(num_runs)]
    mean, others = runs.mean(axis=1), (draws.sum() - runs.sum(axis=1)) / (len(draws) - num_runs)
    in_spread = (runs.min(axis=1) <= others) & (others <= runs.max(axis=1))
    return float((~in_spread & (np.abs(others - mean) > bar * np.abs(mean))).mean())


def rank_agreement(rows: Sequence[Compared]) -> dict[str, float]:
    """Return Kendall's tau between the backends' rankings of policies, by metric.

    Parameters
    ----------
    rows : sequence of Compared
        All policies of one load.

    Returns
    -------
    dict
        Metric of `RANKED` to tau-b: 1 if both rank alike; NaN with fewer than two policies.
    """
    agreement = {}
    for metric in RANKED:
        pairs = [(row.measured, row.simulated) for row in rows if row.metric == metric]
        agreement[metric] = kendall_tau(*zip(*pairs, strict=True)) if pairs else math.nan
    return agreement


def step_errors(
    predicted_ns: npt.NDArray[np.int64], measured_ns: npt.NDArray[np.int64]
) -> dict[str, float]:
    """Summarise how well a cost model prices measured steps.

    Returns
    -------
    dict
        ``mape`` (mean absolute error relative to the measured step), ``p90`` of the same,
        ``bias`` (relative error of the sum) and ``num_steps``.
    """
    relative = np.abs(predicted_ns / measured_ns - 1)
    return {
        "mape": float(relative.mean()),
        "p90": float(np.quantile(relative, 0.9)),
        "bias": float(predicted_ns.sum() / measured_ns.sum() - 1),
        "num_steps": len(relative),
    }


def _bootstrap(
    measured: Sequence[RunResult], simulated: Sequence[RunResult], seed: int
) -> dict[str, tuple[float, float]]:
    """Resample requests, the same on both sides, and return intervals of the error."""
    real = [measured_latencies(run) for run in measured]
    model = [measured_latencies(run) for run in simulated]
    if len({len(run.e2el) for run in (*real, *model)}) > 1:
        return {}
    rng = stream(seed, "bootstrap")
    intervals = {}
    for name in ("ttft", "tpot", "e2el"):
        theirs, ours = ([getattr(run, name) for run in runs] for runs in (real, model))
        known = np.isfinite(np.stack([*theirs, *ours])).all(axis=0)
        num_requests = int(known.sum())
        if num_requests < 2:
            continue
        picks = rng.integers(num_requests, size=(_RESAMPLES, num_requests))
        for statistic in ("mean", "p50", "p90", "p99"):
            mean, found = (
                np.mean([_statistic(statistic, run[known][picks]) for run in runs], 0)
                for runs in (theirs, ours)
            )
            errors = found / mean - 1
            low, high = np.percentile(errors, [2.5, 97.5])
            intervals[f"{statistic}_{name}_ms"] = (float(low), float(high))
    return intervals


def _statistic(name: str, values: Floats) -> Floats:
    """Return one number a row of `values`, shape (resamples, requests)."""
    if name == "mean":
        return np.asarray(values.mean(axis=1))
    return np.asarray(np.percentile(values, float(name[1:]), axis=1))
