"""Figures in one style: colour-blind safe, and readable in grey."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from experiments.plot_style import (
    GREY,
    LOOKS,
    Look,
    house_style,
    looks,
    new_figure,
    plain_numbers,
    spread,
)
from experiments.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.result import RunResult

Floats = npt.NDArray[np.float64]

RATE_KEYS = ("workload.request_rate", "workload.arrivals.rate", "workload.rate_scale")
"""What is swept along a curve rather than from curve to curve."""

SATURATED = 1.05
"""Offered over achieved rate from which a point counts as saturated."""


_NS_PER_S = 1e9
_NUM_BINS = 600
_UNITS = {"ttft": ("s", 1e-3), "tpot": ("ms", 1.0), "itl": ("ms", 1.0), "e2el": ("s", 1e-3)}
_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def throughput_against_p99(
    results: Sequence[Row], title: str, metrics: tuple[str, str] = ("ttft", "tpot")
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
    curves: dict[str, list[Row]] = {}
    for row in results:
        curves.setdefault(_curve_name(row), []).append(row)
    with house_style():
        figure = new_figure(10.4, 4.2)
        panels = figure.subplots(1, 2, sharex=True)
        for axes, metric in zip(panels, metrics, strict=True):
            ends = []
            for i, ((name, rows), look) in enumerate(zip(curves.items(), looks(), strict=False)):
                # Curves that coincide stay visible: the later ones are drawn slimmer.
                slimness = i / max(1, len(curves) - 1)
                ends.append((name, look, *_draw_curve(axes, rows, metric, look, slimness)))
            axes.set_yscale("log")
            axes.set_title(f"P99 {_NAMES[metric]}")
            axes.set_ylabel(f"P99 {metric.upper()} ({_UNITS[metric][0]})")
            axes.set_xlabel("achieved throughput (requests/s)")
            axes.set_xlim(left=0)
            plain_numbers(axes, "y")
            _label_ends(axes, ends)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        if any(is_saturated(row) for row in results):
            figure.supxlabel(
                "hollow: saturated (requests arrive > 5 % faster than served; "
                "latency there depends on the length of the run)",
                fontsize=8,
                color=GREY,
            )
    return figure


def latency_cdf(results: Mapping[str, RunResult], title: str, metric: str = "ttft") -> Figure:
    """Draw the distribution of a latency over the requests of each run.

    Parameters
    ----------
    results : mapping of str to RunResult
        Label to run.
    title : str
        Name of the experiment.
    metric : str
        ttft, tpot or e2el.

    Returns
    -------
    matplotlib.figure.Figure
        Share of completed requests with at most this latency, on a logarithmic axis, with P50
        and P99 marked.
    """
    with house_style():
        figure = new_figure(5.6, 3.9)
        axes = figure.subplots()
        ends = []
        for (label, result), look in zip(results.items(), looks(), strict=False):
            values = np.sort(_latencies_s(result, metric))
            if not len(values):
                continue
            share = np.arange(1, len(values) + 1) / len(values)
            axes.plot(values, share, color=look.color, linestyle=look.line, label=label)
            for p in (50, 99):
                axes.plot(
                    np.percentile(values, p), p / 100, look.marker, color=look.color, zorder=3
                )
            ends.append(label)
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25", "50", "75", "90", "99"])
        axes.set_ylabel("requests (%)")
        axes.set_xlabel(f"{_NAMES[metric]} (s); marks: P50 and P99")
        axes.set_title(title)
        plain_numbers(axes, "x")
        if len(ends) > 1:
            axes.legend(loc="lower right")
    return figure


def time_series(result: RunResult, title: str) -> Figure:
    """Draw requests running and waiting, and KV memory, over the time of a run.

    Parameters
    ----------
    result : RunResult
        The run.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels over seconds since the first arrival. Long runs are drawn as the mean (line)
        and range (band) of equal pieces of time.
    """
    steps = result.log.steps()
    start_ns = int(result.requests["arrival_ns"].min())
    time_s = (steps["start_ns"].astype(np.int64) - start_ns) / _NS_PER_S
    capacity = result.kv_capacity_tokens
    with house_style():
        figure = new_figure(8.4, 4.8)
        upper, lower = figure.subplots(2, 1, sharex=True)
        for name, look in zip(("running", "waiting"), LOOKS, strict=False):
            _draw_band(upper, time_s, steps[f"num_{name}"].astype(float), look, name)
        upper.set_ylabel("requests")
        upper.set_ylim(bottom=0)
        held = steps["kv_allocated_tokens"].astype(float) * (100 / capacity)
        used = steps["kv_tokens"].astype(float) * (100 / capacity)
        _draw_area(lower, time_s, held, "held by requests")
        _draw_band(lower, time_s, used, LOOKS[2]._replace(line="-"), "in use")
        lower.set_ylabel("KV cache (%)")
        lower.set_ylim(0, 102)
        lower.set_xlabel("time since the first arrival (s)")
        preempted = np.flatnonzero(steps["num_preempted"])
        if len(preempted):
            marks = lower.get_xaxis_transform()
            lower.plot(
                time_s[preempted], np.full(len(preempted), 1.0), "|", color=LOOKS[1].color,
                transform=marks, markersize=6, markeredgewidth=0.6, label="preemption",
                clip_on=False,
            )  # fmt: skip
        for axes in (upper, lower):
            axes.legend(loc="upper right", ncols=3, bbox_to_anchor=(1, 1.16))
            axes.set_xlim(left=0)
        upper.set_title(title)
    return figure


def gantt(result: RunResult, title: str, max_requests: int = 40) -> Figure:
    """Draw what happened to each request of a small run.

    Parameters
    ----------
    result : RunResult
        The run.
    title : str
        Name of the experiment.
    max_requests : int
        The first so many by arrival are drawn; the title says if there are more.

    Returns
    -------
    matplotlib.figure.Figure
        A row a request: queued (arrival to first scheduled), prefill (to first token), decode
        (to finish), and over these preempted (eviction to resumption; what is computed again
        after that counts as the phase it is in).
    """
    from matplotlib.patches import Patch

    columns = result.requests
    order = np.argsort(columns["arrival_ns"], kind="stable")[:max_requests]
    start_ns = int(columns["arrival_ns"].min())
    colors = {
        "queued": "#D9D9D9",
        "prefill": "#E69F00",
        "decode": "#56B4E9",
        "preempted": "#FFFFFF",
    }
    marks = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")
    preempted = _preempted_spans(result, start_ns)
    seen: dict[str, None] = {}
    with house_style():
        figure = new_figure(8.4, 1.3 + 0.16 * len(order))
        axes = figure.subplots()
        for line, i in enumerate(order):
            for phase, begin, end in zip(colors, marks, marks[1:], strict=False):
                span = [(int(columns[name][i]) - start_ns) / _NS_PER_S for name in (begin, end)]
                if columns[end][i] < 0:
                    break
                axes.barh(line, span[1] - span[0], left=span[0], height=0.72, color=colors[phase])
                seen[phase] = None
            for begin_s, end_s in preempted.get(int(columns["id"][i]), []):
                axes.barh(
                    line, end_s - begin_s, left=begin_s, height=0.72, color=colors["preempted"],
                    edgecolor="#D55E00", hatch="/////", linewidth=0,
                )  # fmt: skip
                seen["preempted"] = None
            if columns["finish_ns"][i] < 0:
                arrival_s = (int(columns["arrival_ns"][i]) - start_ns) / _NS_PER_S
                axes.plot(arrival_s, line, "x", color="#D55E00")
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylabel("request, by arrival")
        axes.set_xlabel("time since the first arrival (s)")
        total = len(columns["id"])
        part = f" (first {len(order)} of {total} requests)" if total > len(order) else ""
        axes.set_title(title + part)
        handles = [
            Patch(
                facecolor=colors[phase],
                edgecolor="#D55E00" if phase == "preempted" else "none",
                hatch="/////" if phase == "preempted" else None,
                linewidth=0,
                label=phase,
            )
            for phase in colors
            if phase in seen
        ]
        axes.legend(handles=handles, loc="lower right", ncols=4, bbox_to_anchor=(1.0, 0.99))
    return figure


def _curve_name(row: Row) -> str:
    """Return what tells a row's curve from the others: its settings but the rate."""
    rest = [
        value if key == "policy" else f"{key.rsplit('.', 1)[-1]}={value}"
        for key, value in row.settings.items()
        if key not in RATE_KEYS
    ]
    return ", ".join(rest) or row.policy


