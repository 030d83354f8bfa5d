"""One point as a piece of work, and how its result reaches its folder."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from schedlab.experiments.results.results_folder import replacing_folder
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.errors import SchedlabError
from schedlab.sim.user_modules import look_in

RequestsDone = Callable[[int, int], None]
"""Called now and then with the requests of a point that are done, and all of them."""

_CHANGED = (
    "the worker sees other sources, package versions or files than the sweep: they were changed "
    "while it runs, or are not the same on both machines"
)


@dataclass(frozen=True)
class Job:
    """A point to run.

    Attributes
    ----------
    spec : ExperimentSpec
        The point.
    content_hash : str
        `point_hash` of it, as whoever asks for it sees it.
    folder : Path
        Where its result is to appear, whole.
    label : str
        What to call it.
    light : bool
        Whether its tables are not wanted.
    """

    spec: ExperimentSpec
    content_hash: str
    folder: Path
    label: str
    light: bool = False


class Done(NamedTuple):
    """A job that ended.

    Attributes
    ----------
    job : Job
        Which.
    seconds : float
        How long it ran.
    error : str or None
        Why there is no result, in a line; None if there is one.
    trace : str or None
        The traceback of an error that was no `SchedlabError`.
    """

    job: Job
    seconds: float
    error: str | None = None
    trace: str | None = None


def run_job(job: Job, progress: RequestsDone | None = None) -> Done:
    """Run a point and write its folder; never raises but for what ends the process.

    Parameters
    ----------
    job, progress
        As for `run_point`.

    Returns
    -------
    Done
        Without an error if its folder is there, complete.
    """
    begin = time.perf_counter()
    try:
        return run_point(job, progress)
    except SchedlabError as error:
        return Done(job, time.perf_counter() - begin, str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return Done(job, time.perf_counter() - begin, line, traceback.format_exc())


def run_point(job: Job, progress: RequestsDone | None = None) -> Done:
    """Run a point and write its folder.

    Parameters
    ----------
    job : Job
        The point. Its hash is computed again here: a worker with other sources, packages or
        trace files than those of whoever asked refuses.
    progress : callable, optional
        Told how far it is.

    Returns
    -------
    Done
        Without an error.

    Raises
    ------
    SchedlabError
        If the point is invalid, its run ends with an error, or this worker is no equal.
    """
    from schedlab.experiments.results.point_folder import content_hash_of, write_point
    from schedlab.experiments.running.point_hash import own_modules, point_hash
    from schedlab.experiments.running.run import run
    from schedlab.sim.cost.pricing import ExtrapolationWarning

    look_in(job.spec.modules)
    modules = own_modules(job.spec)
    if point_hash(job.spec) != job.content_hash:
        raise SchedlabError(_CHANGED)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # The result itself says so, once; a worker would say it again in the midst of everything.
        warnings.simplefilter("ignore", ExtrapolationWarning)
        result = run(job.spec, progress)
    seconds = time.perf_counter() - begin
    if own_modules(job.spec) != modules:  # which tells those that were not loaded before the run
        raise SchedlabError(_CHANGED)

    def is_as_good(folder: Path) -> bool:
        return content_hash_of(folder, job.light) == job.content_hash

    with replacing_folder(job.folder, is_as_good) as new:
        write_point(result, job.spec, new, job.content_hash, seconds, job.light)
    return Done(job, time.perf_counter() - begin)


def run_elsewhere(job: Job, folder: Path) -> tuple[Done, dict[str, bytes]]:
    """Run a point where its folder cannot be reached, and return its files.

    Parameters
    ----------
    job : Job
        The point.
    folder : Path
        A scratch folder of this machine.

    Returns
    -------
    Done
        As `run_job`.
    dict of str to bytes
        File name to content; empty after an error.
    """
    scratch = folder / job.folder.name
    done = run_job(replace(job, folder=scratch))
    files = {} if done.error else {p.name: p.read_bytes() for p in scratch.iterdir()}
    return done._replace(job=job), files
