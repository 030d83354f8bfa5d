"""How far simulated runs are from measured ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedlab.experiments.figures.style import GREY, house_style, looks, new_figure
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "p99_tpot_ms", "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms", "kv_utilization",
)  # fmt: skip
"""The metrics drawn."""

_WITHIN = "#E6EEF4"
_WIDEST = 60.0


def measured_against_simulated(comparison: Mapping[str, Any], title: str) -> Figure:
    """Draw the error of the simulation for each metric, policy and load.

    Parameters
    ----------
    comparison : mapping
        What `schedlab measure` writes into comparison.json.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        A panel a load. A marker is simulated / measured - 1; the thin line is what repeating the
        measurement changes; the ground is shaded within the bars (throughput, latency). Hollow
        markers are outside both the bar and that spread. Errors beyond 60 % are drawn at the
        edge and written out.
    """
    points = comparison["points"]
    loads = list(dict.fromkeys(point["load"] for point in points))
    policies = list(dict.fromkeys(point["policy"] for point in points))
    with house_style():
        figure = new_figure(3.4 + 3.1 * len(loads), 1.5 + 0.36 * len(SHOWN))
        panels = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
        for axes, load in zip(panels, loads, strict=True):
            _draw_bars(axes, comparison["bars"])
            for i, (policy, look) in enumerate(zip(policies, looks(), strict=False)):
                shift = 0.6 * ((i + 0.5) / len(policies) - 0.5)
                rows = [
                    row for point in points if (point["load"], point["policy"]) == (load, policy)
                    for row in point["metrics"]
                ]  # fmt: skip
                _draw_errors(axes, rows, shift, look.color, look.marker, policy)
            axes.set_xlabel("simulated / measured - 1 (%)")
            axes.set_title(load.replace("_", " ").replace("=", " "))
        panels[0].set_yticks(range(len(SHOWN)), [metric_named(metric).label for metric in SHOWN])
        panels[0].set_ylim(len(SHOWN) - 0.5, -0.5)
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.supxlabel(
            "shaded: within the bar; line: spread of repeated measurements; hollow: outside both",
            fontsize=8, color=GREY,
        )  # fmt: skip
    return figure


def _draw_bars(axes: Axes, bars: Mapping[str, float]) -> None:
    for i, metric in enumerate(SHOWN):
        bar = 100 * bars["throughput" if metric.endswith("throughput") else "latency"]
        axes.barh(i, 2 * bar, left=-bar, height=1.0, color=_WITHIN, zorder=0)
    axes.axvline(0, color=GREY, linewidth=0.8)


def _draw_errors(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    shift: float,
    color: str,
    marker: str,
    label: str,
) -> None:
    for row in rows:
        if row["metric"] not in SHOWN or row["error"] is None:
            continue
        y = SHOWN.index(row["metric"]) + shift
        error = 100 * row["error"]
        at = math.copysign(min(abs(error), _WIDEST), error)
        spread = 100 * (row["spread"] or 0.0)
        axes.plot([-spread, spread], [y, y], color=color, linewidth=0.9, zorder=1)
        axes.plot(
            at, y, marker, color=color, markersize=4.5, zorder=2,
            markerfacecolor=color if row["within_bar_or_spread"] else "white",
        )  # fmt: skip
        if at != error:
            axes.annotate(
                f"{error:+.0f} %", (at, y), xytext=(-6 * (1 if at > 0 else -1), 0),
                textcoords="offset points", fontsize=7, color=color, va="center",
                ha="right" if at > 0 else "left",
            )  # fmt: skip
    axes.plot([], [], marker, color=color, label=label)
