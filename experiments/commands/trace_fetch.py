"""The command `trace fetch`: bring a published trace onto this machine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from schedlab.experiments.commands.terminal import Draw, bar, print_table
from schedlab.sim.errors import TraceError


def fetch_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="See --list.")] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List what can be fetched, and where it is kept.")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="A mirror of the one file; the checksum stays the same.")
    ] = None,
) -> None:
    """Download published traces, checked and kept: workload.trace: NAME."""
    from schedlab.traces.fetch import fetch
    from schedlab.traces.published import published

    if list_all:
        _print_list()
        return
    if not names:
        raise TraceError("name what to fetch; schedlab trace fetch --list shows what there is")
    if url is not None and len(names) > 1:
        raise TraceError("--url is the place of one file: name one trace")
    for trace in [published(name) for name in names]:
        with bar(quiet=False) as draw:
            path, how = fetch(trace, url, partial(_draw, draw, trace.name))
        typer.echo(f"{trace.name}: {how}: {path}")
        typer.echo(f"  licence {trace.licence}; cite {trace.cite}")


def _draw(draw: Draw | None, name: str, size: int, total: int) -> None:
    if draw is not None:
        draw(f"{name}: {size / 1e6:.1f} of {total / 1e6:.1f} MB", size / total)


def _print_list() -> None:
    from schedlab.traces.published import PUBLISHED, cache_folder

    print_table(
        "traces (schedlab trace fetch NAME)",
        ("trace", "MB", "here", "licence", "what it is"),
        [
            (one.name, f"{one.size_bytes / 1e6:.1f}", "yes" if one.path.is_file() else "-",
             one.licence, one.summary)
            for one in PUBLISHED.values()
        ],
    )  # fmt: skip
    typer.echo(f"kept in {cache_folder() / 'traces'} (SCHEDLAB_CACHE names another folder)")
