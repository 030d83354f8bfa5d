"""The commands that read results: figures, a page, and what they say of policies and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.experiments.commands.experiment import AsJson, Metrics, known_metrics
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.sim.text import json_text

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
) -> None:
    """Draw figures of a finished run into its folder."""
    from schedlab.experiments.figures.figures import draw

    for path in draw(folder):
        typer.echo(path)


@app.command("report")
def report_page(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A results folder.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.html", help="DIR/report.html if not given."),
    ] = None,
) -> None:
    """Write one HTML page of a finished run or sweep, that needs no network."""
    from schedlab.experiments.report.page import write_page

    typer.echo(write_page(folder, output))


@app.command("compare-policies")
def compare_policies_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Results of a run or sweep with replications.")
    ],
    metric: Metrics = None,
    against: Annotated[
        str | None, typer.Option(help="Hold the others against this one; the first by default.")
    ] = None,
    key: Annotated[str, typer.Option(help="Swept key whose values are compared.")] = "policy",
    every: Annotated[
        bool, typer.Option("--all", help="Also show comparisons that decide nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which policy beats which, by how much and how surely, over the seeds they share."""
    from dataclasses import asdict

    from schedlab.experiments.analysis.policy_comparison import METRICS, compare_policies
    from schedlab.experiments.results.saved_results import read_points
    from schedlab.experiments.statistics import LEAST_SEEDS, SMALLEST, is_decided
    from schedlab.sim.text import number

    found = compare_policies(read_points(folder), known_metrics(metric) or METRICS, against, key)
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
    num_batches: Annotated[int, typer.Option("--batches", help="Of successive arrivals.")] = 20,
) -> None:
    """Say how sure the mean latencies of one long run are."""
    from schedlab.experiments.analysis.run_intervals import run_intervals
    from schedlab.experiments.statistics import with_interval
    from schedlab.sim.result import RunResult

    result = RunResult.load(folder)
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
            help="Column of requests.parquet that tells classes apart; by default the tenant if "
            "there is one, else the priority."
        ),
    ] = None,
    metric: Metrics = None,
) -> None:
    """Show what each class of requests got: SLO attainment, goodput, longest wait, fairness."""
    from schedlab.experiments.analysis.by_class import METRICS, class_table

    header, lines = class_table(folder, column, known_metrics(metric) or tuple(METRICS))
    print_table("", header, lines, num_keys=2)
