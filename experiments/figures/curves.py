"""Curves over a swept request rate: one a setting, a point a rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from schedlab.experiments.analysis.rate_curves import (
    curves,
    is_saturated,
    rate,
    rate_bracket,
    rate_key,
    saturated_from,
)
from schedlab.experiments.figures.style import (
    GREY,
    PALE,
    Look,
    fit_beside,
    house_style,
    looks,
    name_below,
    new_figure,
    note,
    panels,
    plain_numbers,
    spread,
)
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_SATURATION_NOTE = (
    "hollow: saturated (requests arrive > 5 % faster than served; "
    "latency there depends on the length of the run)"
)


class _Curve(NamedTuple):
    """One setting, in order of the rate; `look` is None for a grey one in the background."""

    name: str
    rows: list[Row]
    look: Look | None
    slimness: float


def throughput_against_p99(
    results: Sequence[Row],
    title: str,
    metrics: tuple[str, str] = ("ttft", "tpot"),
    highlight: Collection[str] | None = None,
) -> Figure:
    """Draw P99 latencies over achieved throughput, a curve a setting, a point a request rate.

    Parameters
    ----------
    results : sequence of Row
        Settings with a swept `workload.request_rate`, in order of the rate.
    title : str
        Name of the experiment.
    metrics : tuple of str
        Two of ttft, tpot, itl, e2el: one a panel.
    highlight : collection of str, optional
        Names of the curves (`experiments.analysis.rate_curves.curve_name`) to draw in colour; the
        others are grey. All if absent.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels. Hollow points are saturated: requests arrived more than 5 % faster than
        they were served, so latency there grows with the length of the run.

    Notes
    -----
    A point is saturated if ``arrival rate > 1.05 * completed / (duration - service)``, with the
    median time in service ``service = median E2EL - median queue time``: even an idle server
    needs that long after the last arrival, which must not count as saturation in a short run.

    Vertical lines are 95 % confidence intervals over replications. An interval that reaches
    below a tenth of its value is cut there, because a logarithmic axis has no zero.
    """
    return _latency_panels(
        results,
        title,
        metrics,
        highlight,
        lambda row: row.mean("request_throughput"),
        "achieved throughput (requests/s)",
    )


def latency_against_rate(
    results: Sequence[Row],
    title: str,
    metrics: tuple[str, str] = ("ttft", "tpot"),
    highlight: Collection[str] | None = None,
) -> Figure:
    """Draw P99 latencies over the rate at which requests arrive, with saturation marked.

    Parameters
    ----------
    results, title, metrics, highlight
        As for `throughput_against_p99`.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels. Hollow points are saturated; where every curve is, the ground is shaded.
    """
    key = rate_key(results)
    figure = _latency_panels(results, title, metrics, highlight, rate, _RATE_NAMES[key])
    everywhere = saturated_from(curves(results).values())
    if math.isfinite(everywhere):
        with house_style():
            for axes in figure.axes:
                axes.axvspan(everywhere, axes.get_xlim()[1], color="#F2F2F2", zorder=0, linewidth=0)
                axes.text(
                    everywhere, 0.01, " all saturated", color=GREY, fontsize=7.5,
                    transform=axes.get_xaxis_transform(), va="bottom",
                )  # fmt: skip
    return figure


def attainment_against_rate(
    results: Sequence[Row],
    title: str,
    metric: str = "slo_attainment",
    target: float = 0.9,
    highlight: Collection[str] | None = None,
) -> Figure:
    """Draw the share of requests that hold their targets over the request rate.

    Parameters
    ----------
    results, title, highlight
        As for `throughput_against_p99`; the runs must have latency targets.
    metric : str
        slo_attainment (all targets of a request together) or that of one dimension, such as
        ttft_slo_attainment.
    target : float
        Share asked for, in (0, 1).

    Returns
    -------
    matplotlib.figure.Figure
        Names say between which rates that were run a curve falls below the target (see
        `experiments.analysis.rate_curves.rate_bracket`), or that it is above or below all of
        them; `schedlab find` gives the number.

    Raises
    ------
    SchedlabError
        If no run has a target, or no rate is swept.
    """
    key = rate_key(results)
    if all(math.isnan(row.mean(metric)) for row in results):
        raise SchedlabError(
            f"no run has a target for {metric}: set slo.ttft_ms, tpot_ms or e2el_ms"
        )
    with house_style():
        figure = new_figure(6.6, 4.0, lowest=3.1)
        axes = figure.subplots()
        axes.axhline(100 * target, color=GREY, linewidth=0.9, linestyle=(0, (6, 2)), zorder=1)
        axes.set_ylim(0, 102)
        drawn = _arrange(results, highlight)
        ends: Ends = []
        for curve in drawn:
            if curve.look is None:
                _draw_curve(axes, curve, rate, metric, 100.0, within=(0.0, 100.0))
                continue
            held, broken = rate_bracket(curve.rows, metric, target)
            told = curve._replace(name=f"{curve.name}: {_bracket_text(held, broken)}")
            end = _draw_curve(axes, told, rate, metric, 100.0, within=(0.0, 100.0))
            ends.append((told.name, curve.look, *end))
        axes.set_xlim(left=0)
        axes.set_ylabel(metric_named(metric).axis)
        axes.set_xlabel(_RATE_NAMES[key])
        axes.set_title(title)
        _name(figure, [(axes, ends)])
        hollow = "; hollow: saturated" if any(map(is_saturated, results)) else ""
        _explain(
            figure,
            drawn,
            f"dashed: {target:.0%}; names say between which rates it ceases to hold, "
            f"schedlab find where{hollow}",
        )
    return figure


_RATE_NAMES = {
    "workload.request_rate": "request rate (requests/s)",
    "workload.arrivals.rate": "request rate (requests/s)",
    "workload.rate_scale": "speed-up of the trace's arrivals",
}


def _latency_panels(
    results: Sequence[Row],
    title: str,
    metrics: tuple[str, str],
    highlight: Collection[str] | None,
    x: Callable[[Row], float],
    x_name: str,
) -> Figure:
    drawn = _arrange(results, highlight)
    with house_style():
        figure, both = panels(10.4, 4.2, 2)
        named = []
        for axes, latency in zip(both, metrics, strict=True):
            metric = f"p99_{latency}_ms"
            ends: Ends = []
            for curve in drawn:
                end = _draw_curve(axes, curve, x, metric, metric_named(metric).scale)
                if curve.look is not None:
                    ends.append((curve.name, curve.look, *end))
            axes.set_yscale("log")
            axes.set_title(f"P99 {_TITLES[latency]}")
            axes.set_ylabel(metric_named(metric).axis)
            axes.set_xlabel(x_name)
            axes.set_xlim(left=0)
            plain_numbers(axes, "y")
            named.append((axes, ends))
        _name(figure, named)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        _explain(figure, drawn, _SATURATION_NOTE if any(map(is_saturated, results)) else "")
    return figure


def _arrange(results: Sequence[Row], highlight: Collection[str] | None) -> list[_Curve]:
    """Give each curve its look: the highlighted ones in front, coinciding ones slimmer."""
    found = curves(results)
    shown = [name for name in found if highlight is None or name in highlight]
    behind = [_Curve(name, rows, None, 1.0) for name, rows in found.items() if name not in shown]
    return behind + [
        # Curves that coincide stay visible: the later ones are drawn slimmer.
        _Curve(name, found[name], look, i / max(1, len(shown) - 1))
        for i, (name, look) in enumerate(zip(shown, looks(), strict=False))
    ]


def _draw_curve(
    axes: Axes,
    curve: _Curve,
    x_of: Callable[[Row], float],
    metric: str,
    scale: float,
    within: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Draw one curve with its intervals; return where it ends.

    Intervals are cut where nothing can be (`within`), or, of an axis without such ends, which is
    logarithmic, at a tenth of the value.
    """
    x = [x_of(row) for row in curve.rows]
    y = [row.mean(metric) * scale for row in curve.rows]
    if curve.look is None:
        axes.plot(x, y, "-", color=PALE, linewidth=1.0, zorder=1)
        return math.nan, math.nan
    from matplotlib import rcParams

    color, marker, line = curve.look
    # As wide and large beside what stands around them, whatever they are drawn for.
    width = (1.75 - 0.875 * curve.slimness) * float(rcParams["lines.linewidth"])
    size = (1.45 - 0.55 * curve.slimness) * float(rcParams["lines.markersize"])
    axes.plot(x, y, line, color=color, zorder=2, linewidth=width, label=curve.name)
    for row, at_x, at_y in zip(curve.rows, x, y, strict=True):
        half_width = row.estimate(metric).half_width
        if half_width is not None and math.isfinite(half_width):
            lowest, highest = within or (at_y / 10, math.inf)
            low = max(at_y - half_width * scale, lowest)
            high = min(at_y + half_width * scale, highest)
            axes.plot([at_x] * 2, [low, high], color=color, linewidth=1)
        axes.plot(
            at_x, at_y, marker, color=color, zorder=3, label=f"_{row.label}",
            markerfacecolor="white" if is_saturated(row) else color,
            markersize=size, clip_on=within is None,  # whole at 0 and at 100 %
        )  # fmt: skip
    drawn = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    return drawn[-1] if drawn else (math.nan, math.nan)


