"""One objective against another, with the Pareto frontier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.experiments.analysis.frontier import on_frontier
from schedlab.experiments.analysis.rate_curves import RATE_KEYS, curve_name, curves
from schedlab.experiments.figures.style import (
    GREY,
    PALE,
    fit_beside,
    house_style,
    looks,
    name_below,
    new_figure,
    note,
    plain_numbers,
)
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_NAMED = 8


def pareto(
    results: Sequence[Row],
    title: str,
    x: str = "output_throughput",
    y: str = "p99_ttft_ms",
) -> Figure:
    """Draw all settings by two metrics, and the frontier of those that no other beats.

    Parameters
    ----------
    results : sequence of Row
        The settings; a request rate may be swept among them.
    title : str
        Name of the experiment.
    x, y : str
        Two metrics that have a better and a worse.

    Returns
    -------
    matplotlib.figure.Figure
        Points on the frontier (see `experiments.analysis.frontier.on_frontier`) in colour, joined
        and named; dominated ones faint, so that the reader sees what was given up.

    Raises
    ------
    SpecError
        If a metric does not exist or has no better and worse.
    SchedlabError
        If no setting has both metrics.
    """
    shown = {name: metric_named(name) for name in (x, y)}
    upwards = []
    for name in (x, y):
        better = metric_named(name).larger_is_better
        if better is None:
            raise SpecError(f"{name} is neither better large nor small: it has no frontier")
        upwards.append(better)
    values = np.array([[row.mean(x), row.mean(y)] for row in results])
    scaled = values * [shown[x].scale, shown[y].scale]
    best = on_frontier(values, upwards)
    if not best.any():
        raise SchedlabError(f"no setting has both {x} and {y}")
    return _frontier(results, title, scaled, best, upwards, (_axis(x), _axis(y)))


def gpu_frontier(results: Sequence[Row], title: str, num_gpus: Sequence[int]) -> Figure:
    """Draw output tokens a second a GPU over those a second a user, and the frontier of both.

    Parameters
    ----------
    results : sequence of Row
        The settings; usually a request rate or a concurrency is swept among them.
    title : str
        Name of the experiment.
    num_gpus : sequence of int
        GPUs of each setting.

    Returns
    -------
    matplotlib.figure.Figure
        As `pareto`; a user sees ``1000 / median TPOT`` tokens a second, and a GPU makes
        ``output throughput / GPUs`` of them.

    Raises
    ------
    SchedlabError
        If no setting has both.
    """
    scaled = np.array(
        [
            [1e3 / (row.mean("median_tpot_ms") or math.nan), row.mean("output_throughput") / gpus]
            for row, gpus in zip(results, num_gpus, strict=True)
        ]
    )
    best = on_frontier(scaled, (True, True))
    if not best.any():
        raise SchedlabError("no setting has a time between tokens: answers of one token have none")
    names = ("speed for a user (output tokens/s, 1 / median TPOT)", "output tokens/s per GPU")
    return _frontier(results, title, scaled, best, (True, True), names, _MOST_NAMED)


def _frontier(
    results: Sequence[Row],
    title: str,
    scaled: npt.NDArray[np.float64],
    best: npt.NDArray[np.bool_],
    upwards: Sequence[bool],
    axis_names: tuple[str, str],
    most_named: int = 0,
) -> Figure:
    """Draw points in the units shown; those that are `best` in colour, joined and named.

    So many curves at most are in colour all along, hollow where they are beaten.
    """
    whole = curves(results)
    shown_whole = len(whole) <= most_named
    on_it = dict.fromkeys(curve_name(row) for row, on in zip(results, best, strict=True) if on)
    names = list(whole if shown_whole else on_it)
    with house_style():
        figure = new_figure(7.6, 4.4)
        axes = figure.subplots()
        for rows in whole.values():
            line = [results.index(row) for row in rows]
            axes.plot(*scaled[line].T, "-", color=PALE, linewidth=0.7, zorder=1)
        axes.plot(*scaled[~best].T, ".", color="#B0B0B0", markersize=5, zorder=2)
        order = np.flatnonzero(best)[np.argsort(scaled[best, 0], kind="stable")]
        axes.plot(
            *scaled[order].T, color=GREY, linewidth=1.1, zorder=3,
            drawstyle="steps-pre" if upwards[0] else "steps-post",
        )  # fmt: skip
        named = []
        for k, (name, look) in enumerate(zip(names, looks(), strict=False)):
            there = [i for i in order if curve_name(results[i]) == name]
            # Points that coincide stay visible: the later ones are drawn smaller.
            size = 8.5 - 4.0 * k / max(1, len(names) - 1)
            axes.plot(
                *scaled[there].T, look.marker, color=look.color, markersize=size, zorder=4,
                label=name,
            )  # fmt: skip
            if shown_whole:
                along = [i for i, row in enumerate(results) if curve_name(row) == name]
                beaten = [i for i in along if not best[i]]
                axes.plot(*scaled[along].T, look.line, color=look.color, linewidth=1.0, zorder=2)
                axes.plot(*scaled[beaten].T, look.marker, color=look.color, markersize=size,
                          markerfacecolor="white", zorder=4)  # fmt: skip
            named.append((name, look._replace(line="")))
        known = scaled[np.isfinite(scaled).all(axis=1)]
        if not upwards[1] and known[:, 1].min() > 0:
            axes.set_yscale("log")
            plain_numbers(axes, "y")
        elif upwards[1] and known[:, 1].min() >= 0:
            axes.set_ylim(0, 1.06 * known[:, 1].max())
        low, high = known[:, 0].min(), known[:, 0].max()
        # From zero, unless that would squeeze what there is to see into a corner.
        if 0 <= low <= 0.7 * high:
            axes.set_xlim(0, 1.04 * high)
        _write_rates(axes, [(results[i], tuple(scaled[i])) for i in order])
        axes.set_xlabel(axis_names[0])
        axes.set_ylabel(axis_names[1])
        axes.set_title(title)
        if fit_beside(names):
            axes.legend(
                title="" if shown_whole else "on the frontier",
                loc="upper left",
                bbox_to_anchor=(1.01, 1.0),
            )
        else:
            name_below(figure, named)
        note(
            figure,
            f"{int(best.sum())} of {len(results)} settings are on the frontier; "
            f"{'hollow' if shown_whole else 'grey'} ones are beaten in one metric by another that "
            "is no worse in the other",
        )
    return figure


def _write_rates(axes: Axes, points: Sequence[tuple[Row, tuple[float, ...]]]) -> None:
    """Write each swept rate once, above the points of the frontier that have it."""
    places: dict[str, tuple[float, ...]] = {}
    for row, at in points:
        for key in RATE_KEYS:
            if key in row.settings:
                text = f"{row.settings[key]}{'x' if key.endswith('scale') else '/s'}"
                places[text] = max(places.get(text, at), at, key=lambda place: place[1])
    for text, at in places.items():
        axes.annotate(
            text,
            (at[0], at[1]),
            xytext=(-4, 5),
            textcoords="offset points",
            fontsize=8,
            color=GREY,
            ha="right",
        )


def _axis(metric: str) -> str:
    direction = "more" if metric_named(metric).larger_is_better else "less"
    shown = metric_named(metric)
    parts = ", ".join(part for part in (shown.unit, f"{direction} is better") if part)
    return f"{shown.label} ({parts})"
