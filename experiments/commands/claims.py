"""The command that holds claims against simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from schedlab.experiments.commands.experiment import Quiet
from schedlab.experiments.commands.running import AllCores, Keep, local_workers, opened_runs
from schedlab.experiments.commands.terminal import print_table
from schedlab.sim.errors import SpecError
from schedlab.sim.files import check_writable

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def claims(
    spec_files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="Experiments with a claim; all shipped if none."),
    ] = None,
    page: Annotated[
        Literal["policies", "fleets", "claims"],
        typer.Option(
            help="Systems, or fleets, against their papers, or what posts say of serving."
        ),
    ] = "policies",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Folder for the page, .md and .json."
        ),
    ] = None,
    jobs: AllCores = None,
    keep: Keep = None,
    quiet: Quiet = False,
) -> None:
    """Hold what is claimed against simulations: a verdict for each figure."""
    from schedlab.experiments.claims import page as claims_page
    from schedlab.experiments.claims import report as claims_report
    from schedlab.experiments.claims.claims import examine, load_claims, shipped

    if output is not None:
        check_writable(output / f"{page}.md")
    if page == "claims":
        if spec_files:
            raise SpecError("--page claims runs the shipped experiments; leave out the files")
        with opened_runs(keep, local_workers(jobs, []), quiet) as runs:
            quoted, findings = claims_page.run_page(runs)
        if not quiet:
            header: tuple[str, ...] = ("", "claim as quoted", "verdict")
            print_table("claims", header, claims_page.claim_rows(quoted, findings))
        written = claims_page.write(quoted, findings, output) if output is not None else []
    else:
        loaded = load_claims(spec_files or shipped(page))
        workers = local_workers(jobs, [spec for _, spec in loaded])
        with opened_runs(keep, workers, quiet) as runs:
            findings = [examine(path, spec, runs) for path, spec in loaded]
        if not quiet:
            header = ("system", "figure", "paper", "accepted", "measured [95 %]", "verdict")
            print_table("claims", header, claims_report.row_texts(findings))
        written = claims_report.write(findings, output, page) if output is not None else []
    for file in written:
        typer.echo(file)
