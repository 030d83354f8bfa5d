"""Figures that somebody asks for: which, of what, under which names, how large, as which files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.analysis.rate_curves import curve_name
from schedlab.experiments.figures import plots
from schedlab.experiments.figures.figures import (
    Drawing,
    drawings,
    first_runs_in_words,
    good_requests_per_usd,
    one_run_in_words,
    shown_load,
)
from schedlab.experiments.figures.heat_map import DEFAULT_METRICS
from schedlab.experiments.figures.lines import lines
from schedlab.experiments.figures.searches import answers, recommended, tried, tuned
from schedlab.experiments.figures.style import paper, save
from schedlab.experiments.results.results_folder import add_to_marker
from schedlab.experiments.results.saved_results import SavedResults, read_results
from schedlab.experiments.results.selection import filtered, merged, num_gpus, relabelled
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError, SpecError, nearest
from schedlab.sim.files import read_json_object

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.sim.result import RunResult

_LATENCIES = ("ttft", "tpot", "e2el", "queue_time")


@dataclass(frozen=True)
class Chosen:
    """What somebody asks a figure to show.

    Attributes
    ----------
    figures : sequence of str
        Names of `FIGURES` or `SEARCHES`; if empty `lines` where a metric, an axis or curves are
        asked for, else all that suit the results.
    metrics : sequence of str
        What to show; of `cdf` a latency.
    x : str or None
        A swept key or a metric along the x axis.
    by : sequence of str
        Swept keys whose values make the curves.
    wanted : mapping of str to sequence of str
        Swept key to the values shown.
    names : mapping of str to str
        A policy or a value to what to call it.
    title : str or None
        Instead of the experiment's name; may be empty.
    """

    figures: Sequence[str] = ()
    metrics: Sequence[str] = ()
    x: str | None = None
    by: Sequence[str] = ()
    wanted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    title: str | None = None


def draw_chosen(
    folders: Sequence[Path],
    chosen: Chosen,
    output: Path | None = None,
    formats: Sequence[str] = ("png", "svg"),
    size: str | None = None,
) -> tuple[list[Path], list[str]]:
    """Draw the figures asked for.

    Parameters
    ----------
    folders : sequence of Path
        Results of runs or sweeps, or one of a search.
    chosen : Chosen
        What is asked for.
    output : Path, optional
        Where to: a folder; the first of `folders` if absent.
    formats : sequence of str
        Of `style.FORMATS`.
    size : str, optional
        Of `style.SIZES`.

    Returns
    -------
    written : list of Path
        The files.
    left_out : list of str
        Which figures nobody asked for by name do not fit the size, and why.

    Raises
    ------
    SchedlabError
        If nothing can be drawn of what is asked for.
    """
    found = _drawings(folders, chosen)
    if not found:
        raise SchedlabError(f"{folders[0]}: one setting and no tables of its run: nothing to draw")
    place = output or folders[0]
    if place.exists() and not place.is_dir():
        raise SpecError(f"{place} is a file; figures are written into a folder")
    written: list[Path] = []
    left_out = []
    with paper(size):
        for drawing in found:
            try:
                figure = drawing.draw()
            except SchedlabError as error:
                if chosen.figures or len(found) == 1:
                    raise type(error)(f"{drawing.name}: {error}") from error
                left_out.append(f"{drawing.name}: {error}")
                continue
            place.mkdir(parents=True, exist_ok=True)  # a refused figure leaves no folder
            written += save(figure, place / drawing.name, formats)
    if output is None:
        add_to_marker(place, [path.name for path in written])
    return written, left_out


def _drawings(folders: Sequence[Path], chosen: Chosen) -> list[Drawing]:
    for name in chosen.figures:
        if name not in (*FIGURES, *SEARCHES):
            latency, is_cdf, _ = name.partition("_cdf")  # as reports and methods call them
            hint = nearest(name, [*FIGURES, *SEARCHES])
            if is_cdf:
                metric = f" --metric {latency}" if latency in _LATENCIES else ""
                hint = f"did you mean cdf{metric}?"
            raise SpecError(f"no figure is called {name!r}; {hint}")
    searched = search_drawings(folders[0], chosen.title)
    asked = [name for name in chosen.figures if name in SEARCHES]
    if searched and not (set(chosen.figures) - set(SEARCHES)):
        if len(folders) > 1:
            raise SpecError(f"{folders[0]} is of a search: give one such folder")
        for name in asked:
            if name not in [one.name for one in searched]:
                raise SpecError(f"{folders[0]} has no {SEARCHES[name].file} for {name}")
        return [one for one in searched if not asked or one.name in asked]
    if asked:
        raise SpecError(f"{folders[0]} is of no search: {asked[0]} shows what find and tune did")
    results = merged([read_results(folder) for folder in folders])
    results = relabelled(filtered(results, chosen.wanted), chosen.names)
    asks = bool(chosen.metrics or chosen.x or chosen.by)
    names = list(chosen.figures) or (["lines"] if asks else [])
    title = results.name if chosen.title is None else chosen.title
    if not names:
        return drawings(results, title)
    for name in names:
        _check_options(name, chosen)
    return [
        Drawing(name, FIGURES[name].caption, _bound(FIGURES[name].draw, results, title, chosen))
        for name in names
    ]


def _check_options(name: str, chosen: Chosen) -> None:
    takes = FIGURES[name].takes
    for option, value in (("metric", chosen.metrics), ("x", chosen.x), ("by", chosen.by)):
        if value and option not in takes:
            raise SpecError(f"--figure {name} takes no --{option}; --figure lines takes any")


Draw = Callable[[SavedResults, str, Chosen], "Figure"]


@dataclass(frozen=True)
class _Kind:
    """A figure that can be asked for by name; `takes` are the options it minds."""

    caption: str
    draw: Draw
    takes: tuple[str, ...] = ()


def _bound(draw: Draw, results: SavedResults, title: str, chosen: Chosen) -> Callable[[], Figure]:
    return lambda: draw(results, title, chosen)


def _metrics(chosen: Chosen) -> Sequence[str]:
    return chosen.metrics or ("p99_ttft_ms", "p99_tpot_ms")


def _pareto(results: SavedResults, title: str, chosen: Chosen) -> Figure:
    if len(chosen.metrics) > 1:
        raise SpecError("pareto shows one --metric against one --x")
    metric = chosen.metrics[0] if chosen.metrics else "p99_ttft_ms"
    return plots.pareto(results.rows, title, chosen.x or "output_throughput", metric)


def _gpu_frontier(results: SavedResults, title: str, _: Chosen) -> Figure:
    gpus = [num_gpus(results.of(row)[0]) for row in results.rows]
    return plots.gpu_frontier(results.rows, title, gpus)


def _at_one_load(results: SavedResults, title: str) -> tuple[list[Row], str]:
    rows, load = shown_load(results.rows)
    return rows, f"{title} {load}".strip() if title else ""


def _heat_map(results: SavedResults, title: str, chosen: Chosen) -> Figure:
    rows, title = _at_one_load(results, title)
    return plots.heat_map(rows, title, chosen.metrics or DEFAULT_METRICS)


def _cdf(results: SavedResults, title: str, chosen: Chosen) -> Figure:
    metric = chosen.metrics[0] if chosen.metrics else "ttft"
    if len(chosen.metrics) > 1 or metric not in _LATENCIES:
        raise SpecError(f"cdf takes one --metric; {nearest(metric, _LATENCIES)}")
    if chosen.title is None:
        rows, load = shown_load(results.rows)
        title = first_runs_in_words(results, rows, title, load)
    else:
        rows, title = _at_one_load(results, title)
    return plots.latency_cdf(
        {curve_name(row): results.of(row)[0].load() for row in rows}, title, metric
    )


def _goodput_per_dollar(results: SavedResults, title: str, _: Chosen) -> Figure:
    rows, title = _at_one_load(results, title)
    return plots.goodput_per_dollar(good_requests_per_usd(results, rows), title)


def _one_run(results: SavedResults, title: str, chosen: Chosen) -> tuple[RunResult, str]:
    """Return the run that is shown and what to write above it: which it is, unless told what."""
    if len(results.rows) > 1:
        raise SpecError(
            f"shows one run, and here are {len(results.rows)} settings: --filter one of them"
        )
    if chosen.title is None:
        title = f"{title} ({one_run_in_words(results, results.rows[0])})"
    return results.runs[0].load(), title


def _shares(results: SavedResults, title: str, chosen: Chosen) -> Figure:
    run, title = _one_run(results, title, chosen)
    return plots.engine_shares(run.observation(), title)


FIGURES: dict[str, _Kind] = {
    "lines": _Kind(
        "Any metric over any swept key or other metric.",
        lambda results, title, chosen: lines(
            results.rows, title, _metrics(chosen), chosen.x, chosen.by
        ),
        ("metric", "x", "by"),
    ),
    "throughput_p99": _Kind(
        "Tail latency against the throughput that was reached.",
        lambda results, title, _: plots.throughput_against_p99(results.rows, title),
    ),
    "latency_rate": _Kind(
        "Tail latency against the rate at which requests arrive.",
        lambda results, title, _: plots.latency_against_rate(results.rows, title),
    ),
    "slo_attainment": _Kind(
        "Share of requests that hold their latency targets.",
        lambda results, title, _: plots.attainment_against_rate(results.rows, title),
    ),
    "pareto": _Kind("Two metrics, and the frontier of both.", _pareto, ("metric", "x")),
    "gpu_frontier": _Kind(
        "Output tokens a second a GPU against those a second a user.", _gpu_frontier
    ),
    "heat_map": _Kind("Settings against metrics, at one load.", _heat_map, ("metric",)),
    "cdf": _Kind("Distribution of a latency over requests, at one load.", _cdf, ("metric",)),
    "time_series": _Kind(
        "Requests and KV memory over the time of one run.",
        lambda *asked: plots.time_series(*_one_run(*asked)),
    ),
    "gantt": _Kind(
        "What happened to each of the first requests of one run.",
        lambda *asked: plots.gantt(*_one_run(*asked)),
    ),
    "engines_over_time": _Kind(
        "Requests and KV memory of every engine of a fleet over time, of one run.",
        lambda *asked: plots.engines_over_time(*_one_run(*asked)),
    ),
    "engine_shares": _Kind(
        "Requests, tokens and time of every engine of a fleet, of one run.",
        _shares,
    ),
    "transfers": _Kind(
        "KV of prompts that went from engine to engine, of one run.",
        lambda *asked: plots.transfers(*_one_run(*asked)),
    ),
    "goodput_per_dollar": _Kind(
        "Requests within their targets for a dollar, at one load.", _goodput_per_dollar
    ),
}
"""Figures of runs and sweeps, by name."""


@dataclass(frozen=True)
class _OfSearch:
    file: str
    caption: str
    draw: Callable[[Mapping[str, Any], str], Figure]


SEARCHES: dict[str, _OfSearch] = {
    "answers": _OfSearch("find.json", "The answer of every setting of a search.", answers),
    "tried": _OfSearch("find.json", "What each value tried gave.", tried),
    "tuned": _OfSearch("tune.json", "Every setting that was tuned over.", tuned),
    "recommended": _OfSearch(
        "recommend.json", "What everything tried serves within the targets.", recommended
    ),
}
"""Figures of searches, by name."""


def search_drawings(folder: Path, title: str | None = None) -> list[Drawing]:
    """Return the figures of what a search wrote into a folder; none if it is of none."""
    return [
        _of_search(name, kind, read_json_object(folder / kind.file), title)
        for name, kind in SEARCHES.items()
        if (folder / kind.file).is_file()
    ]


def _of_search(name: str, kind: _OfSearch, found: Mapping[str, Any], title: str | None) -> Drawing:
    shown = str(found.get("name", "")) if title is None else title
    return Drawing(name, kind.caption, lambda: kind.draw(found, shown))
