"""What the engine did over the time of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from schedlab.experiments.figures.style import (
    LOOKS,
    PALE,
    Look,
    house_style,
    new_figure,
    title_in_lines,
)
from schedlab.sim.errors import SchedlabError
from schedlab.sim.record.columns import BATCH_ROWS, Batched, Column, Columns, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from schedlab.sim.result import RunResult

Floats = npt.NDArray[np.float64]

_NS_PER_S = 1e9
_NUM_BINS = 600
_NUM_BARS = 60
_DRAWN = (
    "start_ns", "num_running", "num_waiting", "kv_tokens", "kv_allocated_tokens",
    "kv_fragmentation_tokens", "kv_reserved_unused_tokens", "num_preempted",
)  # fmt: skip


def time_series(result: RunResult, title: str) -> Figure:
    """Draw requests running and waiting, KV memory, its waste, and preemptions over time.

    Parameters
    ----------
    result : RunResult
        The run.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        Panels over seconds since the first arrival: requests; KV cache held and in use; what of
        the held memory is used by nobody (fragmentation) and what its owner will use later
        (reserved); and, if there were any, preemptions per second. Long runs are drawn as the
        mean (line) and range (band) of equal pieces of time. Of more than a million steps every
        n-th is looked at, which the figure says; preemptions are counted all.

    Raises
    ------
    SchedlabError
        If no request was ever scheduled.
    """
    check_ran(result)
    steps, every = _thinned(result.log.steps())
    start_ns = int(result.requests["arrival_ns"].min())
    time_s = (steps["start_ns"].astype(np.int64) - start_ns) / _NS_PER_S
    num_preempted = steps["num_preempted"].astype(float)
    preempts = bool(num_preempted.any())
    heights = [1.2, 1.2, 0.8] + [0.6] * preempts
    with house_style():
        figure = new_figure(8.4, 1.0 + 1.45 * sum(heights), lowest=0.9 + sum(heights))
        panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        requests, memory, waste = panels[:3]
        for name, look in zip(("running", "waiting"), LOOKS, strict=False):
            _draw_band(requests, time_s, steps[f"num_{name}"].astype(float), look, name)
        requests.set_ylabel("requests" if result.num_engines == 1 else "requests\nof an engine")
        held_tokens = steps["kv_allocated_tokens"].astype(float)
        percent: float | Floats = 100 / result.kv_capacity_tokens
        if result.engines:
            capacity_tokens = np.array([e.kv_capacity_tokens for e in result.engines], dtype=float)
            percent = 100 / capacity_tokens[steps["engine"].astype(np.int64)]
        _draw_area(memory, time_s, held_tokens * percent, "held by requests")
        used = steps["kv_tokens"].astype(float) * percent
        _draw_band(memory, time_s, used, LOOKS[2]._replace(line="-"), "in use")
        memory.set_ylabel("KV cache (%)")
        for name, label, look in (
            ("kv_fragmentation_tokens", "used by nobody", LOOKS[1]._replace(line="-")),
            ("kv_reserved_unused_tokens", "reserved for later", LOOKS[0]._replace(line=":")),
        ):
            if name == "kv_reserved_unused_tokens" and not steps[name].any():
                continue
            share = 100 * steps[name].astype(float) / np.maximum(held_tokens, 1.0)
            _draw_band(waste, time_s, share, look, label)
        waste.set_ylabel("of held KV (%)")
        if preempts:
            panels[3].set_ylabel("preempted/s")
            _draw_rate(panels[3], time_s, num_preempted)
        for axes in panels:
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        waste.set_ylim(0, max(waste.get_ylim()[1], 1.0))
        memory.set_ylim(0, 102)
        for axes in panels[:3]:
            axes.legend(loc="lower right", ncols=3, bbox_to_anchor=(1, 1.0), borderaxespad=0)
        sampled = f"; of every {every} steps one" if every > 1 else ""
        panels[-1].set_xlabel(f"time since the first arrival (s){sampled}")
        title_in_lines(requests, title, over_legend=True)
    return figure


def ran(result: RunResult) -> bool:
    """Say whether any request was ever scheduled, so that there are steps."""
    return bool((whole_numbers(result.requests, "first_scheduled_ns") >= 0).any())


def check_ran(result: RunResult) -> None:
    """Refuse to draw the steps of a run that has none.

    Raises
    ------
    SchedlabError
        If no request was ever scheduled.
    """
    if not ran(result):
        why = next(iter(result.reject_reasons.values()), "")
        told = f", e.g.: {why}" if why else ""
        raise SchedlabError(f"no request was ever scheduled{told}: there are no steps to draw")


def _thinned(steps: Columns) -> tuple[Columns, int]:
    """Return so many steps as memory has room for, evenly chosen, and of how many each is one.

    The preemptions of the steps left out are counted with the one before them.
    """
    if not isinstance(steps, Batched) or steps.num_rows <= BATCH_ROWS:
        return steps, 1
    every = -(-steps.num_rows // BATCH_ROWS)
    size = BATCH_ROWS // every * every
    kept: dict[str, list[Column]] = {name: [] for name in _DRAWN}
    for start in range(0, steps.num_rows, size):
        some = steps.rows(start, min(start + size, steps.num_rows))
        for name in _DRAWN:
            column = some[name]
            chosen = np.arange(0, len(column), every)
            counted = name == "num_preempted"
            kept[name].append(np.add.reduceat(column, chosen) if counted else column[chosen])
    return {name: np.concatenate(pieces) for name, pieces in kept.items()}, every


def _draw_band(axes: Axes, time_s: Floats, values: Floats, look: Look, label: str) -> None:
    """Draw a step function; a long one as mean and range over equal pieces of time."""
    style = {"color": look.color, "linestyle": look.line, "label": label, "linewidth": 1.2}
    if len(values) <= 2 * _NUM_BINS:
        axes.step(time_s, values, where="post", **style)  # type: ignore[arg-type]
        return
    starts = _pieces(time_s, _NUM_BINS)
    counts = np.diff(np.append(starts, len(values)))
    axes.plot(time_s[starts], np.add.reduceat(values, starts) / counts, **style)  # type: ignore[arg-type]
    axes.fill_between(
        time_s[starts], np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts),
        color=look.color, alpha=0.2, linewidth=0, step="mid",
    )  # fmt: skip


def _draw_area(axes: Axes, time_s: Floats, values: Floats, label: str) -> None:
    """Shade from zero to the values; of a long run, to the most in equal pieces of time."""
    starts = _pieces(time_s, min(_NUM_BINS, len(values)))
    most = np.maximum.reduceat(values, starts)
    axes.fill_between(time_s[starts], most, color=PALE, linewidth=0, step="post", label=label)


def _draw_rate(axes: Axes, time_s: Floats, counts: Floats) -> None:
    """Draw how many a second, as bars of equal pieces of time."""
    totals, edges = np.histogram(time_s, bins=_NUM_BARS, weights=counts)
    width = float(edges[1] - edges[0])
    axes.bar(edges[:-1], totals / width, width=0.9 * width, align="edge", color=LOOKS[1].color)


def _pieces(time_s: Floats, num_pieces: int) -> npt.NDArray[np.int64]:
    """Return the first step of each of so many equal pieces of time that have any."""
    edges = np.linspace(time_s[0], time_s[-1], num_pieces + 1)
    return np.unique(np.searchsorted(time_s, edges[:-1]))
