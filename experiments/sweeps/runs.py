"""Points run by workers into a store; what is there already is only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.sweeps.jobs import Done, Job
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.timing import TimeEstimate
from schedlab.experiments.sweeps.workers import Workers
from schedlab.sim.errors import SchedlabError

Progress = Callable[[int, int, TimeEstimate, Done | None], None]
"""Called with: points done, points to run, the time they take, what has just ended."""


class Runs:
    """Runs what is not there yet.

    Parameters
    ----------
    store : Store
        Where results are kept.
    workers : Workers
        Who runs.
    progress : callable, optional
        Told when a run ends; counts start anew with each call.
    stage : callable, optional
        Told in words what the runs from now on are for, where several calls serve one search.
    """

    def __init__(
        self,
        store: Store,
        workers: Workers,
        progress: Progress | None = None,
        stage: Callable[[str], None] = lambda told: None,
    ) -> None:
        self.store = store
        self.stage = stage
        self._workers = workers
        self._progress = progress
        self._asked: set[str] = set()
        self.cost_models: list[Mapping[str, Any]] = []
        """Descriptions of the cost models behind the points returned so far, each once."""
        self.extrapolated: dict[str, str] = {}
        """Content hash of points that left the measured range of their cost model, and how far."""

    @property
    def num_asked(self) -> int:
        """Different points asked for so far."""
        return len(self._asked)

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run every job without a result, and return those that failed."""
        different = {job.content_hash: job for job in jobs}
        self._asked |= different.keys()
        todo = [job for job in different.values() if not self.store.has(job)]
        timing = TimeEstimate((job.label for job in todo), self._workers.num_workers)
        for job in different.values():
            if self.store.has(job):
                timing.know(job.label, self.store.load(job).seconds)
        failures = run_jobs(todo, self._workers, timing, self._progress) if todo else []
        for job in todo:
            self.store.has(job)  # takes note of where it is
        return failures

    def points(self, wanted: Sequence[tuple[ExperimentSpec, str]]) -> list[PointMetrics]:
        """Return what points gave, in order.

        Parameters
        ----------
        wanted : sequence of (ExperimentSpec, str)
            Points, and what to call them.

        Raises
        ------
        SchedlabError
            If a run fails: nobody can go on without it. Finished runs are kept.
        """
        found = self.tried(wanted)
        check([one for one in found if isinstance(one, Done)])
        return [one for one in found if isinstance(one, PointMetrics)]

    def tried(self, wanted: Sequence[tuple[ExperimentSpec, str]]) -> list[PointMetrics | Done]:
        """Return what points gave, in order, and of those that failed how they ended.

        Parameters
        ----------
        wanted : sequence of (ExperimentSpec, str)
            Points, and what to call them.
        """
        jobs = [self.store.job(spec, label) for spec, label in wanted]
        failed = {done.job.content_hash: done for done in self.run(jobs)}
        found: list[PointMetrics | Done] = []
        for job in jobs:
            if job.content_hash in failed:
                found.append(failed[job.content_hash])
                continue
            point = self.store.load(job)
            found.append(point)
            for line in point.warnings:
                if "cost model was measured in" in line:
                    self.extrapolated[job.content_hash] = f"{job.label}: {line}"
            if point.cost_model not in self.cost_models:
                self.cost_models.append(point.cost_model)
        return found


def run_jobs(
    todo: Sequence[Job], workers: Workers, timing: TimeEstimate, progress: Progress | None
) -> list[Done]:
    """Run jobs and return those that failed."""
    if progress is not None:
        progress(0, len(todo), timing, None)
    failures = []
    for count, done in enumerate(workers.run(todo), start=1):
        timing.finish(done.job.label, None if done.error else done.seconds)
        if done.error:
            failures.append(done)
        if progress is not None:
            progress(count, len(todo), timing, done)
    return failures


def check(failures: Sequence[Done]) -> None:
    """Raise an error of points that nobody can do without.

    Raises
    ------
    SchedlabError
        If there are any; names the first.
    """
    if failures:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise SchedlabError(f"{first.job.label}, seed {first.job.spec.seed}: {first.error}{more}")
