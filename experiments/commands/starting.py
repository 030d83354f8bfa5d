"""The commands to start from: init, examples, schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.experiments.commands import completion
from schedlab.experiments.commands.terminal import print_table
from schedlab.sim.text import json_text

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if need be.")] = Path("."),
) -> None:
    """Write an experiment and a policy to start from."""
    from schedlab.experiments.specification.starter import write_starter

    for path in write_starter(folder):
        typer.echo(path)
    there = "" if folder == Path(".") else f"cd {folder} && "
    typer.echo(f"next: {there}schedlab run spec.yaml")
    typer.echo(
        "then: schedlab run spec.yaml policy=longest_first:LongestPromptFirst -o longest-first"
    )


@app.command()
def examples(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Print this one, to change it.", autocompletion=completion.shipped
        ),
    ] = None,
) -> None:
    """List the experiments that come with schedlab (run NAME), or print one."""
    from schedlab.experiments.specification.shipped import (
        experiment_file,
        shipped_experiments,
        title,
    )

    if name is not None:
        path = experiment_file(name)
        typer.echo(f"# A copy of {path}; files it names are relative to that folder.")
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    print_table(
        "experiments (schedlab run NAME)",
        ("name", "what it asks"),
        [(name, title(path)) for name, path in shipped_experiments().items()],
    )


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table of all keys instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of experiment files, for editors."""
    from schedlab.experiments.specification.schema import json_schema, key_table

    typer.echo(key_table() if markdown else json_text(json_schema(), indent=2), nl=not markdown)
