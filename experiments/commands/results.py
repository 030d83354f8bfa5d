"""The commands that read results: figures, a page, and what they say of policies and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.commands.experiment import AsJson, Metrics, known_metrics
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.text import json_text

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def plot(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Results folders; several are drawn as one."),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A figure by name (--list); may be repeated.",
            autocompletion=completion.figures,
        ),
    ] = None,
    metric: Metrics = None,
    x: Annotated[
        str | None,
        typer.Option("--x", metavar="KEY", help="Along the x axis: a swept key, or a metric."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A swept key whose values make the curves."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="KEY=A[,B]", help="Show these values of a swept key."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY=NAME", help="What to call a policy, or a swept value."),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Instead of the experiment's name; may be empty."),
    ] = None,
    file_format: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="FORMAT", help="pdf, svg or png; png and svg."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of a paper: column (3.4 inches) or page (7 inches)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Where to; the first DIR."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the figures, and draw nothing.")
    ] = False,
) -> None:
    """Draw figures of finished runs and searches: all that suit, or those asked for."""
    from schedlab.experiments.figures.chosen import FIGURES, SEARCHES, Chosen, draw_chosen
    from schedlab.experiments.figures.style import FORMATS, SIZES
    from schedlab.sim.errors import SpecError, nearest

    if show_list:
        rows = [(name, kind.caption) for name, kind in FIGURES.items()]
        rows += [(name, kind.caption) for name, kind in SEARCHES.items()]
        print_table("", ("figure", "shows"), rows, num_keys=2)
        return
    if not folders:
        raise SpecError("name a results folder, or --list the figures")
    for one in file_format or []:
        if one not in FORMATS:
            raise SpecError(f"--format {one}: {nearest(one, FORMATS)}")
    if size is not None and size not in SIZES:
        raise SpecError(f"--size {size}: {nearest(size, SIZES)}")
    wanted = {key: value.split(",") for key, value in _pairs("--filter", only)}
    names = [name.replace("-", "_") for name in figure or []]
    # The metric of a distribution is a latency by its short name, which is no metric of a run.
    metrics = (metric or []) if names == ["cdf"] else known_metrics(metric)
    chosen = Chosen(names, metrics, x, by or [], wanted, dict(_pairs("--label", label)), title)
    written, left_out = draw_chosen(folders, chosen, output, file_format or ("png", "svg"), size)
    for path in written:
        typer.echo(path)
    for line in left_out:
        typer.echo(f"left out: {line}", err=True)
    for folder in folders:
        _tell_missing(folder)


def _tell_missing(folder: Path) -> None:
    """Warn of points that are asked for and have no result: what is shown is not all."""
    from schedlab.experiments.results.saved_results import missing_points

    if told := missing_points(folder):
        typer.echo(f"warning: {told}", err=True)


def _pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """Split what is written as KEY=VALUE, at the last sign: a policy may have knobs in its name."""
    from schedlab.sim.errors import SpecError

    pairs = []
    for text in given or []:
        key, sign, value = text.rpartition("=") if option == "--label" else text.partition("=")
        if not sign or not key:
            raise SpecError(f"{option} {text}: write it as {option} KEY=VALUE")
        pairs.append((key, value))
    return pairs


@app.command("report")
def report_page(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Results; several are shown as one.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="DIR/report.html if not given."),
    ] = None,
) -> None:
    """Write one HTML page of finished runs or a search, that needs no network."""
    from schedlab.experiments.report.page import write_page

    typer.echo(write_page(folders[0], output, folders[1:]))


@app.command("compare")
def compare_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Results of a run or sweep with replications.")
    ],
    metric: Metrics = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY", help="Hold the others against this one; the first by default."
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(metavar="KEY", help="Swept key whose values are compared.")
    ] = "policy",
    every: Annotated[
        bool, typer.Option("--all", help="Also show comparisons that decide nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which policy beats which, by how much and how surely, over the seeds they share."""
    from dataclasses import asdict

    from schedlab.experiments.analysis.policy_comparison import (
        METRICS,
        compare_policies,
        left_out,
        rejections,
    )
    from schedlab.experiments.results.saved_results import read_points
    from schedlab.experiments.statistics import LEAST_SEEDS, SMALLEST, is_decided
    from schedlab.sim.errors import SpecError
    from schedlab.sim.text import number

    metrics = known_metrics(metric) or METRICS
    _tell_missing(folder)
    points = read_points(folder)
    if told := rejections(points):
        typer.echo(f"warning: {told}", err=True)
    try:
        found = compare_policies(points, metrics, against, key)
    except SpecError as error:
        raise SpecError(f"{folder}: {error}") from None
    for line in left_out(points, against, key):
        typer.echo(f"left out: {line}", err=True)
    if as_json:
        typer.echo(json_text([asdict(c) | {"change": c.change._asdict()} for c in found]))
        return
    shown = found if every or metric else [one for one in found if is_decided(one.change)]
    if shown:
        print_table(
            "",
            ("setting", "verdict", f"mean of\n{key}", "mean\nagainst", "effect\nsize", "seeds"),
            [
                (one.setting.replace("workload.", "") or "-", one.verdict, number(one.means[0]),
                 number(one.means[1]), number(one.change.effect_size, 2), str(one.change.num_pairs))
                for one in shown
            ],
        )  # fmt: skip
    hidden = len(found) - len(shown)
    print_lines(
        [
            *([f"{hidden} of {len(found)} comparisons decide nothing (--all)"] if hidden else []),
            "[low, high]: 95 % interval of the paired change, per cent of the second; a verdict "
            f"needs {LEAST_SEEDS} seeds, a change of {SMALLEST:.0%} at least, and a p-value of 5 % "
            f"that is corrected for {len(found)} comparisons (Holm); effect size: mean paired "
            "difference over its standard deviation",
        ]
    )


