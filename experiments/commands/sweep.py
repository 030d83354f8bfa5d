"""The commands that run many points: sweep, find, tune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from schedlab.experiments.commands.exit_codes import FAILED
from schedlab.experiments.commands.experiment import (
    AsJson,
    Metrics,
    Overrides,
    Quiet,
    SpecFile,
    known_metrics,
    load_experiment,
    results_folder,
)
from schedlab.experiments.commands.running import (
    NumWorkers,
    RayAddress,
    RayCommand,
    check_backend,
    opened_runs,
    points_bar,
    print_results,
    told_what_is_kept,
)
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.errors import SpecError
from schedlab.sim.text import json_text

if TYPE_CHECKING:
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.experiments.sweeps.runs import Runs
    from schedlab.experiments.sweeps.sweep_all import Shard, Swept

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Folder that keeps the points; results/<name>-sweep.",
    ),
]
Light = Annotated[
    bool, typer.Option("--light", help="Keep the metrics of each point, and no tables.")
]


def _search_output(name: str) -> Any:  # noqa: ANN401 - a type, as typer reads it
    """Return the option that says where a search keeps its runs."""
    told = f"Folder that keeps the runs; results/<name>-{name}."
    return Annotated[Path | None, typer.Option("-o", "--output", metavar="FOLDER", help=told)]


@app.command("sweep", cls=RayCommand)
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
    light: Light = False,
    metric: Metrics = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep by many workers; run it again and only what is missing runs."""
    from schedlab.experiments.figures.figures import draw_throughput
    from schedlab.experiments.sweeps.dry_run import describe_plan
    from schedlab.experiments.sweeps.store import Store
    from schedlab.experiments.sweeps.sweep_all import plan, sweep_all, swept_data
    from schedlab.experiments.sweeps.workers import choose_workers

    spec = load_experiment(spec_file, overrides)
    check_backend(spec, jobs, ray)
    asked = known_metrics(metric)
    if light:
        _refuse_more_than_is_kept(asked, spec)
    part = _shard(shard)
    folder = output or results_folder(spec, "sweep")
    if dry_run:
        store = Store(folder, dry=True, light=light)
        for line in describe_plan(plan(spec, store, part), store, jobs):
            typer.echo(line)
        return
    store = Store(folder, light=light)
    with (
        told_what_is_kept(folder),
        choose_workers(jobs, ray) as workers,
        points_bar(quiet) as progress,
    ):
        swept = sweep_all(spec, store, workers, shard=part, progress=progress.point_ended)
        if swept.results is not None:
            draw_throughput(swept.results)
    if as_json:
        typer.echo(json_text(swept_data(spec, swept)))
    elif not quiet:
        _print_swept(spec, swept, folder, asked)
    if swept.failures:
        raise typer.Exit(FAILED)


def _refuse_more_than_is_kept(asked: Sequence[str], spec: ExperimentSpec) -> None:
    from schedlab.sim.metrics.registry import every_fleet, every_run

    is_fleet = spec.cluster is not None or any(key.startswith("cluster") for key in spec.sweep)
    kept = {metric.name for metric in every_run() + (every_fleet() if is_fleet else [])}
    if more := [name for name in asked if name not in kept]:
        raise SpecError(f"--light keeps no tables, and {more[0]} is computed from them")


class _Outcome(NamedTuple):
    """What a search came to: as JSON, and as a table with lines under it."""

    data: dict[str, Any]
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    lines: list[str]


def _find(spec: ExperimentSpec, runs: Runs) -> _Outcome:
    """Find the largest or least value within constraints: the highest rate, the fewest engines."""
    from schedlab.experiments.search.cheapest import cheapest
    from schedlab.experiments.search.find import find, verdicts
    from schedlab.experiments.search.search_report import find_data, find_lines, find_table

    found = find(spec, runs)
    assert spec.find is not None
    best = cheapest(spec, found, runs)
    told = list(best.lines) if best is not None else verdicts(spec.find, found)
    data = find_data(spec, found, told, runs.num_asked, best)
    return _Outcome(data, *find_table(spec, found), [*find_lines(spec, found), *told])


