"""The command `trace fetch`: bring a published trace onto this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from schedlab.sim.errors import TraceError

Update = Callable[[int, int], None]


def fetch_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="See --list.")
    ] = None,
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
        with _bar(trace.name) as update:
            path, how = fetch(trace, url, update)
        typer.echo(f"{trace.name}: {how}: {path}")
        typer.echo(f"  licence {trace.licence}; cite {trace.cite}")


def _print_list() -> None:
    from rich.console import Console
    from rich.table import Table

    from schedlab.traces.published import PUBLISHED, cache_folder

    table = Table("trace", "MB", "here", "licence", "what it is", box=None)
    table.columns[0].no_wrap = True
    table.columns[1].justify = "right"
    for one in PUBLISHED.values():
        here = "yes" if one.path.is_file() else "-"
        table.add_row(one.name, f"{one.size_bytes / 1e6:.1f}", here, one.licence, one.summary)
    wide = None if sys.stdout.isatty() else 140
    Console(width=wide).print(table)
    typer.echo(f"kept in {cache_folder() / 'traces'} (SCHEDLAB_CACHE names another folder)")


@contextmanager
def _bar(name: str) -> Iterator[Update | None]:
    """Give a callback that draws a bar on stderr; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda size, total: bar.update(task, completed=size, total=total)
