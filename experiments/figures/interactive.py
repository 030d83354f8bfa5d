"""Figures as Plotly shows them: the same panels, curves and bars, to hover over and to zoom."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schedlab.experiments.figures.style import is_notebook, picture, show_in_notebooks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.collections import Collection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

Data = dict[str, Any]
Floats = npt.NDArray[np.float64]

_SYMBOLS = {
    "o": "circle", ".": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down",
    ">": "triangle-right", "<": "triangle-left", "D": "diamond", "P": "cross", "X": "x",
    "h": "hexagon", "*": "star", "x": "x-thin-open", "|": "line-ns-open",
}  # fmt: skip
_DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
_SHAPES = {"steps-post": "hv", "steps-pre": "vh", "steps-mid": "hvh"}
_MOST_POINTS = 5_000
_MOST_TICKS_SPAN = 1e4
_ROOM_FOR_A_TITLE = 0.025


def shown(figure: Figure, still: bool = False) -> Any:  # noqa: ANN401 - of matplotlib or Plotly
    """Return an `interactive` figure in a notebook with Plotly, unless it is to be `still`.

    Anywhere else it is the figure itself.
    """
    if is_notebook() and not still and find_spec("plotly") is not None:
        return interactive(figure)
    show_in_notebooks()
    return figure


def interactive(figure: Figure) -> Any:  # noqa: ANN401 - plotly.graph_objects.Figure
    """Return a figure of this package as a Plotly figure; see `traces_and_layout`.

    A notebook keeps a picture beside it, for where no script runs: exports and GitHub's pages.
    """
    from plotly.graph_objects import Figure as PlotlyFigure

    class WithPicture(PlotlyFigure):  # type: ignore[misc, unused-ignore]
        def _ipython_display_(self) -> None:
            from IPython.display import display

            bundle = self._repr_mimebundle_() or {}
            both = {**bundle, "image/png": b64encode(picture(figure)).decode()}
            display(both, raw=True)  # type: ignore[no-untyped-call, unused-ignore]

    return WithPicture(traces_and_layout(figure))


def traces_and_layout(figure: Figure) -> Data:
    """Return a figure of this package as Plotly describes figures.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Lines, bars, areas, images and texts of it are taken over. The label of a line is its name
        in the legend; behind an underscore, what is said where the pointer is over it.

    Returns
    -------
    dict
        ``data`` and ``layout``: as high as the figure, as wide as there is room.
    """
    figure.draw_without_rendering()  # limits, ticks and places are known only now
    scales = {image.colorbar.ax for axes in figure.axes for image in axes.images if image.colorbar}
    panels = [axes for axes in figure.axes if axes not in scales]
    traces: list[Data] = []
    layout: Data = {
        "template": "plotly_white",
        "height": round(100 * float(figure.get_size_inches()[1])) + 60,
        "margin": {"t": 60, "r": 20, "b": 90, "l": 80},
        "barmode": "overlay",
        "hovermode": "closest",
        "title": {"text": _html(figure.get_suptitle()), "font": {"size": 15}},
        "annotations": _notes(figure),
        "shapes": [],
    }
    for number, (axes, place) in enumerate(zip(panels, _places(panels), strict=True), 1):
        i = "" if number == 1 else str(number)
        on = {"xaxis": f"x{i}", "yaxis": f"y{i}"}
        bars, shapes = _rectangles(axes)
        found = [*_images(axes), *_areas(axes), *bars, *_lines(axes)]
        traces += [{**trace, **on} for trace in found]
        layout[f"xaxis{i}"] = {**_axis(axes.xaxis), "domain": place[0], "anchor": on["yaxis"]}
        layout[f"yaxis{i}"] = {**_axis(axes.yaxis), "domain": place[1], "anchor": on["xaxis"]}
        if number > 1 and axes.get_shared_x_axes().joined(axes, panels[0]):
            layout[f"xaxis{i}"]["matches"] = "x"
        names = {trace.get("name") for trace in found}
        layout["annotations"] += _texts(axes, i, names)
        layout["shapes"] += [{**shape, "xref": on["xaxis"], "yref": on["yaxis"]}
                             for shape in shapes]  # fmt: skip
    _once_in_the_legend(traces)
    return {"data": traces, "layout": layout}


def _places(panels: Sequence[Axes]) -> Iterator[tuple[list[float], list[float]]]:
    """Yield where each panel is, in shares of what all of them take."""
    boxes = np.array([axes.get_position().extents for axes in panels])
    low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    for box in np.clip((boxes - np.tile(low, 2)) / np.tile(high - low, 2), 0.0, 1.0):
        left = float(box[0]) + (_ROOM_FOR_A_TITLE if box[0] > 0 else 0.0)
        yield [left, float(box[2])], [float(box[1]), float(box[3])]


def _notes(figure: Figure) -> list[Data]:
    """Return what stands under the figure."""
    told = [legend.get_title().get_text() for legend in figure.legends]
    text = next((one for one in [figure.get_supxlabel(), *told] if one), "")
    if not text:
        return []
    return [
        {
            "text": _html(text), "xref": "paper", "yref": "paper", "x": 0, "y": 0, "yshift": -50,
            "xanchor": "left", "yanchor": "top", "align": "left", "showarrow": False,
            "font": {"size": 11, "color": "#666666"},
        }
    ]  # fmt: skip


def _axis(axis: Axis) -> Data:
    """Return scale, range, ticks and title of an axis."""
    from matplotlib.ticker import FixedLocator

    low, high = (float(end) for end in axis.get_view_interval())
    if axis.get_inverted():
        low, high = max(low, high), min(low, high)
    lines = axis.get_gridlines()
    found: Data = {
        "title": {"text": _html(axis.get_label().get_text())},
        "range": [low, high],
        "showticklabels": axis.get_tick_params().get("labelbottom", True),
        "showgrid": bool(lines) and bool(lines[0].get_visible()),
        "zeroline": False,
        "showline": True,
        "linecolor": "#444444",
    }
    if isinstance(axis.get_major_locator(), FixedLocator):
        found["tickvals"] = [float(at) for at in axis.get_majorticklocs()]
        found["ticktext"] = [_html(label.get_text()) for label in axis.get_majorticklabels()]
    elif axis.get_scale() == "log":
        span = max(low, high) / min(low, high)
        found |= {"dtick": "D2" if span < _MOST_TICKS_SPAN else 1, "tickformat": "~g"}
    if axis.get_scale() == "log":
        found |= {"type": "log", "range": [math.log10(low), math.log10(high)]}
    return found


def _lines(axes: Axes) -> Iterator[Data]:
    """Yield the lines of a panel; one without a name belongs to that of its colour."""
    first: dict[str, str] = {}
    for line in axes.lines:
        if _name(line):
            first.setdefault(_color(line.get_color()), _name(line))
    latest: dict[str, str] = {}
    for line in axes.lines:
        color = _color(line.get_color())
        if _name(line):
            latest[color] = _name(line)
        yield _line(axes, line, latest.get(color, first.get(color, "")))


def _line(axes: Axes, line: Line2D, group: str) -> Data:
    points = _in_data(axes, line, line.get_xydata())
    if len(points) > _MOST_POINTS:
        points = points[np.linspace(0, len(points) - 1, _MOST_POINTS).astype(np.int64)]
    marker, style = str(line.get_marker()), str(line.get_linestyle())
    color, inside = _color(line.get_color()), _color(line.get_markerfacecolor())
    is_drawn = style in _DASHES
    modes = ["lines"] * is_drawn + ["markers"] * (marker in _SYMBOLS)
    told = _hidden(line) or group
    found: Data = {
        "type": "scatter",
        # A name without points keeps its place in the legend.
        "x": _values(points[:, 0]) or [None],
        "y": _values(points[:, 1]) or [None],
        "mode": "+".join(modes) or "none",
        "name": _html(_name(line) or group),
        "legendgroup": _html(group),
        "showlegend": bool(_name(line)),
        "opacity": 1.0 if line.get_alpha() is None else float(line.get_alpha() or 0.0),
        "hovertemplate": f"{_html(told)}<br>x %{{x:.4g}}<br>y %{{y:.4g}}<extra></extra>",
        "line": {
            "color": color,
            "width": float(line.get_linewidth()),
            "dash": _DASHES.get(style, "solid"),
            "shape": _SHAPES.get(str(line.get_drawstyle()), "linear"),
        },
        "marker": {
            "symbol": _SYMBOLS.get(marker, "circle"),
            "size": float(line.get_markersize()) * (0.7 if marker == "." else 1.4),
            "color": color if marker in "x|" else inside,
            "line": {"color": color, "width": 1.2},
        },
    }
    if not told:
        found["hoverinfo"] = "skip"
        del found["hovertemplate"]
    return found


def _rectangles(axes: Axes) -> tuple[list[Data], list[Data]]:
    """Return bars, a trace for neighbours of one look; and grounds that span the panel."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    legend = axes.get_legend()
    named = {}
    for handle, text in zip(legend.legend_handles if legend else (), legend.get_texts() if legend
                            else (), strict=True):  # fmt: skip
        if hasattr(handle, "get_hatch"):
            named[_look(handle)] = text.get_text()
    bars, shapes = [], []
    rectangles = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    solid = [patch for patch in rectangles if to_rgba(patch.get_facecolor())[3] > 0]
    inside = [patch for patch in solid if _is_in_data(axes, patch)]
    for patch in solid:
        if patch not in inside:
            (x0, y0), (x1, y1) = _corners(axes, patch)
            shapes.append(
                {
                    "type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "layer": "below",
                    "fillcolor": _color(patch.get_facecolor()), "line": {"width": 0},
                }
            )  # fmt: skip
    ordered = sorted(enumerate(inside), key=lambda one: (_look(one[1]), one[0]))
    for look, patches in groupby(ordered, key=lambda one: _look(one[1])):
        some = [patch for _, patch in patches]
        boxes = np.array([patch.get_bbox().extents for patch in some])
        name = _html(named.get(look, ""))
        bars.append(
            {
                "type": "bar", "orientation": "h", "name": name, "legendgroup": name,
                "showlegend": bool(name),
                "base": _values(boxes[:, 0]),
                "x": _values(boxes[:, 2] - boxes[:, 0]),
                "y": _values((boxes[:, 1] + boxes[:, 3]) / 2),
                "width": _values(np.abs(boxes[:, 3] - boxes[:, 1])),
                "customdata": boxes[:, 2].tolist(),
                "hovertemplate": f"{name}<br>%{{base:.4g}} to %{{customdata:.4g}}<extra></extra>",
                "marker": {
                    "color": look[0],
                    "line": {"width": 0},
                    "pattern": {"shape": "/" if look[1] else "", "fgcolor": look[2]},
                },
            }
        )  # fmt: skip
    return bars, shapes


