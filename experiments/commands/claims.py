"""The command that holds claims against simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from schedlab.experiments.commands.experiment import Quiet, find_own_modules
from schedlab.experiments.commands.terminal import print_table, steps_bar
from schedlab.sim.errors import SpecError


def claims(
    spec_files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Experiments with a claim; all shipped if none."),
    ] = None,
    page: Annotated[
        Literal["policies", "claims"],
        typer.Option(help="Systems against their papers, or what posts say of serving."),
    ] = "policies",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the page, .md and .json.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Hold what is claimed against simulations: a verdict for each figure."""
    from schedlab.experiments.claims import page as claims_page
    from schedlab.experiments.claims import report as claims_report
    from schedlab.experiments.claims.claims import examine, load_claims

    if page == "claims":
        if spec_files:
            raise SpecError("--page claims runs the shipped experiments; leave out the files")
        with steps_bar(quiet) as progress:
            quoted, findings = claims_page.run_page(progress)
        if not quiet:
            header: tuple[str, ...] = ("", "claim as quoted", "verdict")
            print_table("claims", header, claims_page.claim_rows(quoted, findings))
        written = claims_page.write(quoted, findings, output) if output is not None else []
    else:
        find_own_modules(*(path.absolute().parent for path in spec_files or []))
        findings = []
        for path, spec in load_claims(spec_files):
            with steps_bar(quiet) as progress:
                findings.append(examine(path, spec, progress))
        if not quiet:
            header = ("system", "figure", "paper", "accepted", "measured [95 %]", "verdict")
            print_table("claims", header, claims_report.row_texts(findings))
        written = claims_report.write(findings, output) if output is not None else []
    for file in written:
        typer.echo(file)
