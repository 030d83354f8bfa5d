"""The look of all figures: colours, markers, fonts, axes, and how they are written."""

from __future__ import annotations

import io
import itertools
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.sim.errors import SchedlabError
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
    "pdf.fonttype": 42,
}
_ON_PAPER: dict[Any, Any] = {
    "savefig.dpi": 300,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "figure.titlesize": 8.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
}

SIZES = {"column": 3.4, "page": 7.0}
"""Widths in inches of a column and of a page of a paper in two columns."""

FORMATS = ("png", "svg", "pdf")
"""What figures can be written as."""

_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "ModDate": None},
}
"""What makes the same figure the same bytes."""

_paper: ContextVar[str | None] = ContextVar("_paper", default=None)
_LEAST_HEIGHT = 2.3
_CHARACTERS_PER_INCH = 19
_LONGEST_AT_END = 20
_LEFT_OF_TITLES = 0.6  # inches, of the numbers and the name of an axis
_CHARACTER_PER_SIZE = 0.58  # the mean width of a bold one


def legend_width(labels: Iterable[str], panel: float) -> float:
    """Return the width in inches of a figure with these labels beside a panel of some width."""
    return panel + 0.3 + 0.075 * max((len(label) for label in labels), default=0)


@contextmanager
def paper(size: str | None) -> Iterator[None]:
    """Draw figures inside the block for a paper: `size` is of `SIZES`, None as on a screen."""
    token = _paper.set(size)
    try:
        yield
    finally:
        _paper.reset(token)


def new_figure(
    width: float, height: float, least: float = 0.0, lowest: float = _LEAST_HEIGHT
) -> Figure:
    """Return an empty figure, free of pyplot's global state.

    Parameters
    ----------
    width, height : float
        Inches on a screen. On a `paper` it is as wide as that, and lower in proportion.
    least : float
        The width below which nobody can read it.
    lowest : float
        The height that it keeps on a `paper`, where it is not lower on a screen.

    Raises
    ------
    SchedlabError
        If the paper is narrower than that.
    """
    from matplotlib.figure import Figure

    size = _paper.get()
    if size is not None:
        given = SIZES[size]
        if given < least:
            raise SchedlabError(
                f"needs {least:.1f} inches and a {size} has {given:g}: show less of it (--metric, "
                "--filter), or choose another size"
            )
        width, height = given, max(height * given / width, min(height, lowest))
    return Figure(figsize=(width, height), layout="constrained")


def panels(
    width: float, height: float, num: int, *, sharex: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, below each other on a column of a paper."""
    if _paper.get() == "column":
        figure = new_figure(SIZES["column"], 2.1 * num)
        return figure, list(figure.subplots(num, 1, sharex=sharex, squeeze=False)[:, 0])
    figure = new_figure(width, height)
    return figure, list(figure.subplots(1, num, sharex=sharex, squeeze=False)[0])


def note(figure: Figure, text: str) -> None:
    """Write under a figure what its reader has to know, in as many lines as its width asks for."""
    if not text:
        return
    width = round(_CHARACTERS_PER_INCH * float(figure.get_size_inches()[0]))
    text = "\n".join(textwrap.wrap(text, width))
    size = 8 if _paper.get() is None else 6.5
    if figure.legends:  # there is one room below, and a legend has taken it
        legend = figure.legends[0]
        legend.set_title(text)
        legend.get_title().set_fontsize(size)
        legend.get_title().set_color(GREY)
    else:
        figure.supxlabel(text, fontsize=size, color=GREY)


def title_in_lines(axes: Axes, title: str, *, over_legend: bool = False) -> None:
    """Write a title in as many lines as the width asks for, above a legend that stands there."""
    import matplotlib as mpl

    figure = axes.get_figure(root=True)
    assert figure is not None
    size = float(mpl.rcParams["axes.titlesize"])
    room = 72 * (float(figure.get_size_inches()[0]) - _LEFT_OF_TITLES)
    lines = textwrap.wrap(title, round(room / (_CHARACTER_PER_SIZE * size)))
    above = 2.0 * float(mpl.rcParams["font.size"]) if over_legend else 0.0
    axes.set_title("\n".join(lines), pad=float(mpl.rcParams["axes.titlepad"]) + above)


def fit_beside(names: Iterable[str]) -> bool:
    """Say whether names are short enough to stand beside the ends of curves."""
    return _paper.get() != "column" and max(map(len, names), default=0) <= _LONGEST_AT_END


def name_below(figure: Figure, names: Iterable[tuple[str, Look]]) -> None:
    """Name curves in a legend under the figure."""
    from matplotlib.lines import Line2D

    once = dict(names)
    handles = [
        Line2D(
            [], [], color=look.color, marker=look.marker, label=name,
            linestyle=look.line,  # type: ignore[arg-type]
        )
        for name, look in once.items()
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=columns_below(figure, once))


def columns_below(figure: Figure, names: Collection[str]) -> int:
    """Return in how many columns names fit under a figure."""
    longest = max(map(len, names), default=0)
    room = float(figure.get_size_inches()[0]) * 14
    return min(max(1, int(room // (longest + 7))), len(names) or 1)


@contextmanager
def house_style() -> Iterator[None]:
    """Draw or write figures in the house style inside the block."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE if _paper.get() is None else {**_STYLE, **_ON_PAPER}):
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


_NARROW = 4.0
"""The span of a logarithmic axis below which ticks are evenly spaced."""


def plain_numbers(axes: Axes, axis: str) -> None:
    """Write 0.1, 1, 10 on a logarithmic axis instead of powers, and enough of them to read it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    along = axes.yaxis if axis == "y" else axes.xaxis
    low, high = axes.get_ylim() if axis == "y" else axes.get_xlim()
    span = high / low
    subs = (1.0, 2.0, 5.0) if span < 100 else (1.0, 3.0) if span < 1e4 else (1.0,)
    narrow = span < _NARROW  # where 1, 2 and 5 may be one tick, or none
    along.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=subs, numticks=20))
    along.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    along.set_minor_formatter(NullFormatter())


def is_notebook() -> bool:
    """Say whether this is a notebook, or anything else that shows what a browser can show."""
    return getattr(_shell(), "kernel", None) is not None


def _shell() -> Any:  # noqa: ANN401 - IPython's, which need not be installed
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def show_in_notebooks() -> None:
    """Let Jupyter show a figure that ends a cell, though none is pyplot's; elsewhere do nothing."""
    shell = _shell()
    if shell is None:
        return
    from matplotlib.figure import Figure

    shell.display_formatter.formatters["image/png"].for_type(Figure, picture)


def picture(figure: Figure) -> bytes:
    """Return a figure as a PNG, as notebooks keep it."""
    file = io.BytesIO()
    with house_style():
        figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def save(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure, each file whole or not at all.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    path : Path
        Name of the files without a suffix.
    formats : sequence of str
        Of `FORMATS`.

    Returns
    -------
    list of Path
        What was written; the same figure gives the same bytes.
    """
    written = []
    for kind in formats:
        target = path.with_name(f"{path.name}.{kind}")
        with house_style(), replacing(target) as temporary:
            figure.savefig(temporary, format=kind, metadata=_METADATA[kind])
        written.append(target)
    return written
