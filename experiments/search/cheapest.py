"""The cheapest of the fleets that a search for the least found, looked at again on new seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from schedlab.experiments.search.constraints import Metrics, constraints_of, label_of, with_values
from schedlab.experiments.search.find import Found
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import points
from schedlab.experiments.statistics import (
    Estimate,
    corrected,
    estimate,
    paired_change,
    verdict,
    with_interval,
)
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.sums import in_order

_S_PER_HOUR = 3600.0


class Cheapest(NamedTuple):
    """A fleet that holds the constraints for the least money.

    Attributes
    ----------
    label : str
        Its setting.
    value : float
        The most that any seed asked for of the key that was minimized.
    usd_per_hour : Estimate
        What it costs at that value, on new seeds.
    measured : mapping of str to Estimate
        Metric of each constraint on those seeds, and whether it holds there.
    holds : bool
        Whether all constraints hold on average.
    lines : tuple of str
        The same in sentences, and by how much the others are dearer.
    """

    label: str
    value: float
    usd_per_hour: Estimate
    measured: dict[str, Estimate]
    holds: bool
    lines: tuple[str, ...]


def usd_per_hour(metrics: Metrics) -> float:
    """Return what a fleet costs; not a number without a `cluster`, or where a price is unknown."""
    if "cost_usd" not in metrics:
        return math.nan
    # Rounded, so that the same engines cost the same however long the run was.
    return float(f"{metrics['cost_usd'] / metrics['duration_s'] * _S_PER_HOUR:.9g}")


def prices(one: Found) -> Estimate | None:
    """Return what the answers of a setting cost an hour; None if one has none, or no price."""
    if not all(bracket.has_answer for bracket in one.brackets):
        return None
    values = [usd_per_hour(metrics) for metrics in one.metrics]
    return None if not values or any(map(math.isnan, values)) else estimate(values)


def cheapest(spec: ExperimentSpec, found: Sequence[Found], runs: Runs) -> Cheapest | None:
    """Choose the fleet that costs the least an hour, and run it on seeds it was not chosen by.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment, with a `find` section that minimizes.
    found : sequence of Found
        What the search came to.
    runs : Runs
        Runs what is asked.

    Returns
    -------
    Cheapest or None
        None if another thing than the least is searched, or no answer has a known price.

    Notes
    -----
    What is bought has to do on each day: the fleet is as large as the seed that asked for the most
    wants it.
    """
    asked = spec.find
    if asked is None or not asked.least:
        return None
    priced = [
        (price.mean, one) for one in found if not one.error and (price := prices(one)) is not None
    ]
    if not priced:
        return None
    _, best = min(priced, key=lambda pair: pair[0])
    value = max(best.values)
    fresh = spec.model_copy(update={"seed": spec.seed + spec.replications})
    values = {asked.key: int(value) if value.is_integer() else value}
    if best.num_requests is not None:
        values["workload.num_requests"] = best.num_requests
    again = [
        (with_values(point.spec, values), label_of(point.label, {asked.key: values[asked.key]}))
        for point in points(fresh)
        if point.label == best.label
    ]
    metrics = [one.metrics for one in runs.points(again)]
    constraints = constraints_of(asked.at_most, asked.at_least)
    measured = {
        constraint.metric: estimate([float(one[constraint.metric]) for one in metrics])
        for constraint in constraints
    }
    holds = all(
        in_order(constraint.excess(one) for one in metrics) <= 0 for constraint in constraints
    )
    price = estimate([usd_per_hour(one) for one in metrics])
    said = ", ".join(f"{name} {with_interval(*value)}" for name, value in measured.items())
    lines = [
        f"cheapest: {best.label} with {asked.key}={value:g}, ${price.mean:.2f} an hour; on "
        f"{len(metrics)} new seeds {said}: "
        + ("constraints hold" if holds else "A CONSTRAINT BREAKS"),
        *_dearer(best, [one for _, one in priced if one is not best]),
    ]
    return Cheapest(best.label, value, price, measured, holds, tuple(lines))


def _dearer(best: Found, others: Sequence[Found]) -> list[str]:
    """Hold the prices of the others against the least, over the seeds that they share."""
    if len(best.brackets) < 2:
        return []
    own = [usd_per_hour(metrics) for metrics in best.metrics]
    changes = corrected(
        [paired_change(own, [usd_per_hour(m) for m in one.metrics]) for one in others]
    )
    return [
        verdict(best.label, one.label, "USD an hour", change, larger=False)
        for one, change in zip(others, changes, strict=True)
    ]
