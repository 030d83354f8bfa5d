"""The points of a sweep as tasks of a Ray cluster; the files come back to this machine."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from schedlab.experiments.results.results_folder import MARKER, replacing_folder
from schedlab.experiments.sweeps.jobs import Done, Job, run_elsewhere
from schedlab.experiments.sweeps.workers import ONE_THREAD
from schedlab.sim.errors import SpecError

LOCAL = "local"


class RayWorkers:
    """Runs jobs on a Ray cluster.

    Parameters
    ----------
    address : str
        ``local`` starts a cluster on this machine and stops it at the end; ``auto`` finds the one
        this machine belongs to; else ``host:port`` or ``ray://host:port``.
    num_cpus : int
        CPUs of a local cluster; each point takes one.
    path : sequence of Path
        Where modules are searched here; workers search there, too.

    Raises
    ------
    SpecError
        If Ray is not installed, or there is no cluster at the address.

    Notes
    -----
    Workers need the same schedlab, the same packages and the traces under the same paths: each
    computes the content hash of its point again and refuses if it differs. They need no common
    file system for results: the files of a point come back through Ray, and appear here at once.
    """

    def __init__(self, address: str, num_cpus: int, path: Sequence[Path]) -> None:
        try:
            import ray
        except ImportError:
            raise SpecError(
                "--ray needs the package ray: pip install 'schedlab[ray]' (-j N runs processes "
                "of this machine without it)"
            ) from None
        self._ray = ray
        environment = {"PYTHONPATH": os.pathsep.join(map(str, path)), **ONE_THREAD}
        # The dates of results must be those this process would write.
        if "SOURCE_DATE_EPOCH" in os.environ:
            environment["SOURCE_DATE_EPOCH"] = os.environ["SOURCE_DATE_EPOCH"]
        try:
            ray.init(
                address=address,
                num_cpus=num_cpus if address == LOCAL else None,
                include_dashboard=False if address == LOCAL else None,
                runtime_env={"env_vars": environment},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise SpecError(f"--ray {address}: {error}") from None
        self.num_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, jobs: Sequence[Job]) -> Iterator[Done]:
        """Run all jobs; yield each as it ends, well or not."""
        task = self._ray.remote(num_cpus=1, max_retries=0)(_task)
        begin = time.perf_counter()
        running = {task.remote(job): job for job in jobs}
        while running:
            (ready,), _ = self._ray.wait(list(running), num_returns=1)
            job = running.pop(ready)
            try:
                done, files = self._ray.get(ready)
                if not done.error:
                    _write(job.folder, files)
            except (self._ray.exceptions.RayError, OSError) as error:
                line = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                done = Done(job, time.perf_counter() - begin, line)
            yield done


def _task(job: Job) -> tuple[Done, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as scratch:
        return run_elsewhere(job, Path(scratch))


def _write(folder: Path, files: dict[str, bytes]) -> None:
    with replacing_folder(folder) as new:
        for name, content in files.items():
            if name != MARKER:
                (new / name).write_bytes(content)
