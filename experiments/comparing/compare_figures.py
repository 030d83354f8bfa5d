"""Figures of a comparison: steps, latencies and frontiers, measured beside simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedlab.experiments.analysis.latencies import latencies_s
from schedlab.experiments.figures.style import (
    Look,
    columns_below,
    house_style,
    looks,
    new_figure,
    plain_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from schedlab.experiments.comparing.compare import PointComparison


def step_figure(found: Sequence[PointComparison], title: str) -> Figure:
    """Draw each measured step against its price: the error of the cost model alone."""
    with house_style():
        figure = new_figure(8.4, 4.6)
        left, right = figure.subplots(1, 2)
        for point, look in zip(found, looks(), strict=False):
            measured, predicted = point.measured_ns / 1e6, point.predicted_ns / 1e6
            some = slice(None, None, max(1, len(measured) // 1500))
            style = {"linestyle": "none", "marker": look.marker, "color": look.color}
            left.plot(measured[some], predicted[some], markersize=2.5, label=point.label, **style)
            error = np.sort(np.abs(predicted / measured - 1)) * 100
            share = np.arange(1, len(error) + 1) / len(error)
            right.plot(error, share, color=look.color, linestyle=look.line, label=point.label)
        low = min(float(p.measured_ns.min()) for p in found) / 1e6
        high = max(float(p.measured_ns.max()) for p in found) / 1e6
        left.plot([low, high], [low, high], color="#444444", linewidth=0.8)
        left.set_xscale("log")
        left.set_yscale("log")
        right.set_xscale("log")
        for axes, axis in ((left, "x"), (left, "y"), (right, "x")):
            plain_numbers(axes, axis)
        left.set_xlabel("measured step (ms)")
        left.set_ylabel("predicted step (ms)")
        left.set_title(f"{title}: every step")
        right.set_xlabel("absolute error of a step (%)")
        right.set_ylabel("share of steps")
        right.set_ylim(0, 1)
        right.set_xlim(left=0.1)
        right.set_title("how large the errors are")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", fontsize=8,
            ncols=columns_below(figure, labels),
        )  # fmt: skip
    return figure


def cdf_figure(found: Sequence[PointComparison], title: str) -> Figure:
    """Overlay the latency distributions of both backends, a column a load."""
    loads = list(dict.fromkeys(point.load for point in found))
    look_of = _looks_of_policies(found)
    handles: dict[str, Line2D] = {}
    with house_style():
        figure = new_figure(4.2 * len(loads) + 0.6, 6.0)
        grid = figure.subplots(2, len(loads), squeeze=False)
        for column, load in enumerate(loads):
            here = [point for point in found if point.load == load]
            for row, (name, latency) in enumerate(
                (("time to first token", "ttft"), ("end-to-end latency", "e2el"))
            ):
                axes = grid[row, column]
                for point in here:
                    color = look_of[point.policy].color
                    for run, line in ((point.measured, "-"), (point.simulated, ":")):
                        values_ms = latencies_s(run, latency) * 1e3
                        latencies_ms = np.sort(values_ms[~np.isnan(values_ms)])
                        share = np.arange(1, len(latencies_ms) + 1) / len(latencies_ms)
                        (drawn,) = axes.plot(latencies_ms, share, color=color, linestyle=line)
                        if line == "-":
                            handles.setdefault(point.policy, drawn)
                axes.set_xscale("log")
                plain_numbers(axes, "x")
                axes.set_ylim(0, 1)
                axes.set_xlabel(f"{name} (ms)")
                if column == 0:
                    axes.set_ylabel("share of requests")
                if row == 0:
                    axes.set_title(load or title)
        if any(loads):
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        figure.legend(
            [handles[policy] for policy in look_of], list(look_of), ncols=len(look_of), fontsize=8,
            title="solid measured, dotted simulated", loc="outside lower center",
        )  # fmt: skip
    return figure


def frontier_figure(found: Sequence[PointComparison], title: str) -> Figure:
    """Draw achieved throughput against P99 latency, measured (filled) beside simulated (hollow)."""
    with house_style():
        figure = new_figure(8.4, 3.8)
        left, right = figure.subplots(1, 2)
        for policy, look in _looks_of_policies(found).items():
            here = [point for point in found if point.policy == policy]
            for axes, metric in ((left, "p99_ttft_ms"), (right, "p99_tpot_ms")):
                for side, fill, line in (
                    ("measured", look.color, "-"),
                    ("simulated", "white", ":"),
                ):
                    values = {
                        name: [
                            getattr(row, side)
                            for point in here
                            for row in point.rows
                            if row.metric == name
                        ]
                        for name in ("request_throughput", metric)
                    }
                    axes.plot(
                        values["request_throughput"], values[metric], line, marker=look.marker,
                        color=look.color, markerfacecolor=fill, markersize=6,
                        label=policy if side == "measured" else None,
                    )  # fmt: skip
        for axes, name in ((left, "P99 TTFT (ms)"), (right, "P99 TPOT (ms)")):
            axes.set_yscale("log")
            plain_numbers(axes, "y")
            axes.set_xlim(left=0)
            axes.set_xlabel("achieved throughput (requests/s)")
            axes.set_ylabel(name)
        left.set_title(f"{title}: filled measured, hollow simulated")
        left.legend(fontsize=8)
    return figure


def _looks_of_policies(found: Sequence[PointComparison]) -> dict[str, Look]:
    """Return how each policy is drawn, whatever was measured of the others."""
    policies = dict.fromkeys(point.policy for point in found)
    return dict(zip(policies, looks(), strict=False))