Ends = list[tuple[str, Look, float, float]]


def _name(figure: Figure, ends: Sequence[tuple[Axes, Ends]]) -> None:
    """Name curves beside their ends, or under the figure where names are long or room is short."""
    if fit_beside(name for _, some in ends for name, *_ in some):
        for axes, some in ends:
            _label_ends(axes, some)
    else:
        name_below(figure, [(name, look) for _, some in ends for name, look, *_ in some])


def _label_ends(axes: Axes, ends: Sequence[tuple[str, Look, float, float]]) -> None:
    """Write each curve's name beside its end, moved up or down so that names do not overlap."""
    found = [end for end in ends if math.isfinite(end[2]) and math.isfinite(end[3])]
    if not found:
        return
    to_axes = axes.transScale + axes.transLimits
    spots = [to_axes.transform((x, y)) for *_, x, y in found]
    levels = spread([float(spot[1]) for spot in spots], 0.07)
    for (name, look, x, y), spot, level in zip(found, spots, levels, strict=True):
        axes.annotate(
            name, (x, y), xytext=(float(spot[0]) + 0.045, level), textcoords="axes fraction",
            color=look.color, va="center", ha="left", fontsize=8.5, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": look.color, "linewidth": 0.6,
                "shrinkA": 1, "shrinkB": 4,
            },
        )  # fmt: skip


def _explain(figure: Figure, drawn: Sequence[_Curve], text: str) -> None:
    """Write under a figure what its reader has to know."""
    num_grey = sum(curve.look is None for curve in drawn)
    grey = f"grey: the other {num_grey} settings" if num_grey else ""
    note(figure, "; ".join(part for part in (text, grey) if part))


def _bracket_text(held: float, broken: float) -> str:
    """Say between which rates that were run a limit lies; never a number in between."""
    if math.isnan(held):
        return "not known" if math.isnan(broken) else f"< {broken:.3g}"
    return f"> {held:.3g}" if math.isnan(broken) else f"{held:.3g} to {broken:.3g}"
