"""What happened to each request, and to each seat of the batch, of a small run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from schedlab.experiments.figures.style import GREY, house_style, new_figure, title_in_lines
from schedlab.sim.record.columns import completed

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from schedlab.sim.result import RunResult

_NS_PER_S = 1e9
# Apart in lightness too: about 93, 47 and 72 per cent.
_COLORS = {
    "queued": "#ECECEC",
    "prefill": "#D55E00",
    "decode": "#7FC1EA",
    "preempted": "#FFFFFF",
    "held, nothing to do": "#8A8A8A",
}
_HELD = "held, nothing to do"
_UNANSWERED = "not answered"
_DARK = "#444444"
_MARKS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns")


class Stay(NamedTuple):
    """A request in a seat of the batch, times in seconds since the first arrival.

    Attributes
    ----------
    seat : int
        0-based; the lowest that was free.
    request_id : int
        Who.
    begin_s, first_token_s, last_token_s, end_s : float
        From being scheduled to finishing or being evicted. Tokens may lie outside of this: the
        first before it for a request that was resumed, the last after it for one evicted.
    """

    seat: int
    request_id: int
    begin_s: float
    first_token_s: float
    last_token_s: float
    end_s: float

    @property
    def used_s(self) -> float:
        """How long the seat was worked on: until the last token."""
        return min(self.last_token_s, self.end_s) - self.begin_s


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
    from matplotlib.ticker import MaxNLocator

    columns = result.requests
    order = np.argsort(columns["arrival_ns"], kind="stable")[:max_requests]
    start_ns = int(columns["arrival_ns"].min())
    preempted = _preempted_spans(result, start_ns)
    answered = completed(columns)
    seen: set[str] = set()
    with house_style():
        figure = new_figure(8.4, 1.3 + 0.16 * len(order))
        axes = figure.subplots()
        for line, i in enumerate(order):
            for phase, begin, end in zip(_COLORS, _MARKS, _MARKS[1:], strict=False):
                span = [(int(columns[name][i]) - start_ns) / _NS_PER_S for name in (begin, end)]
                if columns[end][i] < 0:
                    break
                axes.barh(line, span[1] - span[0], left=span[0], height=0.72, color=_COLORS[phase])
                seen.add(phase)
            for begin_s, end_s in preempted.get(int(columns["id"][i]), []):
                axes.barh(
                    line, end_s - begin_s, left=begin_s, height=0.72, color=_COLORS["preempted"],
                    edgecolor=_DARK, hatch="/////", linewidth=0,
                )  # fmt: skip
                seen.add("preempted")
            if not answered[i]:
                arrival_s = (int(columns["arrival_ns"][i]) - start_ns) / _NS_PER_S
                axes.plot(arrival_s, line, "x", color=_DARK)
                seen.add(_UNANSWERED)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylabel("request, by arrival")
        axes.set_xlabel("time since the first arrival (s)")
        total = len(columns["id"])
        part = f" (first {len(order)} of {total} requests)" if total > len(order) else ""
        _legend(axes, seen)
        title_in_lines(axes, title + part, over_legend=True)
    return figure


def batching(results: Mapping[str, RunResult], title: str) -> Figure:
    """Draw who sat in which seat of the batch: static against continuous batching at a glance.

    Parameters
    ----------
    results : mapping of str to RunResult
        Label to a small run (some tens of requests), all of the same requests.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        A panel a run over a common time axis, a row a seat, a bar a request with its number.
        Hatched is a seat whose request has all its tokens but has to wait for the others of its
        batch; empty is a seat that nobody has. Each panel says how much of all seats' time was
        worked on until the last request finished.
    """
    stays = {label: seats(result) for label, result in results.items()}
    heights = [max((stay.seat for stay in found), default=0) + 1 for found in stays.values()]
    last_s = max((stay.end_s for found in stays.values() for stay in found), default=1.0)
    with house_style():
        figure = new_figure(8.4, 0.9 + sum(0.5 + 0.21 * height for height in heights))
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, height_ratios=heights
        )[:, 0]
        for axes, (label, found), height in zip(panels, stays.items(), heights, strict=True):
            _draw_seats(axes, found, last_s)
            end_s = max((stay.end_s for stay in found), default=0.0)
            used_s = sum(stay.used_s for stay in found)
            share = used_s / (height * end_s) if end_s else 0.0
            axes.axvline(end_s, color=GREY, linewidth=0.9, linestyle=(0, (3, 2)))
            axes.set_ylim(height - 0.4, -0.6)
            axes.set_xlim(0, last_s * 1.01)
            axes.set_ylabel("seat")
            axes.set_yticks([])
            axes.grid(visible=False, axis="y")
            axes.set_title(f"{label}: done after {end_s:.3g} s, seats in use {share:.0%}")
        panels[-1].set_xlabel("time since the first arrival (s)")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        waits = any(
            stay.used_s < stay.end_s - stay.begin_s for found in stays.values() for stay in found
        )
        _legend(panels[0], {"prefill", "decode", *([_HELD] if waits else [])})
    return figure


def seats(result: RunResult) -> list[Stay]:
    """Return which request sat in which seat of the batch, and when.

    Parameters
    ----------
    result : RunResult
        The run.

    Returns
    -------
    list of Stay
        In order of time. The engine does not number its seats: each request is given the lowest
        that is free, so there are as many as requests ran at once.
    """
    columns = {
        name: result.requests[name].astype(np.int64) for name in ("id", "last_token_ns", *_MARKS)
    }
    start_ns = int(columns["arrival_ns"].min())
    away = _preempted_spans(result, start_ns)
    visits = []
    for i in np.flatnonzero(completed(result.requests)).tolist():
        begin_s, first_s, end_s, last_s = (
            (int(columns[name][i]) - start_ns) / _NS_PER_S
            for name in (*_MARKS[1:], "last_token_ns")
        )
        number = int(columns["id"][i])
        for evicted_s, resumed_s in away.get(number, []):
            visits.append((begin_s, number, first_s, last_s, evicted_s))
            begin_s = resumed_s
        visits.append((begin_s, number, first_s, last_s, end_s))
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    found = []
    for begin_s, number, first_s, last_s, end_s in sorted(visits):
        while taken and taken[0][0] <= begin_s:
            heapq.heappush(free, heapq.heappop(taken)[1])
        seat = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (end_s, seat))
        found.append(Stay(seat, number, begin_s, first_s, last_s, end_s))
    return found


def _draw_seats(axes: Axes, found: Iterable[Stay], last_s: float) -> None:
    for stay in found:
        token_s = min(max(stay.first_token_s, stay.begin_s), stay.end_s)
        idle_s = stay.begin_s + stay.used_s
        for phase, begin_s, end_s in (
            ("prefill", stay.begin_s, token_s),
            ("decode", token_s, idle_s),
        ):
            axes.barh(stay.seat, end_s - begin_s, left=begin_s, height=0.86, color=_COLORS[phase])
        axes.barh(
            stay.seat, stay.end_s - idle_s, left=idle_s, height=0.86, color="white",
            edgecolor=_COLORS[_HELD], hatch="////", linewidth=0,
        )  # fmt: skip
        # A white edge tells two requests in a row from each other, in grey too.
        axes.barh(
            stay.seat, stay.end_s - stay.begin_s, left=stay.begin_s, height=0.86,
            facecolor="none", edgecolor="white", linewidth=0.8,
        )  # fmt: skip
        if stay.used_s > 0.03 * last_s:
            axes.text(
                stay.begin_s + stay.used_s / 2, stay.seat, str(stay.request_id), fontsize=6.5,
                ha="center", va="center", color="#222222",
            )  # fmt: skip


def _legend(axes: Axes, seen: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hatched = {"preempted": (_DARK, "/////"), _HELD: (_COLORS[_HELD], "////")}
    handles: list[Artist] = []
    for phase, color in _COLORS.items():
        if phase in hatched and phase in seen:
            edge, hatch = hatched[phase]
            handles.append(
                Patch(facecolor="white", edgecolor=edge, hatch=hatch, linewidth=0, label=phase)
            )
        elif phase in seen:
            handles.append(Patch(facecolor=color, linewidth=0, label=phase))
    num_columns = 4
    if _UNANSWERED in seen:
        num_columns += 1
        handles.append(Line2D([], [], marker="x", color=_DARK, linestyle="", label=_UNANSWERED))
    axes.legend(handles=handles, loc="lower right", ncols=num_columns, bbox_to_anchor=(1.0, 0.99))


def _preempted_spans(result: RunResult, start_ns: int) -> dict[int, list[tuple[float, float]]]:
    """Return (begin, end) in seconds of each eviction to its resumption, by request id."""
    log = result.log.preemptions()
    rows = [log[name].astype(np.int64).tolist() for name in ("id", "evicted_ns", "resumed_ns")]
    spans: dict[int, list[tuple[float, float]]] = {}
    for number, evicted_ns, resumed_ns in zip(*rows, strict=True):
        if resumed_ns >= 0:
            span = ((evicted_ns - start_ns) / _NS_PER_S, (resumed_ns - start_ns) / _NS_PER_S)
            spans.setdefault(number, []).append(span)
    return spans
