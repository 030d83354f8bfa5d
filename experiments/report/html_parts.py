"""Just enough HTML: escaped text, elements, tables, and figures inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from schedlab.experiments.figures.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LARGEST_SVG = 700_000

STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5a6672; --line: #d9dfe5; --blue: #0072B2; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 84rem; color: var(--ink);
  background: #fff; font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 2.6rem 0 .6rem; padding-bottom: .2rem; border-bottom: 2px solid var(--line);
  font-size: 1.2rem; }
p, li { max-width: 60rem; }
.lead { margin: .2rem 0 1.2rem; color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
nav a { color: var(--blue); }
.box { margin: 1rem 0; padding: .7rem 1rem; border-left: 5px solid var(--blue);
  background: #eef5fa; }
.box.warning { border-color: #D55E00; background: #fdf2ea; }
.box ul { margin: .3rem 0; padding-left: 1.2rem; }
.scroll { margin: .8rem 0; overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { vertical-align: bottom; }
thead th { border-bottom: 2px solid var(--ink); line-height: 1.25; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
tbody tr { background: #fff; }
tbody tr:nth-child(even) { background: #f7f9fb; }
td:first-child, th:first-child { position: sticky; left: 0; background: inherit; }
figure { margin: 1.4rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { max-width: 60rem; margin-bottom: .5rem; color: var(--soft); }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--blue); }
pre { overflow-x: auto; padding: .8rem 1rem; background: #f4f6f8; font-size: .82rem; }
code { overflow-wrap: anywhere; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
@media print { nav { display: none; } body { max-width: none; } figure { break-inside: avoid; } }
"""


def element(tag: str, *inside: str, **attributes: str) -> str:
    """Return an element around HTML that is already there.

    Parameters
    ----------
    tag : str
        Its name.
    *inside : str
        HTML; text must have gone through `text`.
    **attributes : str
        Values are escaped; `class_` is written as class.

    Examples
    --------
    >>> element("p", text("a < b"), class_="lead")
    '<p class="lead">a &lt; b</p>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(inside)}</{tag}>"


def text(value: object) -> str:
    """Return anything as escaped text."""
    return escape(str(value))


def bullets(lines: Iterable[str]) -> str:
    """Return plain lines as a list."""
    return element("ul", *(element("li", text(line)) for line in lines))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1) -> str:
    """Return a table of plain cells that scrolls sideways when it is wide.

    Parameters
    ----------
    header : sequence of str
        Empty for a table without one.
    rows : iterable of sequence of str
        Cells.
    num_text : int
        So many columns at the left are text, the others numbers.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return element(
            "tr",
            *(
                element(tag, text(cell), class_="text" if i < num_text else "number")
                for i, cell in enumerate(cells)
            ),
        )

    head = element("thead", line(header, "th")) if header else ""
    body = element("tbody", *(line(cells, "td") for cells in rows))
    return element("div", element("table", head, body), class_="scroll")


def definitions(pairs: Iterable[tuple[str, object]]) -> str:
    """Return names and values as a table of two columns."""
    return table((), ((name, str(value)) for name, value in pairs), num_text=2)


def folded(title: str, *inside: str) -> str:
    """Return something that is shown when its title is clicked."""
    return element("details", element("summary", text(title)), *inside)


def picture(figure: Figure, alt: str, caption: str) -> str:
    """Return a figure with its image inside the page.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to show; as SVG with text as shapes, so that it looks the same without our font, or
        as PNG if that would be large.
    alt, caption : str
        What it shows, in words.
    """
    data, kind = _rendered(figure, "svg"), "svg+xml"
    if len(data) > _LARGEST_SVG:
        data, kind = _rendered(figure, "png"), "png"
    width = round(float(figure.get_size_inches()[0]) * 96)
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    image = f'<img alt="{escape(alt)}" width="{width}" src="{source}">'
    return element("figure", element("figcaption", text(caption)), image)


def page(title: str, *body: str) -> str:
    """Return a whole page that needs nothing from elsewhere."""
    head = element(
        "head",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # An empty icon keeps browsers from asking a server for one.
        '<link rel="icon" href="data:,">',
        element("title", text(title)),
        element("style", STYLE),
    )
    return "<!DOCTYPE html>\n" + element("html", head, element("body", *body), lang="en") + "\n"


def _rendered(figure: Figure, format: str) -> bytes:
    import matplotlib as mpl

    metadata: dict[str, Any] = {"Date": None} if format == "svg" else {"Software": None}
    file = io.BytesIO()
    with house_style(), mpl.rc_context({"svg.fonttype": "path"}):
        figure.savefig(file, format=format, metadata=metadata)
    return file.getvalue()