@app.command("batch-means")
def batch_means_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of one long run.")],
    num_batches: Annotated[
        int, typer.Option("--batches", metavar="N", help="Of successive arrivals.")
    ] = 20,
) -> None:
    """Say how sure the mean latencies of one long run are."""
    from schedlab.experiments.analysis.run_intervals import run_intervals
    from schedlab.experiments.results.point_folder import load_run
    from schedlab.experiments.statistics import with_interval
    from schedlab.sim.errors import SpecError

    inner = next((path.parent for path in sorted(folder.glob("*/result.json"))), None)
    if inner is not None and not (folder / "result.json").is_file():
        raise SpecError(f"{folder} holds several runs: name the folder of one, e.g. {inner}")
    result = load_run(folder)
    found = run_intervals(result, num_batches)
    rows: list[tuple[str, ...]] = [
        (name, with_interval(one.mean, one.half_width), f"{one.lag1:+.2f}",
         "yes" if one.long_enough else "NO: batches are correlated, the interval is too narrow")
        for name, one in found.items()
    ]  # fmt: skip
    header = ("metric", "mean ± 95 %", "correlation of neighbours", "batches long enough")
    print_table("", header, rows)
    if result.window is None:
        typer.echo("warm-up is in it: cut it off with measure: {warm_up_s: ...}")


@app.command("by-class")
def by_class_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of a run or sweep.")],
    column: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of requests.parquet that tells classes apart; by default the tenant if "
            "there is one, else the priority.",
        ),
    ] = None,
    metric: Metrics = None,
) -> None:
    """Show what each class of requests got: SLO attainment, goodput, longest wait, fairness."""
    from schedlab.experiments.analysis.by_class import METRICS, class_table

    _tell_missing(folder)
    header, lines = class_table(folder, column, known_metrics(metric) or tuple(METRICS))
    print_table("", header, lines, num_keys=2)


@app.command("log")
def log_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of a run or sweep.")],
    to: Annotated[str, typer.Option(metavar="TRACKER", help="mlflow or wandb.")],
    project: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Experiment (MLflow) or project (W&B); the name by default."
        ),
    ] = None,
) -> None:
    """Send finished runs to MLflow or Weights & Biases."""
    from schedlab.experiments.results.saved_results import read_results
    from schedlab.experiments.results.trackers import TRACKERS, log_runs
    from schedlab.sim.errors import SpecError, nearest

    if to not in TRACKERS:
        raise SpecError(f"--to {to}: {nearest(to, TRACKERS)}")
    count = log_runs(read_results(folder), to, project)
    typer.echo(f"{count} runs sent to {to}")
