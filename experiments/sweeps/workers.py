"""Who runs the points of a sweep: this process, processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schedlab.experiments.sweeps.jobs import Done, Job, run_job, run_point
from schedlab.sim.errors import SchedlabError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""Sums of linear algebra depend on how many threads share them: every worker has one."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers(AbstractContextManager["Workers"], Protocol):
    """Runs jobs, in any order and place."""

    @property
    def num_workers(self) -> int:
        """Return how many jobs run at the same time."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """Run all jobs; yield each as it ends, well or not."""


class InProcess:
    """Runs jobs one after the other in this very process; what a notebook wants.

    Parameters
    ----------
    progress : callable, optional
        Told the job at work, the requests of it that are done, and all of them.
    raising : bool
        Whether an error ends it all, as it is; else the job is yielded with its error.
    """

    num_workers = 1

    def __init__(
        self, progress: Callable[[Job, int, int], None] | None = None, raising: bool = False
    ) -> None:
        self._progress = progress
        self._run = run_point if raising else run_job

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """Run all jobs; yield each as it ends, well or not."""
        for job in jobs:
            yield self._run(job, self._progress and partial(self._progress, job))


_starting = threading.Lock()
"""Held by the thread that begins a process: what is as the process needs it, is so for all."""


class _Worker(NamedTuple):
    process: SpawnProcess
    connection: Connection


class Processes:
    """Runs jobs in processes of this machine, each with one thread for linear algebra.

    Parameters
    ----------
    num_workers : int
        How many.

    Raises
    ------
    SchedlabError
        In a worker of `multiprocessing.Pool`, which may have no processes of its own.

    Notes
    -----
    A process that dies (killed for its memory, say) costs the job it had and no other. Processes
    end with this one, however it ends.
    """

    def __init__(self, num_workers: int) -> None:
        if multiprocessing.current_process().daemon:
            raise SchedlabError(
                f"{multiprocessing.current_process().name} is a worker itself (of "
                "multiprocessing.Pool?), which may start no processes: give jobs=1 there"
            )
        self.num_workers = num_workers
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[_Worker, Job]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in [*self._idle, *(worker for worker, _ in self._busy.values())]:
            connection.close()
            process.terminate()
            process.join()
        self._idle, self._busy = [], {}

    def run(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """Run all jobs; yield each as it ends, well or not."""
        todo = list(reversed(jobs))
        while todo or self._busy:
            while todo and len(self._busy) < self.num_workers:
                worker = self._idle.pop() if self._idle else _start()
                job = todo.pop()
                # A worker that died meanwhile is found dead below, with this job.
                with suppress(OSError):
                    worker.connection.send(job)
                self._busy[worker.connection] = worker, job
            for connection in wait(list(self._busy)):
                assert isinstance(connection, Connection)
                worker, job = self._busy.pop(connection)
                try:
                    done: Done = connection.recv()
                    self._idle.append(worker)
                except (EOFError, OSError):
                    worker.process.join()
                    done = Done(job, 0.0, _death(worker.process.exitcode))
                yield done


def _start() -> _Worker:
    # A fresh interpreter: it inherits no threads and no half-held locks of this one.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
    with _starting, _environment(ONE_THREAD), _without_main(), _interrupts_held():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _without_main() -> Iterator[None]:
    """Let processes that begin meanwhile not run the script of this one once more.

    They would begin processes themselves where it does not ask for its ``__name__``. Jobs need
    nothing of it: classes that are defined there run in this very process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let processes that begin meanwhile see no Ctrl-C, were it before they can say so."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, path: list[str]) -> None:
    """Run jobs until the other end is closed."""
    # Ctrl-C reaches the whole terminal; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = path
    with suppress(EOFError, OSError):
        while True:
            connection.send(run_job(connection.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with status {exitcode}"


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def choose_workers(num_workers: int, ray_address: str | None = None) -> Workers:
    """Return processes of this machine, or a Ray cluster if an address is given.

    Parameters
    ----------
    num_workers : int
        Processes, or CPUs of a local Ray cluster.
    ray_address : str, optional
        As `ray_workers.RayWorkers` takes it.
    """
    if ray_address is None:
        return Processes(num_workers)
    from schedlab.experiments.sweeps.ray_workers import RayWorkers

    return RayWorkers(ray_address, num_workers, [Path(p) for p in sys.path if p])
