"""One point as a piece of work, and how its result reaches its folder."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from schedlab.experiments.results.results_folder import replacing_folder
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.sim.errors import SchedlabError
from schedlab.sim.files import write_text

POINT_FILE = "point.json"
"""Beside a result: its content hash, how long it took, and what qualifies it."""


@dataclass(frozen=True)
class Job:
    """A point to run.

    Attributes
    ----------
    spec : ExperimentSpec
        The point.
    content_hash : str
        `point_hash` of it, as the sweep that asks for it sees it.
    folder : Path
        Where its result is to appear, whole.
    label : str
        What to call it.
    """

    spec: ExperimentSpec
    content_hash: str
    folder: Path
    label: str


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


def run_job(job: Job) -> Done:
    """Run a point and write its folder; never raises but for what ends the process.

    Parameters
    ----------
    job : Job
        The point. Its hash is computed again here: a worker with other sources, packages or
        trace files than the sweep's refuses.

    Returns
    -------
    Done
        Without an error if its folder is there, complete.
    """
    begin = time.perf_counter()
    try:
        _run(job)
    except SchedlabError as error:
        return Done(job, time.perf_counter() - begin, str(error))
    except Exception as error:
        line = f"{type(error).__name__}: {error}"
        return Done(job, time.perf_counter() - begin, line, traceback.format_exc())
    return Done(job, time.perf_counter() - begin)


def _run(job: Job) -> None:
    from schedlab.experiments.results.tables import warnings
    from schedlab.experiments.running.point_hash import point_hash
    from schedlab.experiments.running.run import run
    from schedlab.experiments.sweeps.run_all import write_point

    if point_hash(job.spec) != job.content_hash:
        raise SchedlabError(
            "the worker sees other sources, package versions or files than the sweep: they were "
            "changed while it runs, or are not the same on both machines"
        )
    begin = time.perf_counter()
    result = run(job.spec)
    seconds = time.perf_counter() - begin
    with fresh_folder(job.folder) as new:
        write_point(result, job.spec, new)
        noted = {
            "content_hash": job.content_hash,
            "seconds": round(seconds, 3),
            "warnings": warnings(result),
        }
        write_text(new / POINT_FILE, json.dumps(noted, indent=1) + "\n")


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """As `replacing_folder`, after clearing away what a killed writer left beside the folder."""
    for left_over in folder.parent.glob(f".{folder.name}.new-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with replacing_folder(folder) as new:
        yield new


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
