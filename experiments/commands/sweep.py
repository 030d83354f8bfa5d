"""The commands that run many points: sweep, find, tune; and those that read their results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from schedlab.experiments.commands.experiment import (
    AsJson,
    Overrides,
    Quiet,
    SpecFile,
    load_experiment,
    results_folder,
)
from schedlab.experiments.commands.results import (
    batch_means_command,
    by_class_command,
    compare_policies_command,
)
from schedlab.experiments.commands.terminal import console, print_table
from schedlab.sim.errors import SpecError

if TYPE_CHECKING:
    from schedlab.experiments.search.evaluate import Evaluator
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.experiments.sweeps.sweep_all import Progress, Shard

FAILED = 1
INTERRUPTED = 130

Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder that keeps the points; results/<name>-sweep."),
]
SearchOutput = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="Folder that keeps the runs; results/<name>-find, -tune."),
]
NumWorkers = Annotated[
    int, typer.Option("-j", "--jobs", min=1, help="Points run at the same time.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on a Ray cluster: host:port, ray://host:port or auto; alone it starts one here.",
    ),
]


def sweep_command(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: Output = None,
    jobs: NumWorkers = 1,
    ray: RayAddress = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Run only the I-th of N parts, I from 1 (Slurm arrays)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and about how long it takes.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep by many workers; run it again and only what is missing runs."""
    from schedlab.experiments.sweeps.dry_run import describe_plan
    from schedlab.experiments.sweeps.store import Store
    from schedlab.experiments.sweeps.sweep_all import plan, sweep_all, swept_data
    from schedlab.experiments.sweeps.workers import choose_workers

    spec = load_experiment(spec_file, overrides)
    _check_backend(spec, jobs, ray)
    part = _shard(shard)
    folder = output or results_folder(spec, "sweep")
    if dry_run:
        store = Store(folder, dry=True)
        for line in describe_plan(plan(spec, store, part), store, jobs):
            typer.echo(line)
        return
    store = Store(folder)
    with (
        _keeping(folder),
        choose_workers(jobs, ray) as workers,
        _points_bar(quiet) as progress,
    ):
        swept = sweep_all(spec, store, workers, shard=part, progress=progress)
    if as_json:
        typer.echo(json.dumps(swept_data(spec, swept), indent=1))
    elif not quiet:
        _print_swept(spec, swept, folder)
    if swept.failures:
        raise typer.Exit(FAILED)