def _look(patch: Any) -> tuple[str, str, str]:  # noqa: ANN401 - a patch, or its likeness in a legend
    return _color(patch.get_facecolor()), patch.get_hatch() or "", _color(patch.get_edgecolor())


def _areas(axes: Axes) -> Iterator[Data]:
    """Yield what is filled between two curves."""
    for area in axes.collections:
        for path in area.get_paths():
            corners = np.asarray(path.vertices, dtype=np.float64)
            name = _html(_name(area))
            yield {
                "type": "scatter", "mode": "none", "fill": "toself", "hoverinfo": "skip",
                "x": _values(corners[:, 0]), "y": _values(corners[:, 1]),
                "fillcolor": _color(np.asarray(area.get_facecolor())[0]),
                "name": name, "legendgroup": name, "showlegend": bool(name),
            }  # fmt: skip


_MOST_APART = 40


def _images(axes: Axes) -> Iterator[Data]:
    """Yield a picture of numbers, with the scale of its colours."""
    for image in axes.images:
        shades = np.ma.filled(np.ma.asarray(image.get_array(), dtype=np.float64), math.nan)
        low, high = image.get_clim()
        left, right, bottom, top = image.get_extent()
        dx, dy = (right - left) / shades.shape[1], (bottom - top) / shades.shape[0]
        gap = 1.5 if shades.shape[1] <= _MOST_APART else 0  # else there is more gap than picture
        colors = [_color(image.cmap(share)) for share in np.linspace(0, 1, 17)]
        scale: Data = {}
        if image.colorbar:
            along = image.colorbar.ax.yaxis
            scale = {
                "tickvals": [float(at) for at in image.colorbar.get_ticks()],
                "ticktext": [_html(one.get_text()) for one in along.get_majorticklabels()],
                "title": {"text": _html(along.get_label().get_text()), "side": "right"},
            }
        yield {
            "type": "heatmap", "z": [_values(row) for row in shades], "zmin": low, "zmax": high,
            "x0": left + dx / 2, "dx": dx, "y0": top + dy / 2, "dy": dy,
            "colorscale": [[k / 16, color] for k, color in enumerate(colors)],
            "xgap": gap, "ygap": 1.5, "colorbar": scale, "hoverinfo": "skip",
        }  # fmt: skip


