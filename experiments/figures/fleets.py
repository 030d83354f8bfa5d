"""What the engines of a fleet did: over time, beside each other, and for the money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedlab.experiments.figures.heat_map import shades
from schedlab.experiments.figures.style import (
    GREY,
    LOOKS,
    house_style,
    looks,
    new_figure,
    note,
    title_in_lines,
)
from schedlab.experiments.figures.timelines import check_ran
from schedlab.experiments.statistics import estimate, with_interval
from schedlab.sim.errors import SchedlabError
from schedlab.sim.record.columns import Column, Columns, Floats, batches, completed, whole_numbers
from schedlab.sim.record.fleet import STILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from schedlab.sim.metrics.observation import Observation
    from schedlab.sim.result import RunResult

_NS_PER_S = 1e9
_NUM_BINS = 160
_MOST_NAMED = 16
_PHASES = {
    "queue and prompt": "#D55E00",
    "waits": "#ECECEC",
    "KV is sent": "#444444",
    "decode": "#7FC1EA",
}
_MARKS = ("arrival_ns", "first_token_ns", "transfer_start_ns", "transfer_end_ns", "finish_ns")


def engines_over_time(result: RunResult, title: str) -> Figure:
    """Draw requests and KV memory of every engine over time, and how uneven they are.

    Parameters
    ----------
    result : RunResult
        A run of a fleet.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels with a row an engine, shaded by its requests (running and waiting) and by the
        share of its KV memory that is held, each the mean over a piece of time; white is where it
        was down. Below, of each kind of engines, requests of the one with the most over the mean of
        those that are up.

    Raises
    ------
    SchedlabError
        If the run is of one engine, or no request was ever scheduled.
    """
    _check_fleet(result)
    check_ran(result)
    start_ns = int(result.requests["arrival_ns"].min())
    end_ns = max(int(some["end_ns"].max()) for some in batches(result.log.steps()) if len(some))
    edges_ns = np.linspace(start_ns, end_ns, _NUM_BINS + 1)
    requests, held = _means(result, edges_ns)
    capacity = np.array([engine.kv_capacity_tokens for engine in result.engines], dtype=float)
    share = 100 * held / capacity[:, None]
    down = _down(result, edges_ns)
    requests[down] = share[down] = np.nan
    edges_s = (edges_ns - start_ns) / _NS_PER_S
    num = result.num_engines
    height = max(0.9, 0.16 * num)
    with house_style():
        figure = new_figure(8.4, 2.6 + 2 * height)
        panels = figure.subplots(3, 1, sharex=True, height_ratios=[height, height, 1.0])
        for axes, values, label in (
            (panels[0], requests, "requests"),
            (panels[1], share, "KV held (%)"),
        ):
            _draw_rows(figure, axes, edges_s, values, label, result)
        middles_s = (edges_s[1:] + edges_s[:-1]) / 2
        pools = _pools(result)
        for pool, look in zip(pools, looks(), strict=False):
            of_pool = [index for index, one in enumerate(result.engines) if one.pool == pool]
            panels[2].plot(
                middles_s, _unevenness(requests[of_pool]), look.line, color=look.color,
                linewidth=1.2, label=pool,
            )  # fmt: skip
        if len(pools) > 1:
            panels[2].legend(loc="lower right", ncols=4, bbox_to_anchor=(1, 1.0), borderaxespad=0)
        panels[2].axhline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (6, 2)))
        panels[2].set_ylim(bottom=0)
        panels[2].set_ylabel("most / mean\nrequests")
        panels[2].set_xlim(0, edges_s[-1])
        panels[2].set_xlabel("time since the first arrival (s)")
        title_in_lines(panels[0], title)
        if down.any():
            note(figure, "white: the engine was not up")
    return figure


def engine_shares(run: Observation, title: str) -> Figure:
    """Draw what each engine had of the requests, of the tokens and of its time.

    Parameters
    ----------
    run : Observation
        What is measured of a run of a fleet.
    title : str
        Name of the experiment.

    Returns
    -------
    matplotlib.figure.Figure
        Three panels with a bar an engine: requests answered there, tokens computed there, and the
        share of the run for which it was busy. Dashed is the mean; the most over it is the
        imbalance that the metrics tell.
    """
    if not run.engines:
        raise SchedlabError("shows a fleet, and here is one engine: give the experiment a cluster")
    names = [engine_name(run, index) for index in range(run.num_engines)]
    num = len(names)
    with house_style():
        figure = new_figure(8.4, 1.4 + 0.2 * min(num, 64))
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (label, values) in zip(panels, of_engines(run).items(), strict=True):
            colors = [LOOKS[_pools(run).index(engine.pool) % len(LOOKS)].color
                      for engine in run.engines]  # fmt: skip
            axes.barh(range(num), values, color=colors, height=0.74)
            mean = float(np.mean(values))
            axes.axvline(mean, color="#222222", linewidth=0.9, linestyle=(0, (6, 2)))
            most = float(np.max(values)) / mean if mean else math.nan
            axes.set_title(f"most / mean {most:.2f}", fontsize=9, fontweight="normal")
            axes.set_xlabel(label)
            axes.locator_params(axis="x", nbins=4)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.grid(visible=False, axis="y")
        if num <= 64:
            panels[0].set_yticks(range(num), names)
        panels[0].set_ylim(num - 0.4, -0.6)
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def transfers(result: RunResult, title: str, max_requests: int = 40) -> Figure:
    """Draw when KV of prompts was sent from engine to engine.

    Parameters
    ----------
    result : RunResult
        A run with engines for prompts and for answers.
    title : str
        Name of the experiment.
    max_requests : int
        So many requests at most, evenly chosen in order of arrival.

    Returns
    -------
    matplotlib.figure.Figure
        A row a request: until its prompt is computed, its wait for room where it goes on (or, if an
        engine died, for its turn to be computed again), its KV on the link, its decode. At the left
        from which engine to which it went.

    Raises
    ------
    SchedlabError
        If nothing was sent.
    """
    columns = result.requests
    if "transfer_end_ns" not in columns:
        raise SchedlabError("no prompt went from engine to engine: there are no transfers to draw")
    sent = np.flatnonzero((whole_numbers(columns, "transfer_end_ns") >= 0) & completed(columns))
    sent = sent[np.argsort(columns["arrival_ns"][sent], kind="stable")]
    chosen = sent[:max_requests]
    start_ns = int(columns["arrival_ns"][chosen].min()) if len(chosen) else 0
    # With a prompt comes the first token, unless the engine that goes on gives it.
    told = {"first_token_ns": "prefill_end_ns"} if "prefill_end_ns" in columns else {}
    times_s = {
        name: (whole_numbers(columns, told.get(name, name))[chosen] - start_ns) / _NS_PER_S
        for name in _MARKS
    }
    # Layer by layer KV is sent before the prompt is computed: then it waits for nothing.
    times_s["first_token_ns"] = np.minimum(times_s["first_token_ns"], times_s["transfer_start_ns"])
    with house_style():
        figure = new_figure(8.4, 1.6 + 0.16 * len(chosen))
        axes = figure.subplots()
        for (phase, color), begin, end in zip(_PHASES.items(), _MARKS, _MARKS[1:], strict=False):
            axes.barh(
                range(len(chosen)), times_s[end] - times_s[begin], left=times_s[begin],
                height=0.74, color=color, label=phase,
            )  # fmt: skip
        axes.plot(
            times_s["transfer_start_ns"], range(len(chosen)), "|", color="#222222", markersize=5
        )
        going = zip(
            columns["prefill_engine"][chosen].tolist(), columns["engine"][chosen].tolist(),
            strict=True,
        )  # fmt: skip
        axes.set_yticks(range(len(chosen)), [f"{a} → {b}" for a, b in going], fontsize=6.5)
        axes.set_ylim(len(chosen) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylabel("engines")
        axes.set_xlabel("time since the first arrival (s)")
        part = f" (first {len(chosen)} of {len(sent)} requests)" if len(sent) > len(chosen) else ""
        title_in_lines(axes, title + part)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        took_ms = (
            whole_numbers(columns, "transfer_end_ns") - whole_numbers(columns, "transfer_start_ns")
        )[sent] / 1e6
        middle, tail = np.quantile(took_ms, [0.5, 0.99])
        note(
            figure,
            f"on the link: median {middle:.2f} ms, P99 {tail:.2f} ms; a tick is where it began",
        )
    return figure


def goodput_per_dollar(goods: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Draw how many good requests each setting serves for a dollar.

    Parameters
    ----------
    goods : mapping of str to sequence of float
        Setting to good requests / USD, one a replication.
    title : str
        Above it.

    Returns
    -------
    matplotlib.figure.Figure
        A bar a setting, with its 95 % interval where there are replications.
    """
    known = {name: values for name, values in goods.items() if np.isfinite(values).all()}
    if not known:
        raise SchedlabError(
            "no setting has good requests and a price: give the experiment a cluster with a "
            "hardware that has a price, and targets (slo)"
        )
    with house_style():
        figure = new_figure(7.2, 1.3 + 0.3 * len(known))
        axes = figure.subplots()
        for line, ((_, values), look) in enumerate(zip(known.items(), looks(), strict=False)):
            mean, half = estimate(list(values))
            axes.barh(line, mean, height=0.66, color=look.color)
            if half:
                axes.plot([mean - half, mean + half], [line, line], "-", color="#222222")
            axes.text(mean + (half or 0.0), line, f"  {with_interval(mean, half)}", va="center",
                      fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(known)), list(known))
        axes.set_ylim(len(known) - 0.4, -0.6)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.16)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("requests within their targets for a dollar")
        axes.set_title(title)
        if any(len(values) > 1 for values in known.values()):
            note(figure, "lines: 95 % confidence intervals over replications")
    return figure


