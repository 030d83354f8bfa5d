"""What the figures of a claim read off runs: a number for each side and replication."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.specification.claim import Capacity, Figure
from schedlab.experiments.specification.claim_settings import (
    Setting,
    measures_of,
    setting_index,
    settings_of,
)
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import points
from schedlab.experiments.sweeps.runs import Runs
from schedlab.sim.metrics.registry import metric_named


class Reading(NamedTuple):
    """A number on one side of a comparison, of one replication.

    Attributes
    ----------
    value : float
        NaN if there is nothing to measure.
    is_bound : bool
        Whether a capacity lies beyond the sweep, so that the value is its end.
    """

    value: float
    is_bound: bool = False


_Place = tuple[Setting, int]
_Walk = Generator[_Place, None, Reading]
"""Asks for the runs that a reading needs, one after the other, and returns the reading."""


class Readings:
    """Reads figures off the runs of an experiment, which are made when a figure asks for them.

    Parameters
    ----------
    spec : ExperimentSpec
        An experiment.
    runs : Runs
        Runs what is asked.

    Attributes
    ----------
    cost_models : dict of str to None
        Name, calibration, model and hardware of the cost models used, in order.
    """

    def __init__(self, spec: ExperimentSpec, runs: Runs) -> None:
        self._spec = spec
        self._runs = runs
        self._points = points(spec)
        self._values: dict[_Place, Mapping[str, float]] = {}
        self.cost_models: dict[str, None] = {}

    def read(self, figures: Sequence[Figure]) -> dict[tuple[str, str], tuple[Reading, ...]]:
        """Read figures; what all of them need next is run together.

        Parameters
        ----------
        figures : sequence of Figure
            Of its claim, or variations of them.

        Returns
        -------
        dict
            (name of the figure, ``"of"`` or ``"against"``) to a reading a replication.
        """
        replications = range(self._spec.replications)
        sides = [(figure, side) for figure in figures for side in _sides(figure)]
        waiting = {
            (figure.name, side, replication): self._walk(figure, side, replication)
            for figure, side in sides
            for replication in replications
        }
        found: dict[tuple[str, str, int], Reading] = {}
        while waiting:
            asked: dict[_Place, None] = {}
            for key, walk in list(waiting.items()):
                try:
                    asked[next(walk)] = None
                except StopIteration as end:
                    found[key] = end.value
                    del waiting[key]
            self._run([place for place in asked if place not in self._values])
        return {
            (figure.name, side): tuple(found[figure.name, side, r] for r in replications)
            for figure, side in sides
        }

    def _walk(self, figure: Figure, side: str, replication: int) -> _Walk:
        settings = settings_of(self._spec, figure, side)
        if figure.capacity is not None:
            return self._capacity(figure.capacity, settings, replication)
        (measure,) = measures_of(figure)
        metric = metric_named(measure.name, **measure.knobs).name
        return self._value(metric, settings[0], replication)

    def _value(self, metric: str, setting: Setting, replication: int) -> _Walk:
        yield setting, replication
        return Reading(self._values[setting, replication][metric])

    def _capacity(self, capacity: Capacity, settings: Sequence[Setting], replication: int) -> _Walk:
        """Walk up the load until a constraint breaks; what lies above is not run."""
        over = list(self._spec.sweep).index(capacity.over)
        loads = self._spec.sweep[capacity.over]
        # A constraint holds where the excess is <= 0.
        constraints = [(name, constraint, 1.0) for name, constraint in capacity.at_most.items()]
        constraints += [(name, constraint, -1.0) for name, constraint in capacity.at_least.items()]
        before: tuple[float, list[float]] | None = None
        for setting in settings:
            load = float(loads[setting[over]])
            yield setting, replication
            values = self._values[setting, replication]
            excess = [sign * (values[name] - constraint) for name, constraint, sign in constraints]
            if not all(e <= 0.0 for e in excess):
                if before is None or any(math.isnan(e) for e in excess):
                    return Reading(math.nan)
                held_load, held = before
                crossings = [
                    held_load + (load - held_load) * -low / (high - low)
                    for low, high in zip(held, excess, strict=True)
                    if high > 0.0
                ]
                return Reading(min(crossings))
            before = load, excess
        assert before is not None
        return Reading(before[0], is_bound=True)

    def _run(self, places: Sequence[_Place]) -> None:
        """Run points, and keep what figures may ask of each."""
        replications = self._spec.replications
        wanted = [
            self._points[setting_index(self._spec, setting) * replications + replication]
            for setting, replication in places
        ]
        done = self._runs.points([(p.spec, f"{self._spec.name}, {p.label}") for p in wanted])
        for place, point in zip(places, done, strict=True):
            self.cost_models[_cost_model(point)] = None
            self._values[place] = point.metrics


def _sides(figure: Figure) -> tuple[str, ...]:
    return ("of",) if figure.against is None else ("of", "against")


def _cost_model(point: PointMetrics) -> str:
    described = point.cost_model
    return (
        f"{described.get('name')} ({described.get('calibration')}), {described.get('model')} on "
        f"{described.get('hardware')}"
    )