def _texts(axes: Axes, i: str, names: set[str | None]) -> list[Data]:
    """Return the title of a panel, and what is written in it; not the names in the legend."""
    found = []
    for where, text in (("left", axes.get_title(loc="left")), ("center", axes.get_title())):
        if text:
            found.append(
                {
                    "text": f"<b>{_html(text)}</b>", "showarrow": False, "xref": f"x{i} domain",
                    "yref": f"y{i} domain", "x": 0 if where == "left" else 0.5, "y": 1,
                    "yshift": 4, "xanchor": where, "yanchor": "bottom",
                }
            )  # fmt: skip
    written = (text for text in axes.texts if _html(text.get_text()) not in names)
    return [*found, *(_text(axes, text, i) for text in written)]


def _text(axes: Axes, text: Text, i: str) -> Data:
    xy = getattr(text, "xy", text.get_position())  # of an annotation, what it points at
    is_in_data = hasattr(text, "xy") or _is_in_data(axes, text)
    if is_in_data:
        scales = (axes.get_xscale(), axes.get_yscale())
        x, y = (math.log10(at) if scale == "log" else float(at)
                for at, scale in zip(xy, scales, strict=True))  # fmt: skip
        refs = (f"x{i}", f"y{i}")
    else:
        seen = text.get_transform().transform(xy)
        x, y = (float(at) for at in axes.transAxes.inverted().transform(seen))
        refs = (f"x{i} domain", f"y{i} domain")
    vertical = {"center": "middle", "top": "top"}.get(text.get_verticalalignment(), "bottom")
    weight = text.get_fontweight()
    shown_text = _html(text.get_text())
    return {
        "text": f"<b>{shown_text}</b>" if weight == "bold" else shown_text,
        "x": x, "y": y, "xref": refs[0], "yref": refs[1], "showarrow": False,
        "xanchor": text.get_horizontalalignment(), "yanchor": vertical,
        "font": {"size": float(text.get_fontsize()) * 1.35, "color": _color(text.get_color())},
    }  # fmt: skip