def of_engines(run: Observation) -> dict[str, Floats]:
    """Return what each engine had: requests answered, tokens computed, percent of time busy."""
    num = run.num_engines
    tokens = np.zeros(num)
    for some in batches(run.steps):
        engine = whole_numbers(some, "engine")
        computed = whole_numbers(some, "num_decodes") + whole_numbers(some, "prefill_tokens")
        tokens += np.bincount(engine, weights=computed, minlength=num)
    requests = np.bincount(whole_numbers(run.requests, "engine"), minlength=num)
    return {
        "requests answered": requests.astype(float),
        "tokens computed": tokens,
        "busy (% of the run)": 100 * run.engine_busy_ns / _NS_PER_S / (run.duration_s or math.nan),
    }


def engine_name(run: Observation | RunResult, index: int) -> str:
    """Return what to call an engine: its number, and its kind where there are several."""
    pool = run.engines[index].pool
    return f"{index} {pool}" if len(_pools(run)) > 1 else str(index)


def _pools(run: Observation | RunResult) -> list[str]:
    return list(dict.fromkeys(engine.pool for engine in run.engines))


def _check_fleet(result: RunResult) -> None:
    if not result.engines:
        raise SchedlabError("shows a fleet, and here is one engine: give the experiment a cluster")


def _draw_rows(
    figure: Figure, axes: Axes, edges_s: Floats, values: Floats, label: str, result: RunResult
) -> None:
    """Shade a row an engine by its values."""
    num = len(values)
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=shades(), vmin=0, aspect="auto",
        interpolation="nearest", extent=(edges_s[0], edges_s[-1], num - 0.5, -0.5),
    )  # fmt: skip
    if num <= _MOST_NAMED:
        axes.set_yticks(range(num), [engine_name(result, index) for index in range(num)])
    axes.set_ylabel("engine")
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.outline.set_visible(False)


