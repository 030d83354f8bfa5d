"""The command `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    check_backend,
    points_bar,
    print_results,
)
from schedlab.experiments.commands.terminal import print_lines
from schedlab.sim.errors import SchedlabError
from schedlab.sim.text import json_text

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def run(
    spec_file: SpecFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Results folder; results/<name> if not given."
        ),
    ] = None,
    jobs: NumWorkers = 1,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Also write trace.json for ui.perfetto.dev.")
    ] = False,
    metric: Metrics = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: all points of its sweep."""
    from schedlab.experiments.figures.figures import draw_throughput
    from schedlab.experiments.results.results_folder import (
        add_to_marker,
        check_replaceable,
        replacing_folder,
    )
    from schedlab.experiments.results.saved_results import read_results, summary
    from schedlab.experiments.sweeps.sweep_all import run_into
    from schedlab.experiments.sweeps.workers import InProcess, Processes

    spec = load_experiment(spec_file, overrides)
    check_backend(spec, jobs, None)
    asked = known_metrics(metric)
    folder = output or results_folder(spec)
    check_replaceable(folder)
    with replacing_folder(folder) as new, points_bar(quiet) as progress:
        with InProcess(progress.requests_done, True) if jobs == 1 else Processes(jobs) as workers:
            results = run_into(spec, new, workers, progress.point_ended)
        draw_throughput(results)
        for point in results.runs if perfetto else ():
            point.load().to_perfetto(point.folder / "trace.json")
            add_to_marker(point.folder, ["trace.json"])
    if as_json:
        typer.echo(json_text(summary(spec, results)))
    elif not quiet:
        # Further metrics are computed from the tables, which are at their place now.
        print_results(read_results(folder) if asked else results, spec.name, asked)
        print_lines([f"results: {folder}"])
    if not any(row.mean("completed") for row in results.rows):
        raise SchedlabError("no request was answered, in any setting: see the warnings")
