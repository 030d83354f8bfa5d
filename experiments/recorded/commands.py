"""The command that replays a recorded run of a real engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.reporting.terminal import print_table, steps_bar


def validate(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The experiment.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. engine.async_scheduling=true"),
    ] = None,
    fitted_on: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER.yaml", help="Fit host-side terms on another recorded run first."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Replay a recorded run of a real engine: each latency measured, predicted, error."""
    import json

    from experiments.recorded.validate import validate as run_validation
    from experiments.spec.loading import load_spec

    sys.path += [str(Path.cwd()), str(spec_file.absolute().parent)]
    spec = load_spec(spec_file, overrides or [])
    if fitted_on is None:
        found = run_validation(spec)
    else:
        from experiments.recorded.host_terms import validate_elsewhere

        with steps_bar(quiet) as progress:
            terms, found = validate_elsewhere(spec, load_spec(fitted_on), progress)
        typer.echo(f"fitted on {fitted_on}: {terms}", err=as_json)
    if as_json:
        typer.echo(json.dumps(found.to_data(), indent=1))
        return
    print_table(f"{spec.name} (ms)", ("metric", "measured", "predicted", "error"), found.rows())
    for line in found.lines():
        typer.echo(line)
