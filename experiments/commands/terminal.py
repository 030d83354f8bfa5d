"""What the commands show on a terminal: tables and bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Draw = Callable[[str, float], None]
"""Draws a bar again: what goes on in words, the share that is done."""


def console() -> Console:
    """Return where tables go; rich is loaded only now."""
    from rich.console import Console

    # Files and pipes have no width of their own: wide enough for every column of the tables.
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=180 if wide else None)


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Collection[str] = (),
) -> None:
    """Print a table; its first column and those of numbers are never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, name in enumerate(header):
        number = name in numbers
        table.add_column(name, no_wrap=number or i == 0, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines under a table, as wide as it may be."""
    from rich.text import Text

    screen = console()
    for line in lines:
        screen.print(Text(line))


@contextmanager
def steps_bar(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Give a callback (done, total, what comes next) that draws a bar on stderr, or None."""
    with bar(quiet) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total, what: update(f"[{done}/{total}] {what}", done / total)


@contextmanager
def bar(quiet: bool) -> Iterator[Draw | None]:
    """Give what draws a bar on stderr; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(
            task, description=text.replace("[", "\\["), completed=share
        )