def is_saturated(row: Row) -> bool:
    """Say whether requests arrived more than 5 % faster than they were served.

    Parameters
    ----------
    row : Row
        A setting; see the notes of `throughput_against_p99`.

    Returns
    -------
    bool
        False where nothing was completed or all requests came at once.
    """
    service_ms = row.mean("median_e2el_ms") - row.mean("median_queue_time_ms")
    open_s = row.mean("duration_s") - service_ms / 1e3
    return row.mean("offered_request_rate") * open_s > SATURATED * row.mean("completed")


def _draw_curve(
    axes: Axes, rows: Sequence[Row], metric: str, look: Look, slimness: float
) -> tuple[float, float]:
    """Draw one curve with its intervals; return where it ends."""
    scale = _UNITS[metric][1]
    x = [row.mean("request_throughput") for row in rows]
    y = [row.mean(f"p99_{metric}_ms") * scale for row in rows]
    axes.plot(x, y, look.line, color=look.color, zorder=2, linewidth=2.8 - 1.4 * slimness)
    for row, at_x, at_y in zip(rows, x, y, strict=True):
        half_width = row.metrics[f"p99_{metric}_ms"].half_width
        if half_width is not None and math.isfinite(half_width):
            low = max(at_y - half_width * scale, at_y / 10)
            axes.plot([at_x] * 2, [low, at_y + half_width * scale], color=look.color, linewidth=1)
        axes.plot(
            at_x, at_y, look.marker, color=look.color, zorder=3,
            markerfacecolor="white" if is_saturated(row) else look.color,
            markersize=8.0 - 3.0 * slimness,
        )  # fmt: skip
    drawn = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and b > 0]
    return drawn[-1] if drawn else (math.nan, math.nan)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, Look, float, float]]) -> None:
    """Write each curve's name beside its end, moved up or down so that names do not overlap."""
    found = [end for end in ends if math.isfinite(end[2])]
    if not found:
        return
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    right = axes.get_xlim()[1]
    levels = [(math.log10(y) - low) / (high - low) for *_, y in found]
    for (name, look, x, y), level in zip(found, spread(levels, 0.07), strict=True):
        axes.annotate(
            name, (x, y), xytext=(x / right + 0.045, level), textcoords="axes fraction",
            color=look.color, va="center", ha="left", fontsize=8.5, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": look.color, "linewidth": 0.6,
                "shrinkA": 1, "shrinkB": 4,
            },
        )  # fmt: skip


