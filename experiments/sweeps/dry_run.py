"""What a sweep would do, and about how long that would take."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from schedlab.experiments.running.point_hash import point_hash
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.sweeps.jobs import Job, run_job
from schedlab.experiments.sweeps.store import Store
from schedlab.experiments.sweeps.sweep_all import Plan
from schedlab.experiments.sweeps.timing import TimeEstimate, duration
from schedlab.sim.errors import SchedlabError

_FEW, _MORE = 20, 300
_SHOWN = 20


class Timed(NamedTuple):
    """A point of which a part was run.

    Attributes
    ----------
    label : str
        The point.
    seconds : float
        What all of it is expected to take.
    num_timed, num_requests : int
        Requests that were run, and those of the whole point.
    """

    label: str
    seconds: float
    num_timed: int
    num_requests: int


def time_point(job: Job) -> Timed:
    """Run the first requests of a point and extrapolate.

    Parameters
    ----------
    job : Job
        The point; nothing is written to its folder.

    Returns
    -------
    Timed
        ``fixed + per request * requests``, from runs of 20 and of 300 requests.

    Raises
    ------
    SchedlabError
        If the point cannot be run.
    """
    whole = _num_requests(job.spec)
    few, more = min(_FEW, whole), min(_MORE, whole)
    with tempfile.TemporaryDirectory() as scratch:
        _seconds(job, 1, Path(scratch))  # what is imported first would count once too often
        short = _seconds(job, few, Path(scratch))
        long = _seconds(job, more, Path(scratch)) if more > few else short
    each = max(long - short, 0.0) / max(more - few, 1)
    return Timed(job.label, long + each * (whole - more), more, whole)


def describe_plan(planned: Plan, store: Store, num_workers: int) -> list[str]:
    """Say what a sweep would run, and about how long that would take.

    Parameters
    ----------
    planned : Plan
        The work.
    store : Store
        What is there; times of finished points are used if there are any.
    num_workers : int
        Points that run at the same time.

    Returns
    -------
    list of str
        Lines to print.
    """
    settings = len({(point.label, *point.settings.values()) for point in planned.points})
    lines = [
        f"{len(planned.points)} points: {settings} settings x "
        f"{len(planned.points) // settings} replications; {len(planned.wanted)} of them here, "
        f"{len(planned.wanted) - len(planned.todo)} done, {len(planned.todo)} to run"
    ]
    lines += [f"  {job.label}, seed {job.spec.seed}" for job in planned.todo[:_SHOWN]]
    if len(planned.todo) > _SHOWN:
        lines.append(f"  and {len(planned.todo) - _SHOWN} more")
    if planned.todo:
        lines.append(_estimate(planned, store, num_workers))
    return lines


def _estimate(planned: Plan, store: Store, num_workers: int) -> str:
    timing = TimeEstimate((job.label for job in planned.todo), num_workers)
    known = [job for job in planned.wanted if store.has(job)]
    for job in known:
        timing.know(job.label, store.load(job).seconds)
    if known:
        basis = f"from the {len(known)} points that are done"
    else:
        timed = [time_point(job) for job in _ends(planned.todo)]
        for one in timed:
            timing.know(one.label, one.seconds)
        parts = [f"{t.label}: {t.num_timed} of {t.num_requests} requests" for t in timed]
        basis = f"timed here on {'; '.join(parts)}"
    remaining = timing.remaining_s()
    assert remaining is not None
    return (
        f"about {duration(remaining)} with {num_workers} at a time ({basis}; overload makes "
        "points slower)"
    )


def _ends(todo: Sequence[Job]) -> list[Job]:
    """Return the first and the last setting: the ends of what is swept."""
    first, last = todo[0], todo[-1]
    return [first] if first.label == last.label else [first, last]


def _num_requests(spec: ExperimentSpec) -> int:
    if spec.workload.num_requests is not None:
        return spec.workload.num_requests
    from schedlab.experiments.running.workload import load_workload

    return len(load_workload(spec, max_model_len=2**62))


def _seconds(job: Job, num_requests: int, scratch: Path) -> float:
    workload = job.spec.workload.model_copy(update={"num_requests": num_requests})
    spec = job.spec.model_copy(update={"workload": workload})
    folder = scratch / str(num_requests)
    done = run_job(replace(job, spec=spec, content_hash=point_hash(spec), folder=folder))
    if done.error:
        raise SchedlabError(f"{job.label}: {done.error}")
    return done.seconds
