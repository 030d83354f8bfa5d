"""The results folder of a sweep: every point under its content hash, whole or not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from schedlab.experiments.results.point_folder import PointMetrics, content_hash_of, read_point
from schedlab.experiments.results.results_folder import SWEEP_FILE, tidy_up_after_the_killed
from schedlab.experiments.results.saved_results import POINTS_FILE
from schedlab.experiments.running.point_hash import point_hash
from schedlab.experiments.specification.experiment import ExperimentSpec
from schedlab.experiments.specification.sweep import Point, slug
from schedlab.experiments.sweeps.jobs import Job
from schedlab.sim.errors import SpecError
from schedlab.sim.files import alone, write_text

_LOCK = ".lock"

_SHOWN_HASH = 16


class Store:
    """Results of points in one folder, found by content.

    Parameters
    ----------
    folder : Path
        It must be absent, empty, or one that a sweep made.
    dry : bool
        Whether only to look; else the folder is made if need be.
    light : bool
        Whether results need no tables: new ones get none. Else those without are not there.

    Raises
    ------
    SpecError
        If the folder holds anything else.
    """

    def __init__(self, folder: Path, dry: bool = False, light: bool = False) -> None:
        self.folder = folder.absolute()
        self._light = light
        check_sweep_folder(self.folder)
        if not dry and not (self.folder / SWEEP_FILE).exists():
            write_text(self.folder / SWEEP_FILE, '{"made_by": "schedlab sweep"}\n')
        self._known: dict[str, Path] = dict(_complete(self.folder, light))

    def job(self, spec: ExperimentSpec, label: str) -> Job:
        """Return the work that would give the result of a point, and where it goes.

        Parameters
        ----------
        spec : ExperimentSpec
            The point.
        label : str
            What to call it; the beginning of the folder's name.

        Raises
        ------
        OSError
            If a file the point names cannot be read.
        """
        content = point_hash(spec)
        name = f"{slug(label)}-s{spec.seed}-{content[:_SHOWN_HASH]}"
        folder = self._known.get(content, self.folder / name)
        return Job(spec, content, folder, label, self._light)

    def has(self, job: Job) -> bool:
        """Say whether the result of a point is there, complete."""
        content = job.content_hash
        if content not in self._known and content_hash_of(job.folder, self._light) == content:
            self._known[content] = job.folder
        return content in self._known

    def load(self, job: Job) -> PointMetrics:
        """Return what a result that is there says."""
        return read_point(self._known[job.content_hash], job.label)

    def num_others(self, jobs: Sequence[Job]) -> int:
        """Count the results here that are none of these points."""
        return len(self._known.keys() - {job.content_hash for job in jobs})

    def write_points(self, name: str, todo: Sequence[Point], jobs: Sequence[Job]) -> None:
        """Write down which folder holds which point of an experiment."""
        places = [
            {
                "label": point.label,
                "settings": point.settings,
                "replication": point.replication,
                "seed": point.spec.seed,
                "content_hash": job.content_hash,
                "folder": job.folder.name,
            }
            for point, job in zip(todo, jobs, strict=True)
        ]
        text = json.dumps({"name": name, "points": places}, indent=1)
        write_text(self.folder / POINTS_FILE, text + "\n")

    def is_empty(self) -> bool:
        """Tell whether nothing but the sweep's own marks lies in the folder."""
        return all(
            path.is_file() and (path.name == SWEEP_FILE or path.name.startswith(_LOCK))
            for path in self.folder.iterdir()
        )

    @contextmanager
    def lock(self, part: str) -> Iterator[None]:
        """Keep a second sweep from doing the same work in this folder at the same time.

        Parameters
        ----------
        part : str
            What of the sweep is done here: different shards may work side by side.

        Raises
        ------
        SpecError
            If another process is at it. A lock ends with its process, however that ends.
        """
        path = self.folder / f"{_LOCK}{part}"
        path.touch()
        with alone(path, "sweep"):
            tidy_up_after_the_killed(self.folder)
            yield
            # Workers of a sweep that was killed live until they notice.
            tidy_up_after_the_killed(self.folder)


def check_sweep_folder(folder: Path) -> None:
    """Make sure that a sweep may add its files to a folder.

    Parameters
    ----------
    folder : Path
        Where results are to go.

    Raises
    ------
    SpecError
        If it is a file, or a folder with content that no sweep made.
    """
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder} is not a folder; choose another with -o")
    if not folder.is_dir():
        return
    # One that was killed before it had marked the folder left a file that was to be the marker.
    begun = re.compile(rf"\.{re.escape(SWEEP_FILE)}\.\d+\.tmp")
    strangers = any(not begun.fullmatch(path.name) for path in folder.iterdir())
    # Asked for last: another shard, which writes it before all else, may be beginning, too.
    if strangers and not (folder / SWEEP_FILE).exists():
        raise SpecError(f"{folder} is no folder of a sweep; choose another or a new one with -o")


def _complete(folder: Path, light: bool) -> Iterator[tuple[str, Path]]:
    """Yield the content hash and folder of each complete result."""
    for inside in sorted(folder.iterdir()) if folder.is_dir() else []:
        if inside.is_dir() and not inside.name.startswith("."):
            content = content_hash_of(inside, light)
            if content is not None:
                yield content, inside
