"""The look of all figures: colours, markers, fonts, axes, and how they are written."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.sim.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Look(NamedTuple):
    """How one curve is told from the others: by colour, and in grey by marker and line."""

    color: str
    marker: str
    line: str


# Okabe and Ito (2008), in an order whose neighbours differ in lightness too; black is for text.
LOOKS = (
    Look("#0072B2", "o", "-"),
    Look("#D55E00", "s", "--"),
    Look("#009E73", "^", "-."),
    Look("#CC79A7", "D", ":"),
    Look("#E69F00", "v", "-"),
    Look("#56B4E9", "P", "--"),
    Look("#8C6D00", "X", "-."),
    Look("#444444", "h", ":"),
)
GREY = "#666666"
"""Of notes."""

PALE = "#D9D9D9"
"""Of what lies in the background."""

_STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "svg.hashsalt": "schedlab",
    "svg.fonttype": "none",
}


def legend_width(labels: Iterable[str], panel: float) -> float:
    """Return the width in inches of a figure with these labels beside a panel of some width."""
    return panel + 0.3 + 0.075 * max((len(label) for label in labels), default=0)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, free of pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def house_style() -> Iterator[None]:
    """Draw or write figures in the house style inside the block."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def looks() -> Iterator[Look]:
    """Yield looks for ever, 64 distinct ones: after eight colours, with other markers."""
    n = len(LOOKS)
    for i in itertools.count():
        turn = i // n
        yield Look(LOOKS[i % n].color, LOOKS[(i + turn) % n].marker, LOOKS[(i + turn) % n].line)


def spread(
    levels: Sequence[float], gap: float, low: float = 0.0, high: float = 0.94
) -> list[float]:
    """Move levels apart to at least `gap`, keeping their order and staying in [low, high]."""
    order = sorted(range(len(levels)), key=lambda i: levels[i])
    gap = min(gap, (high - low) / max(1, len(levels) - 1))
    placed = [0.0] * len(levels)
    below = low - gap
    for i in order:
        placed[i] = below = max(levels[i], below + gap)
    above = high + gap
    for i in reversed(order):
        placed[i] = above = min(placed[i], above - gap)
    return placed


def plain_numbers(axes: Axes, axis: str) -> None:
    """Write 0.1, 1, 10 on a logarithmic axis instead of powers, and enough of them to read it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    along = axes.yaxis if axis == "y" else axes.xaxis
    low, high = axes.get_ylim() if axis == "y" else axes.get_xlim()
    span = high / low
    subs = (1.0, 2.0, 5.0) if span < 100 else (1.0, 3.0) if span < 1e4 else (1.0,)
    along.set_major_locator(LogLocator(subs=subs, numticks=20))
    along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    along.set_minor_formatter(NullFormatter())


def show_in_notebooks() -> None:
    """Let Jupyter show a figure that ends a cell, though none is pyplot's; elsewhere do nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    from matplotlib.figure import Figure

    def png(figure: Figure) -> bytes:
        file = io.BytesIO()
        with house_style():
            figure.savefig(file, format="png", dpi=100)
        return file.getvalue()

    shell.display_formatter.formatters["image/png"].for_type(Figure, png)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG, each whole or not at all.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    path : Path
        Name of the files without a suffix.

    Returns
    -------
    list of Path
        What was written; the same figure gives the same bytes.
    """
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        target = path.with_name(path.name + suffix)
        with house_style(), replacing(target) as temporary:
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)
        written.append(target)
    return written
