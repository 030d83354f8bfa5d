"""Metrics of one class of requests."""

from __future__ import annotations

import math

import numpy as np

from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.observation import Observation
from schedlab.sim.metrics.registry import metric_named, register


@register(better="neither")
def of_class(
    run: Observation,
    metric: str,
    column: str,
    low: float = -math.inf,
    high: float = math.inf,
    value: str | None = None,
) -> float:
    """Return a metric of the requests with low <= column <= high, or with column = value.

    Rates are over the time of all requests, so that classes add up.
    """
    asked = metric_named(metric)
    if asked.about != "requests":
        raise SpecError(f"metric: {metric} tells of the engine that serves all classes together")

    if value is not None:
        return asked.of(run.only_where(column, value))
    values = run.column(column)
    if not np.issubdtype(values.dtype, np.number):
        raise SpecError(f"column: {column} holds text: give value, not low and high")
    return asked.of(run.only((values >= low) & (values <= high)))