def find_command(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: SearchOutput = None,
    jobs: NumWorkers = 1,
    ray: RayAddress = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the largest value within bars (the section `find`), e.g. the highest request rate."""
    from schedlab.experiments.search.find import find, verdicts
    from schedlab.experiments.search.search_report import (
        find_data,
        find_lines,
        find_rows,
        write_json,
    )

    spec = load_experiment(spec_file, overrides)
    folder = output or results_folder(spec, "find")
    with _evaluator(spec, folder, jobs, ray, quiet) as evaluator:
        found = find(spec, evaluator)
    assert spec.find is not None
    told = verdicts(spec.find, found)
    data = find_data(spec, found, told, evaluator.num_runs)
    write_json(data, folder / "find.json")
    header = ("setting", spec.find.maximize, "holds at", "breaks at")
    lines = [*find_lines(spec, found), *told, f"{evaluator.num_runs} runs in {folder}"]
    _print_found(data, header, find_rows(found), lines, as_json, quiet)


def tune_command(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: SearchOutput = None,
    jobs: NumWorkers = 1,
    ray: RayAddress = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the best values of engine limits within bars (the section `tune`)."""
    from schedlab.experiments.search.search_report import (
        tune_data,
        tune_lines,
        tune_rows,
        write_json,
    )
    from schedlab.experiments.search.tune import tune

    spec = load_experiment(spec_file, overrides)
    folder = output or results_folder(spec, "tune")
    with _evaluator(spec, folder, jobs, ray, quiet) as evaluator:
        tuned = tune(spec, evaluator)
    assert spec.tune is not None
    data = tune_data(spec, tuned, evaluator.num_runs)
    write_json(data, folder / "tune.json")
    header = (*(key.rpartition(".")[2] for key in spec.tune.over), spec.tune.maximize, "bars")
    lines = [*tune_lines(spec, tuned), f"{evaluator.num_runs} runs in {folder}"]
    _print_found(data, header, tune_rows(tuned), lines, as_json, quiet)


def _print_found(
    data: dict[str, Any],
    header: tuple[str, ...],
    rows: list[tuple[str, ...]],
    lines: list[str],
    as_json: bool,
    quiet: bool,
) -> None:
    """Print what a search found: as JSON, or a table and the lines under it."""
    if as_json:
        typer.echo(json.dumps(data, indent=1))
    elif not quiet:
        print_table("", header, rows)
        for line in lines:
            typer.echo(line)


@contextmanager
def _evaluator(
    spec: ExperimentSpec, folder: Path, jobs: int, ray: str | None, quiet: bool
) -> Iterator[Evaluator]:
    from schedlab.experiments.search.evaluate import Evaluator
    from schedlab.experiments.sweeps.store import Store
    from schedlab.experiments.sweeps.workers import choose_workers

    _check_backend(spec, jobs, ray)
    store = Store(folder)
    with (
        _keeping(folder),
        store.lock(""),
        choose_workers(jobs, ray) as workers,
        _points_bar(quiet) as progress,
    ):
        yield Evaluator(store, workers, progress)


def _check_backend(spec: ExperimentSpec, jobs: int, ray: str | None) -> None:
    if spec.backend == "real" and (jobs > 1 or ray is not None):
        raise SpecError("backend: real measures this machine: one point at a time (-j 1)")


def _shard(text: str | None) -> Shard | None:
    from schedlab.experiments.sweeps.sweep_all import Shard

    if text is None:
        return None
    index, slash, total = text.partition("/")
    if not slash or not index.isdecimal() or not total.isdecimal():
        raise SpecError(f"--shard {text}: write it as I/N, e.g. 1/4 for the first of four parts")
    return Shard(int(index), int(total))


@contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    """Say after Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted; finished points are kept in {folder}: the same command goes on", err=True
        )
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _points_bar(quiet: bool) -> Iterator[Progress | None]:
    """Tell of failures as they happen and, on a terminal, how far it is and how long it takes."""
    from schedlab.experiments.sweeps.jobs import Done
    from schedlab.experiments.sweeps.timing import Timing

    def complain(done: Done | None) -> None:
        if done is not None and done.error:
            seed = done.job.spec.seed
            typer.echo(f"failed: {done.job.label}, seed {seed}: {done.error}", err=True)

    if quiet or not sys.stderr.isatty():
        yield lambda count, total, timing, done: complain(done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        max_refresh = 1.0

        def render(self, task: Task) -> Text:
            timing = task.fields.get("timing")
            return Text("" if timing is None else timing.text())

    columns = (TextColumn("{task.completed:.0f} of {task.total:.0f} points"), BarColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeLeft(), console=console, transient=True) as bar:
        task = bar.add_task("", total=1)

        def show(count: int, total: int, timing: Timing, done: Done | None) -> None:
            complain(done)
            bar.update(task, completed=count, total=max(total, 1), timing=timing)

        yield show


def _print_swept(spec: ExperimentSpec, swept: Any, folder: Path) -> None:  # noqa: ANN401
    from rich.text import Text

    from schedlab.experiments.results import tables as report

    screen = console()
    if swept.outcome is not None:
        outcome = swept.outcome
        screen.print(report.table(outcome.rows, spec.name))
        for line in report.notes(outcome.cost_models, outcome.warnings, outcome.predictors):
            screen.print(Text(line))
    for done in swept.failures:
        screen.print(Text(f"failed: {done.job.label}, seed {done.job.spec.seed}: {done.error}"))
        if done.trace:
            screen.print(Text(done.trace))
    counts = [f"{swept.num_points} points: {swept.num_found} were there"]
    counts.append(f"{swept.num_points - swept.num_found - len(swept.failures)} run")
    if swept.failures:
        counts.append(f"{len(swept.failures)} FAILED (their settings are not in the table)")
    if swept.num_missing:
        counts.append(f"{swept.num_missing} left to other shards; the last one writes the summary")
    screen.print(Text(", ".join(counts)))
    if swept.outcome is not None and "policy" in spec.sweep and spec.replications > 1:
        screen.print(Text(f"who beats whom, and how surely: schedlab compare-policies {folder}"))
    if swept.num_others:
        screen.print(
            Text(
                f"{swept.num_others} more results in the folder are of other settings, or of "
                "another version of schedlab"
            )
        )
    screen.print(Text(f"results: {folder}"))


class _RayCommand(TyperCommand):
    """A command whose --ray may stand alone, for a local cluster."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's
        if "--ray" in args:
            after = args.index("--ray") + 1
            if after == len(args) or not _is_address(args[after]):
                args = [*args[:after], "local", *args[after:]]
        return super().parse_args(ctx, args)


def _is_address(text: str) -> bool:
    """Tell the address of a cluster from the other things a command line holds."""
    return not (text.startswith("-") or "=" in text or text.endswith((".yaml", ".yml")))


def add_sweep_commands(app: typer.Typer) -> None:
    """Add the commands of this module to an application."""
    app.command("sweep", cls=_RayCommand)(sweep_command)
    app.command("find", cls=_RayCommand)(find_command)
    app.command("tune", cls=_RayCommand)(tune_command)
    app.command("batch-means")(batch_means_command)
    app.command("by-class")(by_class_command)
    app.command("compare-policies")(compare_policies_command)
