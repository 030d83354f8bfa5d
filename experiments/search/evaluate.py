"""Runs that a search asks for while it goes along, kept like the points of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.loading import make_spec, set_key
from schedlab.experiments.specification.sweep import shown
from schedlab.experiments.sweeps.jobs import Job
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import Progress, run_jobs
from schedlab.experiments.sweeps.timing import Timing
from schedlab.experiments.sweeps.workers import Workers
from schedlab.sim.errors import SchedlabError

Metrics = Mapping[str, float]


class Bar(NamedTuple):
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
        """Return by how much a run breaks the bar: it holds at <= 0; NaN breaks it by infinity."""
        value = metrics[self.metric]
        excess = value - self.bound if self.at_most else self.bound - value
        return math.inf if math.isnan(value) else excess

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.at_most else '>='} {self.bound:g}"


def bars_of(at_most: Mapping[str, float], at_least: Mapping[str, float]) -> list[Bar]:
    """Return the bars of a search."""
    bars = [Bar(metric, bound, True) for metric, bound in at_most.items()]
    return bars + [Bar(metric, bound, False) for metric, bound in at_least.items()]


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


class Evaluator:
    """Runs points and returns their metrics; what was run before is read.

    Parameters
    ----------
    store : Store
        Where results are kept.
    workers : Workers
        Who runs.
    progress : callable, optional
        Told when a run ends; counts start anew with each call.
    """

    def __init__(self, store: Store, workers: Workers, progress: Progress | None = None) -> None:
        self._store = store
        self._workers = workers
        self._progress = progress
        self.asked: dict[str, Job] = {}

    @property
    def num_runs(self) -> int:
        """Different runs asked for so far."""
        return len(self.asked)

    def metrics(self, wanted: Sequence[tuple[ExperimentSpec, str]]) -> list[Metrics]:
        """Return the metrics of points, in order.

        Parameters
        ----------
        wanted : sequence of (ExperimentSpec, str)
            Points, and what to call them.

        Raises
        ------
        SchedlabError
            If a run fails: a search cannot go on without it. Finished runs are kept.
        """
        jobs = [self._store.job(spec, label) for spec, label in wanted]
        different = {job.content_hash: job for job in jobs}
        self.asked |= different
        todo = [job for job in different.values() if not self._store.has(job)]
        if todo:
            timing = Timing((job.label for job in todo), self._workers.num_workers)
            failures = run_jobs(todo, self._workers, timing, self._progress)
            if failures:
                first = failures[0]
                raise SchedlabError(
                    f"{first.job.label}, seed {first.job.spec.seed}: {first.error}"
                    + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else "")
                )
            for job in todo:
                self._store.has(job)
        return [self._store.load(job).metrics for job in jobs]


def label_of(setting: str, values: Mapping[str, Any]) -> str:
    """Return what to call a point of a search."""
    parts = [f"{key.rpartition('.')[2]}={shown(value)}" for key, value in values.items()]
    return ", ".join([setting, *parts] if setting else parts)
