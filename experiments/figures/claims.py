"""What papers claim beside what the simulator gave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlab.experiments.figures.style import GREY, LOOKS, house_style, new_figure
from schedlab.sim.text import json_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACCEPTED = "#D6E8D9"
_UNITS = {
    "value": "",
    "ratio": " (times)",
    "increase": " (more by)",
    "reduction": " (less by)",
    "difference": " (difference)",
}
_PARTS = ("increase", "reduction")


_TITLE_CHARS = 76
"""Of a line as wide as the figure."""


def claim(experiment: Mapping[str, Any]) -> Figure:
    """Draw the figures of a claim: measured, accepted, and what its source says.

    Parameters
    ----------
    experiment : mapping
        One of the ``experiments`` in the JSON that `schedlab claims -o` writes.

    Returns
    -------
    matplotlib.figure.Figure
        A strip a figure, each on a scale of its own: a dot with its 95 % confidence interval is
        measured, the band is what counts as reproduced, the diamond (or bar) is the source. A
        hollow dot is outside of the band. The verdict stands at the right.
    """
    stated = experiment["claim"]
    figures = list(zip(stated["figures"], experiment["figures"], strict=True))
    with house_style():
        figure = new_figure(8.6, 1.1 + 0.56 * len(figures))
        strips = figure.subplots(len(figures), 1, squeeze=False)[:, 0]
        for axes, (said, found) in zip(strips, figures, strict=True):
            _draw_strip(axes, said, found)
        title = _shortened(f"{stated['system']}: {stated['source']}", 2 * _TITLE_CHARS)
        figure.suptitle(_wrapped(title, _TITLE_CHARS), x=0.01, ha="left", fontweight="bold")
        figure.supxlabel(
            "dot: measured, with 95 % confidence interval (hollow: outside the band); "
            "band: accepted; diamond: the source",
            fontsize=8, color=GREY,
        )  # fmt: skip
    return figure


def _draw_strip(axes: Axes, said: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    scale = 100.0 if said["compare"] in _PARTS else 1.0
    band = [json_number(end) * scale for end in _pair(said["accept"])]
    paper = [json_number(end) * scale for end in _pair(said["paper"])] if said.get("paper") else []
    estimate = json_number(found["estimate"]) * scale
    interval = [json_number(end) * scale for end in found["interval"] or (math.nan, math.nan)]
    low, high = _limits([*band, *paper, estimate, *interval])
    axes.set_xlim(low, high)
    axes.axvspan(max(band[0], low), min(band[1], high), color=_ACCEPTED, linewidth=0)
    none = {"ratio": 1.0, "value": math.nan}.get(said["compare"], 0.0)
    if low < none < high:
        axes.axvline(none, color=GREY, linewidth=0.8, linestyle=(0, (3, 2)))
    if paper:
        axes.plot(paper, [0.72] * len(paper), "D-", color=LOOKS[1].color, markersize=4.5)
    inside = band[0] <= estimate <= band[1]
    blue = LOOKS[0].color
    axes.plot(interval, [0.32, 0.32], "-", color=blue, linewidth=2)
    axes.plot(estimate, 0.32, "o", color=blue, markerfacecolor=blue if inside else "white")
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.tick_params(labelsize=7.5)
    if said["compare"] in _PARTS:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    name = said["name"] + _UNITS[said["compare"]]
    axes.text(-0.02, 0.5, _wrapped(name), transform=axes.transAxes, ha="right", va="center")
    axes.text(
        1.02, 0.5, found["verdict"], transform=axes.transAxes, ha="left", va="center",
        fontweight="bold" if found["verdict"] == "reproduced" else "normal",
    )  # fmt: skip


def _limits(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    margin = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _pair(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value, value]


def _wrapped(name: str, width: int = 34) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(name, width))


def _shortened(text: str, width: int) -> str:
    import textwrap

    return textwrap.shorten(text, width, placeholder=" ...")