def _draw_band(axes: Axes, time_s: Floats, values: Floats, look: Look, label: str) -> None:
    """Draw a step function; a long one as mean and range over equal pieces of time."""
    if len(values) <= 2 * _NUM_BINS:
        axes.step(
            time_s, values, where="post", color=look.color, linestyle=look.line, label=label,
            linewidth=1.2,
        )  # fmt: skip
        return
    edges = np.linspace(time_s[0], time_s[-1], _NUM_BINS + 1)
    starts = np.unique(np.searchsorted(time_s, edges[:-1]))
    counts = np.diff(np.append(starts, len(values)))
    mean = np.add.reduceat(values, starts) / counts
    axes.plot(
        time_s[starts], mean, color=look.color, linestyle=look.line, label=label, linewidth=1.2
    )
    axes.fill_between(
        time_s[starts], np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts),
        color=look.color, alpha=0.2, linewidth=0, step="mid",
    )  # fmt: skip


def _draw_area(axes: Axes, time_s: Floats, values: Floats, label: str) -> None:
    """Shade from zero to the values; of a long run, to the most in equal pieces of time."""
    edges = np.linspace(time_s[0], time_s[-1], min(_NUM_BINS, len(values)) + 1)
    starts = np.unique(np.searchsorted(time_s, edges[:-1]))
    most = np.maximum.reduceat(values, starts)
    axes.fill_between(time_s[starts], most, color="#D9D9D9", linewidth=0, step="post", label=label)


def _latencies_s(result: RunResult, metric: str) -> Floats:
    columns = {name: data.astype(np.float64) for name, data in result.requests.items()}
    done = columns["finish_ns"] >= 0
    ttft = columns["first_token_ns"] - columns["arrival_ns"]
    e2el = columns["finish_ns"] - columns["arrival_ns"]
    if metric == "tpot":
        done &= columns["generated_tokens"] > 1
        return (e2el - ttft)[done] / (columns["generated_tokens"] - 1)[done] / _NS_PER_S
    return {"ttft": ttft, "e2el": e2el}[metric][done] / _NS_PER_S


def _preempted_spans(result: RunResult, start_ns: int) -> dict[int, list[tuple[float, float]]]:
    """Return (begin, end) in seconds of each eviction to its resumption, by request id."""
    rows = {name: data.astype(np.int64) for name, data in result.log.preemptions().items()}
    spans: dict[int, list[tuple[float, float]]] = {}
    for number, evicted_ns, resumed_ns in zip(*(rows[k].tolist() for k in rows), strict=True):
        if resumed_ns >= 0:
            span = ((evicted_ns - start_ns) / _NS_PER_S, (resumed_ns - start_ns) / _NS_PER_S)
            spans.setdefault(number, []).append(span)
    return spans
