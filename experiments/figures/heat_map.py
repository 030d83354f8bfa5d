"""Policies against metrics in one picture, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.experiments.figures.style import house_style, legend_width, new_figure, note
from schedlab.experiments.results.selection import FOLDER
from schedlab.experiments.results.tables import Row
from schedlab.experiments.statistics import LEAST_SEEDS, with_interval
from schedlab.sim.errors import SpecError
from schedlab.sim.metrics.registry import metric_named

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

DEFAULT_METRICS = (
    "request_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms", "p99_tpot_ms",
    "p99_itl_ms", "p99_e2el_ms", "num_preemptions",
)  # fmt: skip
"""What a heat map shows unless told."""

_WORST = 8.0
"""Times the best from which a cell is as dark as it gets."""


def heat_map(
    results: Sequence[Row], title: str, metrics: Sequence[str] = DEFAULT_METRICS
) -> Figure:
    """Draw a table of policies against metrics, darker where further from the best.

    Parameters
    ----------
    results : sequence of Row
        Settings that are to be compared, one a line: all at the same load.
    title : str
        Name of the experiment.
    metrics : sequence of str
        One a column. Those that no run has (goodput without targets) are left out.

    Returns
    -------
    matplotlib.figure.Figure
        Each cell says the mean and, with replications, half its 95 % confidence interval. Its
        shade is how many times worse than the best of its column it is, on a logarithmic scale
        up to 8; the best is in bold, with all those whose interval overlaps the best one's, unless
        those are all. Of two to four replications none is in bold.

    Raises
    ------
    SpecError
        If a metric does not exist or has no better and worse.
    """
    for metric in metrics:
        if metric_named(metric).larger_is_better is None:
            raise SpecError(f"{metric} is neither better large nor small: no column for it")
    shown = [m for m in metrics if any(math.isfinite(row.mean(m)) for row in results)]
    worse = np.stack([times_worse([row.mean(m) for row in results], m) for m in shown], axis=1)
    shade = np.log(np.clip(worse, 1.0, _WORST)) / math.log(_WORST)
    # Two to four seeds have intervals so wide that they tell nothing from anything.
    tells = not any(1 < row.num_replications < LEAST_SEEDS for row in results)
    with house_style():
        width = legend_width(_labels(results), 0.9 + 1.12 * len(shown))
        figure = new_figure(width, 1.0 + 0.27 * len(results), least=0.75 * width)
        axes = figure.subplots()
        image = axes.imshow(
            np.ma.masked_invalid(shade), cmap=shades(), vmin=0, vmax=1, aspect="auto"
        )
        for j, metric in enumerate(shown):
            ties = _not_worse(results, metric) if tells else set()
            ties = set() if len(ties) == len(results) else ties
            for i, row in enumerate(results):
                axes.text(
                    j, i, _cell(row, metric), ha="center", va="center", fontsize=7.5,
                    color="white" if shade[i, j] > 0.62 else "#111111",
                    fontweight="bold" if i in ties else "normal",
                )  # fmt: skip
        axes.set_xticks(range(len(shown)), [_heading(metric) for metric in shown], fontsize=8)
        axes.set_yticks(range(len(results)), _labels(results))
        axes.tick_params(length=0, top=True, bottom=False, labeltop=True, labelbottom=False)
        axes.grid(visible=False)
        axes.set_xticks(np.arange(len(shown) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(results) + 1) - 0.5, minor=True)
        axes.grid(visible=True, which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        bar = figure.colorbar(image, ax=axes, fraction=0.025, pad=0.01)
        marks = [1, 2, 4, 8]
        bar.set_ticks(
            [math.log(m) / math.log(_WORST) for m in marks],
            labels=[f"{m}x" for m in marks[:-1]] + ["8x +"],
        )
        bar.set_label("worse than the best", fontsize=8)
        bar.outline.set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        text = "bold: the best, and what its interval does not tell from it"
        if not tells:
            text = f"fewer than {LEAST_SEEDS} seeds tell no best"
        if any(row.num_replications > 1 for row in results):
            text += "; ± is the 95 % confidence interval over replications"
        note(figure, text)
    return figure


def times_worse(values: Sequence[float], metric: str) -> Floats:
    """Return how many times worse than the best each value of a metric is.

    Parameters
    ----------
    values : sequence of float
        At least one.
    metric : str
        Says which way is better.

    Returns
    -------
    ndarray, shape (values,)
        1 for the best; infinity against a best of zero; NaN where there is no value.
    """
    column = np.asarray(values, dtype=np.float64)
    if np.isnan(column).all():
        return column
    upwards = bool(metric_named(metric).larger_is_better)
    best = np.nanmax(column) if upwards else np.nanmin(column)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = best / column if upwards else column / best
    return np.where(column == best, 1.0, ratio)


def _not_worse(results: Sequence[Row], metric: str) -> set[int]:
    """Return the best row and those whose interval overlaps its interval."""
    upwards = bool(metric_named(metric).larger_is_better)
    bounds = {}
    for i, row in enumerate(results):
        mean, half = row.estimate(metric)
        if math.isfinite(mean):
            bounds[i] = (mean if upwards else -mean, half or 0.0)
    best_mean, best_half = max(bounds.values())
    return {i for i, (mean, half) in bounds.items() if mean + half >= best_mean - best_half}


def shades() -> Colormap:
    """Return one hue from white to dark: as readable in grey as in colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("worse", ["#F7FAFD", "#9CC3E0", "#2F77B0", "#0B2F55"])


def _heading(metric: str) -> str:
    shown = metric_named(metric)
    unit = f" ({shown.unit})" if shown.unit else ""
    arrow = "↑" if metric_named(metric).larger_is_better else "↓"
    return f"{shown.label}\n{unit.strip()} {arrow}".strip()


def _labels(results: Sequence[Row]) -> list[str]:
    """Name each row by the settings in which the rows differ."""
    varying = [
        key
        for key in dict.fromkeys(key for row in results for key in row.settings)
        if len({row.settings.get(key) for row in results}) > 1
    ]
    if not varying:
        return [row.label for row in results]
    return [
        ", ".join(
            row.settings[key]
            if key in ("policy", FOLDER)
            else f"{key.rsplit('.', 1)[-1]}={row.settings[key]}"
            for key in varying
            if key in row.settings
        )
        for row in results
    ]


def _cell(row: Row, metric: str) -> str:
    mean = row.mean(metric)
    if not math.isfinite(mean):
        return "-"
    return with_interval(mean, row.estimate(metric).half_width, metric_named(metric).scale)