def _unevenness(requests: Floats) -> Floats:
    """Return the most over the mean in each piece of time; NaN where nothing is there."""
    there = np.nan_to_num(requests)
    up = np.maximum(np.count_nonzero(~np.isnan(requests), axis=0), 1)
    mean = there.sum(axis=0) / up
    uneven: Floats = np.full(len(mean), np.nan)
    np.divide(there.max(axis=0), mean, out=uneven, where=mean > 0)
    return uneven


def _means(result: RunResult, edges_ns: Floats) -> tuple[Floats, Floats]:
    """Return requests and held KV tokens of each engine, means over pieces of time.

    A step counts for as long as it takes; between steps nothing is there.
    """
    found = np.zeros((2, result.num_engines, len(edges_ns) - 1))
    for some in batches(result.log.steps()):
        engine = whole_numbers(some, "engine")
        rows: list[Column] = [
            some["num_running"].astype(float) + some["num_waiting"].astype(float),
            some["kv_allocated_tokens"].astype(float),
        ]
        for index in np.unique(engine).tolist():
            there = engine == index
            for i, values in enumerate(rows):
                found[i, index] += _integral(some, there, values, edges_ns)
    found /= np.diff(edges_ns)
    return found[0], found[1]


def _integral(steps: Columns, there: Column, values: Column, edges_ns: Floats) -> Floats:
    """Return the values of one engine's steps times their length, by piece of time."""
    knots = np.stack(
        [whole_numbers(steps, name)[there] for name in ("start_ns", "end_ns")], axis=1
    ).astype(float)
    grown = np.cumsum(values[there] * (knots[:, 1] - knots[:, 0]))
    heights = np.stack([np.concatenate([[0.0], grown[:-1]]), grown], axis=1)
    return np.diff(np.interp(edges_ns, knots.ravel(), heights.ravel()))


def _down(result: RunResult, edges_ns: Floats) -> np.ndarray:
    """Say of each engine in which pieces of time it was not up at their middle."""
    middles_ns = (edges_ns[1:] + edges_ns[:-1]) / 2
    down = np.zeros((result.num_engines, len(middles_ns)), dtype=bool)
    for index, engine in enumerate(result.engines):
        if not engine.served:
            continue
        down[index] = True
        for from_ns, until_ns in engine.served:
            last_ns = math.inf if until_ns == STILL else until_ns
            down[index] &= ~((middles_ns >= from_ns) & (middles_ns < last_ns))
    return down
