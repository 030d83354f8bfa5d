"""What the commands show: tables and lines on stdout, how far they are on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer

Draw = Callable[[str, float], None]
"""Tells again how far it is: what goes on in words, the share that is done."""

_FIRST_LINE_S = 10.0
_LINES_GROW = 1.5


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1
) -> None:
    """Print a table as wide as the terminal; see `text_table`."""
    from schedlab.experiments.results.text_table import text_table

    typer.echo(text_table(title, header, rows, _width(), num_keys))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines under a table; on a terminal they are wrapped between words."""
    from schedlab.experiments.results.text_table import wrapped_text

    width = _width()
    for line in lines:
        if width is None:
            typer.echo(line)
            continue
        for part in line.split("\n"):
            indent = "  " if len(part) > width else ""
            typer.echo("\n".join(wrapped_text(part, width, indent)))


def _width() -> int | None:
    """Return characters a line; None for files and pipes, which have no width of their own."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by the caller
    if not is_terminal and "COLUMNS" not in os.environ:
        return None
    return max(shutil.get_terminal_size().columns, 20)


@contextmanager
def steps_bar(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Give a callback (done, total, what comes next) that tells it on stderr, or None."""
    with bar(quiet) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total, what: update(f"[{done}/{total}] {what}", done / total)


@contextmanager
def bar(quiet: bool) -> Iterator[Draw | None]:
    """Give what tells on stderr how far it is: a bar on a terminal, elsewhere a line at times."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _lines_at_times()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(
            task, description=text.replace("[", "\\["), completed=share
        )


def _lines_at_times() -> Draw:
    """Return what writes a line after 10 s and then ever more rarely, for logs."""
    begin = time.monotonic()
    next_s = _FIRST_LINE_S

    def draw(text: str, share: float) -> None:
        nonlocal next_s
        elapsed_s = time.monotonic() - begin
        if elapsed_s >= next_s:
            typer.echo(f"{elapsed_s:.0f} s, {share:.0%}: {text}", err=True)
            next_s = max(next_s * _LINES_GROW, elapsed_s + _FIRST_LINE_S)

    return draw