def _tune(spec: ExperimentSpec, runs: Runs) -> _Outcome:
    """Find the best values within constraints: of engine limits, policies, fleets."""
    from schedlab.experiments.search.search_report import tune_data, tune_lines, tune_rows
    from schedlab.experiments.search.tune import tune
    from schedlab.experiments.specification.sweep import short_names

    tuned = tune(spec, runs)
    assert spec.tune is not None
    header = (*short_names(list(spec.tune.over)).values(), spec.tune.goal, "constraints")
    data = tune_data(spec, tuned, runs.num_asked)
    return _Outcome(data, header, tune_rows(tuned), tune_lines(spec, tuned))


def _search_command(
    name: str, search: Callable[[ExperimentSpec, Runs], _Outcome]
) -> Callable[..., None]:
    """Return the command that searches, writes NAME.json and prints what was found."""

    def command(
        spec_file: SpecFile,
        overrides: Overrides = None,
        output: Path | None = None,
        jobs: NumWorkers = 1,
        ray: RayAddress = None,
        tables: Annotated[
            bool,
            typer.Option("--tables", help="Also keep the requests and steps of every run."),
        ] = False,
        quiet: Quiet = False,
        as_json: AsJson = False,
    ) -> None:
        from schedlab.experiments.search.constraints import needs_tables
        from schedlab.experiments.search.search_report import basis_lines, write_json
        from schedlab.experiments.sweeps.workers import choose_workers

        spec = load_experiment(spec_file, overrides)
        folder = output or results_folder(spec, name)
        check_backend(spec, jobs, ray)
        light = not (tables or needs_tables(spec))
        with opened_runs(folder, choose_workers(jobs, ray), quiet, light) as runs:
            found = search(spec, runs)
        basis = basis_lines(runs.cost_models, list(runs.extrapolated.values()))
        table = {"header": found.header, "rows": found.rows, "num_text": 1}
        data = {
            **found.data,
            "cost_models": runs.cost_models,
            "basis": basis,
            "table": table,
            "lines": [*found.lines, *basis],
        }
        write_json(data, folder / f"{name}.json")
        if as_json:
            typer.echo(json_text(data))
        elif not quiet:
            print_table("", found.header, found.rows)
            print_lines(["", *found.lines, *basis])
            print_lines([f"{runs.num_asked} runs in {folder} (schedlab plot, schedlab report)"])

    command.__doc__ = search.__doc__
    command.__annotations__["output"] = _search_output(name)
    return command


def _shard(text: str | None) -> Shard | None:
    from schedlab.experiments.sweeps.sweep_all import Shard

    if text is None:
        return None
    index, slash, total = text.partition("/")
    if not slash or not index.isdecimal() or not total.isdecimal():
        raise SpecError(f"--shard {text}: write it as I/N, e.g. 1/4 for the first of four parts")
    return Shard(int(index), int(total))


def _print_swept(spec: ExperimentSpec, swept: Swept, folder: Path, metrics: Sequence[str]) -> None:
    if swept.results is not None:
        print_results(swept.results, spec.name, metrics)
    for done in swept.failures:
        print_lines([f"failed: {done.job.label}, seed {done.job.spec.seed}: {done.error}"])
        print_lines([done.trace] if done.trace else [])
    counts = [f"{swept.num_points} points: {swept.num_found} were there"]
    counts.append(f"{swept.num_points - swept.num_found - len(swept.failures)} run")
    if swept.failures:
        counts.append(f"{len(swept.failures)} FAILED (their settings are not in the table)")
    if swept.num_missing:
        counts.append(f"{swept.num_missing} left to other shards; the last one writes the summary")
    lines = [", ".join(counts)]
    if swept.results is not None and "policy" in spec.sweep and spec.replications > 1:
        lines.append(f"who beats whom, and how surely: schedlab compare {folder}")
    if swept.num_others:
        lines.append(
            f"{swept.num_others} more results in the folder are of other settings, or of "
            "another version of schedlab"
        )
    print_lines([*lines, f"results: {folder}"])


app.command("find", cls=RayCommand)(_search_command("find", _find))
app.command("tune", cls=RayCommand)(_search_command("tune", _tune))
