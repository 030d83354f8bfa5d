"""The `regress` commands: check a fixed matrix of runs against a baseline, or keep a new one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schedlab.experiments.commands.experiment import Quiet
from schedlab.experiments.commands.running import AllCores, Keep, local_workers, opened_runs
from schedlab.experiments.commands.terminal import print_lines, print_table
from schedlab.experiments.specification.own_modules import find_own_modules, taken_from_elsewhere

if TYPE_CHECKING:
    from schedlab.experiments.regression.check import CaseVerdict, Outcome
    from schedlab.experiments.regression.matrix import Matrix

REGRESSED = 1
_MOST_ROWS = 60
_FEW = 20
"""Points that take no longer than processes take to start."""

app = typer.Typer(
    help="Guard a fixed matrix of policies, workloads and seeds against regressions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Folder = Annotated[
    Path,
    typer.Option("--baseline", metavar="DIR", help="Folder of matrix.yaml and baseline.json."),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.")
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Also write a Markdown summary.")
]

_DEFAULT = Path("regression")


@app.command("check")
def check_command(
    baseline: Folder = _DEFAULT,
    junit: Junit = None,
    markdown: Markdown = None,
    jobs: AllCores = None,
    keep: Keep = None,
    quiet: Quiet = False,
) -> None:
    """Run the matrix and compare: exit 1 on a regression, 2 on bad input.

    Without a folder `regression` here, the one that comes with schedlab is run.
    """
    from schedlab.experiments.regression import check as regress
    from schedlab.experiments.regression import report as regress_report
    from schedlab.experiments.regression.baseline import kept_baseline, version_change
    from schedlab.experiments.specification.shipped import shipped_folder
    from schedlab.sim.files import check_writable, write_text

    for report in (junit, markdown):
        if report is not None:
            check_writable(report)
    if baseline == _DEFAULT and not baseline.exists():
        baseline = shipped_folder("regression")
    matrix = _matrix(baseline)
    kept = kept_baseline(baseline)
    outcome = _measure(matrix, jobs, keep, quiet)
    cases = regress.compare(matrix, kept, outcome)
    versions_differ = version_change(kept)
    if junit is not None:
        regress_report.write_junit(cases, junit)
    if markdown is not None:
        write_text(markdown, regress_report.markdown(cases, versions_differ))
    passes = regress_report.passes(cases)
    if not quiet or not passes:
        _print(cases, versions_differ)
    if not passes:
        raise typer.Exit(REGRESSED)


@app.command("update")
def update_command(
    baseline: Folder = _DEFAULT,
    jobs: AllCores = None,
    keep: Keep = None,
    quiet: Quiet = False,
) -> None:
    """Run the matrix and keep what it gives as the baseline, after showing what moved.

    Without a folder `regression` here, it is made with the matrix that comes with schedlab.
    """
    from schedlab.experiments.regression import check as regress
    from schedlab.experiments.regression.baseline import BASELINE, kept_baseline, version_change
    from schedlab.experiments.specification.shipped import shipped_folder
    from schedlab.sim.files import check_writable, write_text

    if baseline == _DEFAULT and not baseline.exists():
        baseline.mkdir()
        shipped = shipped_folder("regression") / "matrix.yaml"
        write_text(baseline / "matrix.yaml", shipped.read_text(encoding="utf-8"))
        typer.echo(f"{baseline / 'matrix.yaml'}: that of schedlab, to be made yours", err=True)
    matrix = _matrix(baseline)
    path = baseline / BASELINE
    check_writable(path)
    kept = kept_baseline(baseline) if path.exists() else None
    outcome = _measure(matrix, jobs, keep, quiet)
    if kept is not None and not quiet:
        _print(regress.compare(matrix, kept, outcome), version_change(kept))
    regress.keep(baseline, outcome)
    if not quiet:
        typer.echo(f"kept {len(outcome.points)} points in {path}")


def _measure(matrix: Matrix, jobs: int | None, keep: Path | None, quiet: bool) -> Outcome:
    from schedlab.experiments.regression.check import measure
    from schedlab.sim.metrics.registry import every_run

    if jobs is None and len(matrix.points) < _FEW:
        jobs = 1
    # Tables are written if a metric needs them.
    light = matrix.metrics.keys() <= {metric.name for metric in every_run()}
    workers = local_workers(jobs, [point.spec for point in matrix.points])
    with opened_runs(keep, workers, quiet, light) as runs:
        return measure(matrix, runs)


def _matrix(folder: Path) -> Matrix:
    from schedlab.experiments.regression.matrix import load_matrix
    from schedlab.experiments.running.point_hash import own_classes

    find_own_modules(folder.absolute())
    matrix = load_matrix(folder)
    named = own_classes([*matrix.metrics, *(point.spec.to_data() for point in matrix.points)])
    for line in taken_from_elsewhere(folder.absolute(), named):
        typer.echo(line, err=True)
    return matrix


def _print(cases: list[CaseVerdict], versions_differ: str) -> None:
    from schedlab.experiments.regression.report import HEADER, rows, summary_lines

    moved = rows(cases)
    if moved:
        print_table("", HEADER, moved[:_MOST_ROWS])
    if len(moved) > _MOST_ROWS:
        print_lines([f"... and {len(moved) - _MOST_ROWS} more rows (--markdown FILE has more)"])
    print_lines(summary_lines(cases, versions_differ))