def _once_in_the_legend(traces: Sequence[Data]) -> None:
    """Let a name of several panels stand in the legend once."""
    seen = set()
    for trace in traces:
        if trace.get("showlegend") and trace["name"] in seen:
            trace["showlegend"] = False
        if trace.get("showlegend"):
            seen.add(trace["name"])


def _is_in_data(axes: Axes, artist: Artist) -> bool:
    """Say whether both coordinates of an artist are those of the axes."""
    return all(artist.get_transform().contains_branch_seperately(axes.transData))


def _in_data(axes: Axes, artist: Artist, points: object) -> Floats:
    """Return points in coordinates of the axes; of what spans a panel its ends."""
    found = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    if _is_in_data(axes, artist) or not len(found):
        return found
    seen = artist.get_transform().transform(found)
    return np.asarray(axes.transData.inverted().transform(seen), dtype=np.float64)


def _corners(axes: Axes, patch: Rectangle) -> list[list[float]]:
    """Return two corners of a rectangle in coordinates of the axes."""
    seen = patch.get_transform().transform([(0.0, 0.0), (1.0, 1.0)])
    found: list[list[float]] = axes.transData.inverted().transform(seen).tolist()
    return found


def _name(artist: Line2D | Collection) -> str:
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def _hidden(line: Line2D) -> str:
    """Return what a label says behind an underscore; matplotlib's own begin with _child."""
    label = str(line.get_label())
    return label[1:] if label.startswith("_") and not label.startswith("_child") else ""


def _values(column: object) -> list[float | None]:
    """Return numbers as JSON holds them: what is missing is null."""
    numbers = np.ma.filled(np.ma.asarray(column, dtype=np.float64), math.nan).tolist()
    return [value if math.isfinite(value) else None for value in numbers]


def _color(color: Any) -> str:  # noqa: ANN401 - whatever matplotlib takes for one
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(color)
    return f"rgba({round(255 * red)},{round(255 * green)},{round(255 * blue)},{alpha:.3g})"


def _html(text: str) -> str:
    """Return a text that Plotly shows as it is: it reads its texts as HTML."""
    return escape(text, quote=False).replace("\n", "<br>")
