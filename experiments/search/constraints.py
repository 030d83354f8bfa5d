"""Constraints, and the points that a search holds against them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec, set_key
from schedlab.experiments.specification.search import is_key
from schedlab.experiments.specification.sweep import short_names, shown
from schedlab.sim.metrics.registry import every_run, metric_named

Metrics = Mapping[str, float]


class Constraint(NamedTuple):
    """A bound on a metric.

    Attributes
    ----------
    metric : str
        Its name.
    bound : float
        What it may be at most, or at least.
    at_most : bool
        Which of the two.
    """

    metric: str
    bound: float
    at_most: bool

    def excess(self, metrics: Metrics) -> float:
        """Return by how much a run breaks it: it holds at <= 0; NaN breaks it by infinity."""
        value = metrics[self.metric]
        excess = value - self.bound if self.at_most else self.bound - value
        return math.inf if math.isnan(value) else excess

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.bound:g}"


def constraints_of(at_most: Mapping[str, float], at_least: Mapping[str, float]) -> list[Constraint]:
    """Return the constraints of a search."""
    constraints = [Constraint(metric, bound, True) for metric, bound in at_most.items()]
    return constraints + [Constraint(metric, bound, False) for metric, bound in at_least.items()]


def untold(names: Iterable[str], metrics: Metrics) -> str:
    """Say which metric is not a number though the run served somebody; nothing if there is none.

    Where nobody was served, NaN is the answer of an overloaded run, which breaks a constraint; so
    it may be of a class, or of a metric of one's own, where requests were rejected.

    Parameters
    ----------
    names : iterable of str
        What a search goes by.
    metrics : mapping of str to float
        Those of a run.
    """
    for name in names:
        if not math.isnan(metrics[name]):
            continue
        of_sessions = metric_named(name).about == "sessions"
        served = metrics.get("completed_sessions" if of_sessions else "completed", 0.0)
        may_be_of_some = "(" in name or ":" in name
        if served > 0 and not (may_be_of_some and metrics.get("rejected", 0.0) > 0):
            what = "sessions" if of_sessions else "requests"
            return (
                f"{name} is not a number, though {served:g} {what} completed: the run has nothing "
                "that it is of; search by another metric"
            )
    return ""


def needs_tables(spec: ExperimentSpec) -> bool:
    """Say whether a search goes by a metric that is computed from requests or steps."""
    asked = [one for one in (spec.find, spec.tune) if one is not None]
    goals = {one.maximize or one.minimize or "" for one in asked}
    names = goals.union(name for one in asked for name in (*one.at_most, *one.at_least))
    kept = {metric.name for metric in every_run()}
    return any(name not in kept and not is_key(name) for name in names if name)


def with_values(spec: ExperimentSpec, values: Mapping[str, Any]) -> ExperimentSpec:
    """Return one point with some keys set.

    Parameters
    ----------
    spec : ExperimentSpec
        A point.
    values : mapping of str to object
        Dotted keys and their values.

    Raises
    ------
    SpecError
        If a value is not allowed.
    """
    data = spec.to_data()
    for key, value in values.items():
        set_key(data, key, value)
    return make_spec(data)


def label_of(setting: str, values: Mapping[str, Any]) -> str:
    """Return what to call a point of a search."""
    names = short_names(list(values))
    parts = [f"{names[key]}={shown(value)}" for key, value in values.items()]
    return ", ".join([setting, *parts] if setting else parts)
