"""How latencies are distributed over requests, and over the lengths of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.experiments.analysis.latencies import latencies_s, slowdowns, spread
from schedlab.experiments.figures.style import (
    GREY,
    Look,
    house_style,
    legend_width,
    looks,
    new_figure,
    note,
    plain_numbers,
    title_in_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from schedlab.sim.result import RunResult

Floats = npt.NDArray[np.float64]

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2el": "end-to-end latency",
    "queue_time": "time in the queue",
}
_SHARES = ([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25", "50", "75", "90", "99"])
_MOST_GROUPS = 8
_MOST_POINTS = 50_000
_LEAST_IN_GROUP = 5


def latency_cdf(results: Mapping[str, RunResult], title: str, metric: str = "ttft") -> Figure:
    """Draw the distribution of a latency over the requests of each run.

    Parameters
    ----------
    results : mapping of str to RunResult
        Label to run.
    title : str
        Name of the experiment.
    metric : str
        ttft, tpot, e2el or queue_time.

    Returns
    -------
    matplotlib.figure.Figure
        Share of completed requests with at most this latency, on a logarithmic axis, with P50
        and P99 marked.
    """
    values = {label: latencies_s(result, metric) * 1e3 for label, result in results.items()}
    with house_style():
        figure = new_figure(legend_width(values, 5.4), 3.9)
        axes = figure.subplots()
        _draw_cdfs(axes, values)
        axes.set_xscale("log")
        axes.set_xlabel(f"{_NAMES[metric]} (ms); marks: P50 and P99")
        title_in_lines(axes, title)
        plain_numbers(axes, "x")
    return figure


def predictability(
    replications: Mapping[str, Sequence[RunResult]], title: str, metric: str = "e2el"
) -> Figure:
    """Draw how much one request's latency varies from run to run.

    Parameters
    ----------
    replications : mapping of str to sequence of RunResult
        Label to runs of the same requests; see `schedlab.experiments.analysis.latencies.spread`.
    title : str
        Name of the experiment.
    metric : str
        ttft, tpot, e2el or queue_time.

    Returns
    -------
    matplotlib.figure.Figure
        Share of requests whose latency has at most this coefficient of variation. Further left
        is more predictable.

    Raises
    ------
    SchedlabError
        If the runs are not of the same requests.
    """
    values = {label: 100 * spread(runs, metric) for label, runs in replications.items()}
    num_runs = min(len(runs) for runs in replications.values())
    with house_style():
        figure = new_figure(legend_width(values, 5.4), 3.9)
        axes = figure.subplots()
        _draw_cdfs(axes, values)
        axes.set_xlim(left=0)
        axes.set_xlabel(
            f"standard deviation / mean of one request's {_NAMES[metric]}\n"
            f"over {num_runs} runs (%); marks: P50 and P99"
        )
        axes.set_title(title)
    return figure


def slowdown_against_length(results: Mapping[str, RunResult], alone: Floats, title: str) -> Figure:
    """Draw how much longer requests take than alone, by the length of their answer.

    Parameters
    ----------
    results : mapping of str to RunResult
        Label to run, all of the same requests.
    alone : ndarray, shape (requests,)
        What `schedlab.experiments.analysis.latencies.alone_s` gives for them.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        Over groups of about as many requests of similar output length: the median slowdown
        (line) and its 90th percentile (thin line of the same kind). A slowdown of 1 is a server
        of one's own.
    """
    with house_style():
        figure = new_figure(legend_width(results, 5.6), 4.0)
        axes = figure.subplots()
        for (label, result), look in zip(results.items(), looks(), strict=False):
            tokens = result.requests["output_tokens"].astype(np.float64)
            x, middle, high = _by_length(tokens, slowdowns(result, alone))
            axes.plot(x, middle, look.line, marker=look.marker, color=look.color, label=label)
            axes.plot(x, high, look.line, color=look.color, linewidth=0.7)
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain_numbers(axes, "x")
        plain_numbers(axes, "y")
        axes.set_xlabel("output length (tokens)")
        axes.set_ylabel("slowdown (end-to-end latency / alone)")
        axes.set_title(title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        note(figure, "thick: median; thin: 90th percentile")
    return figure


def _draw_cdfs(axes: Axes, values: Mapping[str, Floats]) -> None:
    num_drawn = 0
    for (label, column), look in zip(values.items(), looks(), strict=False):
        known = np.sort(column[np.isfinite(column)])
        if len(known):
            _draw_cdf(axes, known, look, label)
            num_drawn += 1
    axes.set_ylim(0, 1.02)
    axes.set_yticks(*_SHARES)
    axes.set_ylabel("requests (%)")
    if num_drawn > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_cdf(axes: Axes, ordered: Floats, look: Look, label: str) -> None:
    # More points than this make a large file and the same line.
    last = len(ordered) - 1
    drawn = np.unique(np.linspace(0, last, min(last + 1, _MOST_POINTS)).round().astype(np.int64))
    axes.plot(
        ordered[drawn],
        (drawn + 1) / len(ordered),
        color=look.color,
        linestyle=look.line,
        label=label,
    )
    for p in (50, 99):
        axes.plot(np.percentile(ordered, p), p / 100, look.marker, color=look.color, zorder=3)


def _by_length(tokens: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return median length, median value and P90 of groups of requests of similar length."""
    known = np.isfinite(values)
    tokens, values = tokens[known], values[known]
    if not len(values):
        return values, values, values
    least = min(_LEAST_IN_GROUP, len(values))
    num_groups = min(_MOST_GROUPS, len(values) // least)
    edges = np.unique(np.quantile(tokens, np.linspace(0, 1, num_groups + 1))).tolist()
    if len(edges) == 1:  # all of one length
        edges *= 2
    rows = []
    for i, (low, high) in enumerate(pairwise(edges)):
        inside = (tokens >= low if i == 0 else tokens > low) & (tokens <= high)
        if inside.sum() >= least:
            there = values[inside]
            rows.append((np.median(tokens[inside]), np.median(there), np.quantile(there, 0.9)))
    found = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return found[:, 0], found[:, 1], found[:, 2]
