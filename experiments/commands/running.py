"""How commands run points: by which workers, where they are kept, and what is told meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from schedlab.experiments.commands.exit_codes import INTERRUPTED
from schedlab.experiments.commands.terminal import Draw, bar, print_lines, print_table
from schedlab.sim.errors import SchedlabError, SpecError

if TYPE_CHECKING:
    from schedlab.experiments.results.saved_results import SavedResults
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.experiments.sweeps.jobs import Done, Job
    from schedlab.experiments.sweeps.runs import Runs
    from schedlab.experiments.sweeps.timing import TimeEstimate
    from schedlab.experiments.sweeps.workers import Workers

NumWorkers = Annotated[
    int, typer.Option("-j", "--jobs", metavar="N", min=1, help="Points run at the same time.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on a Ray cluster: host:port, ray://host:port or auto; alone it starts one here.",
    ),
]
AllCores = Annotated[
    int | None,
    typer.Option(
        "-j",
        "--jobs",
        metavar="N",
        min=1,
        help="Points run at the same time; by default one a core.",
    ),
]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep", metavar="DIR", help="Folder to keep runs in; those found there are not repeated."
    ),
]


class RayCommand(TyperCommand):
    """A command whose --ray may stand alone, for a local cluster."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's
        """Take what follows --ray for its address only if it looks like one."""
        if "--ray" in args:
            after = args.index("--ray") + 1
            if after == len(args) or not _is_address(args[after]):
                args = [*args[:after], "local", *args[after:]]
        return super().parse_args(ctx, args)


def _is_address(text: str) -> bool:
    """Tell the address of a cluster from the other things a command line holds."""
    from schedlab.experiments.specification.shipped import shipped_experiments

    is_file = text.endswith((".yaml", ".yml"))
    return not (text.startswith("-") or "=" in text or is_file or text in shipped_experiments())


@contextmanager
def opened_runs(
    folder: Path | None, workers: Workers, quiet: bool, light: bool = False
) -> Iterator[Runs]:
    """Give what runs points and keeps them in a folder; without a folder, until the end.

    If they are to be `light`, without their tables. What ends with an error before any point was
    kept leaves no folder behind.
    """
    from schedlab.experiments.sweeps.runs import Runs
    from schedlab.experiments.sweeps.store import Store

    missing = [] if folder is None else [p for p in (folder, *folder.parents) if not p.exists()]
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(folder or Path(scratch), light=light)
        with (
            told_what_is_kept(folder),
            store.lock(""),
            workers,
            points_bar(quiet) as progress,
        ):
            runs = Runs(store, workers, progress.point_ended, progress.stage_began)
            try:
                yield runs
            except SchedlabError:
                if missing and store.is_empty():
                    shutil.rmtree(missing[0])
                    for parent in missing[1:]:
                        with suppress(OSError):  # somebody else has begun to use it
                            parent.rmdir()
                raise


def local_workers(jobs: int | None, specs: Sequence[ExperimentSpec]) -> Workers:
    """Return who runs some points: this process one at a time, else processes of this machine.

    Unless told how many `jobs` at a time, one for each core that this process may use; what
    measures this machine, alone.
    """
    from schedlab.experiments.sweeps.workers import InProcess, Processes, num_cores

    if jobs is None:
        jobs = 1 if any(spec.backend == "real" for spec in specs) else num_cores()
    for spec in specs:
        check_backend(spec, jobs, None)
    return InProcess() if jobs == 1 else Processes(jobs)


def check_backend(spec: ExperimentSpec, jobs: int, ray: str | None) -> None:
    """Refuse to measure several points at the same time."""
    if spec.backend != "sim" and (jobs > 1 or ray is not None):
        raise SpecError(
            f"backend: {spec.backend} measures this machine: one point at a time (-j 1)"
        )


@contextmanager
def told_what_is_kept(folder: Path | None, what: str = "points") -> Iterator[None]:
    """Say after Ctrl-C that nothing is lost, if what is finished is kept."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None:
            raise
        typer.echo(
            f"interrupted; finished {what} are kept in {folder}: the same command goes on", err=True
        )
        raise typer.Exit(INTERRUPTED) from None


class PointsBar:
    """Tells of points that fail and, on a terminal, how far it is and how long it takes."""

    def __init__(self, draw: Draw | None) -> None:
        self._draw = draw
        self._count, self._total = 0, 1
        self._stage = ""
        self._errors: Counter[str] = Counter()

    def stage_began(self, told: str) -> None:
        """Take note of what the points from now on are for: others follow them."""
        self._stage = told

    def point_ended(self, count: int, total: int, timing: TimeEstimate, done: Done | None) -> None:
        """Take note of a point that ended, or of the first to begin."""
        if done is not None and done.error:
            if not self._errors[done.error]:
                told = f"failed: {done.job.label}, seed {done.job.spec.seed}: {done.error}"
                typer.echo(told, err=True)
            self._errors[done.error] += 1
        self._count, self._total = count, max(total, 1)
        if self._draw is not None:
            text = f"{count} of {total} points, {timing.text()}"
            if self._stage:
                text = f"{self._stage}: {text} for these"
            self._draw(text, count / self._total)

    def tell_repeated(self) -> None:
        """Say how many more points failed for the reasons told."""
        if more := self._errors.total() - len(self._errors):
            points = "1 more point" if more == 1 else f"{more} more points"
            typer.echo(f"failed: {points}, for the same reason", err=True)

    def requests_done(self, job: Job, num_done: int, num_requests: int) -> None:
        """Take note of how far the point at work is."""
        if self._draw is not None:
            share = (self._count + num_done / num_requests) / self._total
            self._draw(f"[{self._count + 1}/{self._total}] {job.label}", share)


@contextmanager
def points_bar(quiet: bool) -> Iterator[PointsBar]:
    """Show how far the points are on stderr; only failures where nobody would see a bar."""
    with bar(quiet) as draw:
        points = PointsBar(draw)
        yield points
    points.tell_repeated()


def print_results(results: SavedResults, name: str, metrics: Sequence[str] = ()) -> None:
    """Print the table of an experiment, with further metrics, and what qualifies it."""
    from schedlab.experiments.results.tables import notes, result_table

    table = result_table(results.rows, metrics)
    print_table(name, table.header, table.rows, table.num_keys)
    print_lines(["", *([table.note] if table.note else [])])
    print_lines(notes(results.cost_models, results.warnings, results.predictors))
