"""Policies held against each other over the seeds they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.statistics import Change, corrected, paired_change, verdict
from schedlab.sim.errors import SpecError, nearest
from schedlab.sim.metrics.registry import metric_named

METRICS = (
    "request_throughput", "output_throughput", "request_goodput", "slo_attainment",
    "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms",
)  # fmt: skip
"""What is compared unless other metrics are named."""


@dataclass(frozen=True)
class PolicyChange:
    """How one policy differs from another in one metric at one setting.

    Attributes
    ----------
    setting : str
        The other swept keys, in a line; empty if nothing else is swept.
    metric : str
        What was measured.
    of, against : str
        The policies.
    means : tuple of float
        Means of both over the seeds.
    change : Change
        The paired difference.
    verdict : str
        In a sentence; see `statistics.verdict`.
    """

    setting: str
    metric: str
    of: str
    against: str
    means: tuple[float, float]
    change: Change
    verdict: str


def compare_policies(
    runs: Sequence[PointMetrics],
    metrics: Sequence[str] = METRICS,
    against: str | None = None,
    key: str = "policy",
) -> list[PolicyChange]:
    """Compare every policy with one of them, metric by metric, at every setting.

    Parameters
    ----------
    runs : sequence of PointMetrics
        Of a sweep over policies with replications.
    metrics : sequence of str
        What to compare; metrics that no run has are an error, those without a value are left out.
    against : str, optional
        The policy that the others are held against; the first if not given.
    key : str
        The swept key whose values are compared.

    Returns
    -------
    list of PolicyChange
        By metric, then setting, then policy. Each interval is at 95 % on its own; verdicts are
        corrected for how many there are (`statistics.corrected`).

    Raises
    ------
    SpecError
        If the key is not swept, a name is unknown, or no setting has two seeds in common; those
        that have not are left out (`left_out`).
    """
    pairs = _pairs(runs, against, key)
    compared = [one for one in pairs if len(one.seeds) > 1] or pairs  # else it is told why not
    found = []
    for metric in metrics:
        metric_named(metric)  # an unknown one is told before anything is computed
        found += [change for one in compared if (change := _change(one, metric)) is not None]
    changes = corrected([one.change for one in found])
    return [_judged(one, change) for one, change in zip(found, changes, strict=True)]


def left_out(
    runs: Sequence[PointMetrics], against: str | None = None, key: str = "policy"
) -> list[str]:
    """Return what `compare_policies` does not compare, for want of two seeds in common.

    Parameters
    ----------
    runs, against, key
        As there.
    """
    return [
        f"{one.of} against {one.against}{f' at {one.setting}' if one.setting else ''}: "
        f"{len(one.seeds) or 'no'} seed{'' if len(one.seeds) else 's'} in common"
        for one in _pairs(runs, against, key)
        if len(one.seeds) < 2
    ]


class _Pair(NamedTuple):
    """Runs of two policies at a setting, by replication, and which replications both have."""

    setting: str
    of: str
    against: str
    runs: tuple[Mapping[int, PointMetrics], Mapping[int, PointMetrics]]
    seeds: list[int]


def _pairs(runs: Sequence[PointMetrics], against: str | None, key: str) -> list[_Pair]:
    names = list(dict.fromkeys(run.settings[key] for run in runs if key in run.settings))
    if len(names) < 2:
        known = dict.fromkeys(k for run in runs for k in run.settings)
        raise SpecError(f"{key} takes no two values in these results; {nearest(key, known)}")
    if against is not None and against not in names:
        raise SpecError(f"no {key} is called {against!r} here; {nearest(against, names)}")
    base = against or names[0]
    groups: dict[str, dict[str, dict[int, PointMetrics]]] = {}
    for run in runs:
        setting = ", ".join(f"{k}={v}" for k, v in run.settings.items() if k != key)
        of = groups.setdefault(setting, {}).setdefault(run.settings[key], {})
        of[run.replication] = run
    found = []
    for setting, by_name in groups.items():
        for name in names:
            if name != base and name in by_name and base in by_name:
                both = by_name[name], by_name[base]
                seeds = sorted(both[0].keys() & both[1].keys())
                found.append(_Pair(setting, name, base, both, seeds))
    return found


def rejections(runs: Sequence[PointMetrics]) -> str:
    """Say how many runs rejected requests, and where the most; nothing if none did.

    What such a run is compared by is of the requests that were served, and missing if none was.
    """
    shares = [run.metrics["rejected"] / max(run.metrics["num_requests"], 1) for run in runs]
    rejecting = [share for share in shares if share > 0]
    if not rejecting:
        return ""
    most = runs[shares.index(max(shares))]
    counts = f"{most.metrics['rejected']:,.0f} of {most.metrics['num_requests']:,.0f}"
    return (
        f"{len(rejecting)} of {len(runs)} runs rejected requests, up to {counts} "
        f"({most.label}): latencies are of those that were served"
    )


def _change(pair: _Pair, metric: str) -> PolicyChange | None:
    of, against = ([one[seed].metrics[metric] for seed in pair.seeds] for one in pair.runs)
    if any(map(math.isnan, (*of, *against))):
        return None
    change = paired_change(of, against)
    means = math.fsum(of) / len(of), math.fsum(against) / len(against)
    return PolicyChange(pair.setting, metric, pair.of, pair.against, means, change, "")


def _judged(one: PolicyChange, change: Change) -> PolicyChange:
    better = metric_named(one.metric).larger_is_better
    sentence = verdict(one.of, one.against, one.metric, change, better)
    return replace(one, change=change, verdict=sentence)
