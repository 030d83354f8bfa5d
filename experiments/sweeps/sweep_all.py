"""Run a sweep: what is not there yet, by many workers, and the summary when all is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from schedlab.experiments.results.saved_results import (
    SavedResults,
    read_results,
    summary,
    write_summary,
)
from schedlab.experiments.running.point_hash import point_hash
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import Point, points
from schedlab.experiments.sweeps.jobs import Done, Job
from schedlab.experiments.sweeps.runs import Progress, Runs, check, run_jobs
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.timing import TimeEstimate
from schedlab.experiments.sweeps.workers import Workers
from schedlab.sim.errors import SpecError


class Shard(NamedTuple):
    """One of several equal parts of a sweep.

    Attributes
    ----------
    number : int
        Which, counted from 1.
    total : int
        Of how many.
    """

    number: int
    total: int


@dataclass
class Swept:
    """What a sweep came to.

    Attributes
    ----------
    results : SavedResults or None
        Those of the settings all of whose replications are there; None if none is, or if
        points are left to other shards.
    num_points : int
        Different points of the sweep (of this shard).
    num_found : int
        Points that were there before.
    failures : list of Done
        Points that ended with an error.
    num_missing : int
        Points that other shards have not finished yet.
    num_others : int
        Results in the folder that belong to no point of this sweep.
    """

    results: SavedResults | None
    num_points: int
    num_found: int
    failures: list[Done] = field(default_factory=list)
    num_missing: int = 0
    num_others: int = 0


class Plan(NamedTuple):
    """The work of a sweep.

    Attributes
    ----------
    points : list of Point
        All points, in the order of the table.
    jobs : list of Job
        The work of each; points that ask the same share it.
    wanted : list of Job
        Different jobs of this shard, replication by replication.
    todo : list of Job
        Those of them without a result.
    """

    points: list[Point]
    jobs: list[Job]
    wanted: list[Job]
    todo: list[Job]


def plan(spec: ExperimentSpec, store: Store, shard: Shard | None = None) -> Plan:
    """Say what a sweep has to run.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    store : Store
        What is there.
    shard : Shard, optional
        The part to run.

    Returns
    -------
    Plan
        The same for every shard but for what is wanted: parts depend on the specification alone,
        not on what is done already. The first replications of all settings come first, so that the
        time the rest takes is soon known.

    Raises
    ------
    SpecError
        If a combination of values is invalid, or the shard is none.
    """
    if shard is not None and not 1 <= shard.number <= shard.total:
        raise SpecError(
            f"--shard {shard.number}/{shard.total}: shards are counted from 1 to {shard.total}"
        )
    found = points(spec)
    jobs = [store.job(point.spec, point.label) for point in found]
    order = sorted(range(len(found)), key=lambda i: found[i].replication)
    different = list({jobs[i].content_hash: jobs[i] for i in order}.values())
    wanted = different[shard.number - 1 :: shard.total] if shard else different
    return Plan(found, jobs, wanted, [job for job in wanted if not store.has(job)])


def sweep_all(
    spec: ExperimentSpec,
    store: Store,
    workers: Workers,
    *,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> Swept:
    """Run every point that has no result yet, and sum up if none is missing then.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    store : Store
        Where results go, and may be already.
    workers : Workers
        Who runs the points.
    shard : Shard, optional
        The part to run; all if not given.
    progress : callable, optional
        Told when a point ends.

    Returns
    -------
    Swept
        Errors of single points are in it, they do not stop the others.

    Raises
    ------
    SpecError
        If a combination of values is invalid, or the folder is in use.
    """
    with store.lock("" if shard is None else f"-{shard.number}-of-{shard.total}"):
        planned = plan(spec, store, shard)
        store.write_points(spec.name, planned.points, planned.jobs)
        failures = Runs(store, workers, progress).run(planned.wanted)
    swept = Swept(
        None,
        num_points=len(planned.wanted),
        num_found=len(planned.wanted) - len(planned.todo),
        failures=failures,
        num_others=store.num_others(planned.jobs),
    )
    failed = {done.job.content_hash for done in failures}
    swept.num_missing = len(
        {job.content_hash for job in planned.jobs if not store.has(job)} - failed
    )
    if not swept.num_missing and any(store.has(job) for job in planned.jobs):
        results = read_results(store.folder)
        if results.rows:
            write_summary(spec, results)
            swept.results = results
    return swept


def run_into(
    spec: ExperimentSpec, folder: Path, workers: Workers, progress: Progress | None = None
) -> SavedResults:
    """Run every point of an experiment into a folder of its own.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    folder : Path
        An empty folder. One point writes its files into it, several are swept into it.
    workers : Workers
        Who runs the points.
    progress : callable, optional
        Told when a point ends.

    Returns
    -------
    SavedResults
        What the folder holds then.

    Raises
    ------
    SchedlabError
        If a point is invalid or fails: at once, for the others are of no use without it.
    """

    def point_ended(count: int, total: int, timing: TimeEstimate, done: Done | None) -> None:
        if progress is not None:
            progress(count, total, timing, done)
        if done is not None and done.error:
            check([done])

    todo = points(spec)
    if len(todo) > 1:
        sweep_all(spec, Store(folder), workers, progress=point_ended)
    else:
        job = Job(todo[0].spec, point_hash(todo[0].spec), folder, todo[0].label)
        run_jobs([job], workers, TimeEstimate([job.label], num_workers=1), point_ended)
    return read_results(folder)


def swept_data(spec: ExperimentSpec, swept: Swept) -> dict[str, object]:
    """Return what a sweep came to as plain data for JSON.

    Parameters
    ----------
    spec : ExperimentSpec
        The experiment.
    swept : Swept
        What it came to.

    Returns
    -------
    dict
        What summary.json holds (an empty table if points are missing), with num_points, num_found,
        num_missing and failures.
    """
    failures = [
        {"label": done.job.label, "seed": done.job.spec.seed, "error": done.error}
        for done in swept.failures
    ]
    return {
        **summary(spec, swept.results or SavedResults(Path(), spec.name)),
        "num_points": swept.num_points,
        "num_found": swept.num_found,
        "num_missing": swept.num_missing,
        "failures": failures,
    }
