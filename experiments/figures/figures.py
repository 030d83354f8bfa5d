"""The figures of a results folder that is already there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from schedlab.experiments.analysis.frontier import on_frontier
from schedlab.experiments.analysis.rate_curves import curves, rate, setting_name
from schedlab.experiments.figures import plots
from schedlab.experiments.figures.style import save
from schedlab.experiments.figures.timelines import ran
from schedlab.experiments.results.point_folder import PointMetrics
from schedlab.experiments.results.saved_results import SavedResults
from schedlab.experiments.results.selection import num_gpus
from schedlab.experiments.results.tables import Row
from schedlab.sim.errors import SchedlabError
from schedlab.sim.record.columns import completed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CURVES = 8
_MOST_LINES = 60


class Drawing(NamedTuple):
    """A figure of a results folder.

    Attributes
    ----------
    name : str
        For a file.
    caption : str
        What to see in it, in a sentence or two.
    draw : callable
        Draws it.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]


def draw_throughput(results: SavedResults) -> None:
    """Draw throughput against tail latency into the folder, where a request rate is swept."""
    if _sweeps_rate(results.rows):
        save(
            plots.throughput_against_p99(results.rows, results.name),
            results.folder / "throughput_p99",
        )


def drawings(results: SavedResults, title: str | None = None) -> list[Drawing]:
    """Return the figures that suit results.

    Parameters
    ----------
    results : SavedResults
        A results folder.
    title : str, optional
        Above them; the experiment's name if absent.

    Returns
    -------
    list of Drawing
        Over a swept request rate: throughput and rate against P99 latency, attainment if there
        are targets. For several settings: the frontier, a heat map and latency distributions, at
        the `shown_load`. For a single run: latency distributions, time series and the first
        requests. Of fleets those of `fleet_drawings` as well.
    """
    if title is not None:
        results = replace(results, name=title)
    rows = results.rows
    found: list[Drawing] = []
    if _sweeps_rate(rows):
        found += _over_rates(results.name, rows)
    if len(rows) > 1:
        found += _between_settings(results)
    elif results.runs:
        found += _of_one_run(results)
    return found + fleet_drawings(results)


def fleet_drawings(results: SavedResults) -> list[Drawing]:
    """Return the figures of what the engines of a fleet did; none of a single engine.

    Parameters
    ----------
    results : SavedResults
        A results folder.

    Returns
    -------
    list of Drawing
        Of one run: each engine over time, what each had, and KV that was sent. Of several
        settings: good requests for a dollar, at the `shown_load`.
    """
    if len(results.rows) > 1:
        rows, load = shown_load(results.rows)
        goods = good_requests_per_usd(results, rows)
        if not any(map(math.isfinite, (value for values in goods.values() for value in values))):
            return []
        title = f"{results.name} {load}".rstrip()
        return [
            Drawing(
                "goodput_per_dollar",
                "Requests within their targets for a dollar of GPU hours.",
                lambda: plots.goodput_per_dollar(goods, title),
            )
        ]
    return list(_of_one_fleet(results)) if results.runs else []


def good_requests_per_usd(results: SavedResults, rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return good requests / cost of the run of each setting, one number a replication."""
    found: dict[str, list[float]] = {}
    for row in rows:
        metrics = [run.head()["metrics"] for run in results.of(row)]
        found[row.label] = [_ratio(one.get("num_slo_met"), one.get("cost_usd")) for one in metrics]
    return {name: values for name, values in found.items() if values}


def _ratio(good: float | None, usd: float | None) -> float:
    return good / usd if good is not None and usd else math.nan


def shown_load(rows: Sequence[Row], asked: float | None = None) -> tuple[list[Row], str]:
    """Return the rows to set side by side, and what they have in common in words.

    Parameters
    ----------
    rows : sequence of Row
        Settings, perhaps at several request rates.
    asked : float, optional
        A rate that is swept.

    Returns
    -------
    rows : list of Row
        Those at the rate asked for, else those at the highest rate that not every setting is
        saturated at, or at the lowest of all if there is none; all if no rate is swept.
    load : str
        For a title; empty if no rate is swept.

    Raises
    ------
    SchedlabError
        If the rate asked for is not swept.
    """
    if not _sweeps_rate(rows) and asked is None:
        return list(rows), ""
    loads = _by_load(rows)
    open_loads = [
        load for load, there in loads.items()
        if math.isfinite(load) and not all(plots.is_saturated(row) for row in there)
    ]  # fmt: skip
    load = max(open_loads, default=min(loads)) if asked is None else asked
    if load not in loads:
        raise SchedlabError(
            f"no run at a rate of {load:g}; choose from {', '.join(f'{one:g}' for one in loads)}"
        )
    return loads[load], _load_in_words(loads[load][0])


def all_loads(rows: Sequence[Row]) -> list[tuple[list[Row], str]]:
    """Return the rows of each request rate, as `shown_load` does those of one."""
    if not _sweeps_rate(rows):
        return [(list(rows), "")]
    return [(there, _load_in_words(there[0])) for there in _by_load(rows).values()]


def seed_in_words(replications: Sequence[PointMetrics]) -> str:
    """Return for a title which of the replications is shown, the first; nothing if one is there."""
    if len(replications) < 2:
        return ""
    seed = replications[0].head().get("provenance", {}).get("seed", replications[0].replication)
    return f"seed {seed}, first of {len(replications)}"


def one_run_in_words(results: SavedResults, row: Row) -> str:
    """Return for a title the setting and the seed of its first run."""
    return in_title(setting_name(row), seed_in_words(results.of(row)))


def first_runs_in_words(results: SavedResults, rows: Sequence[Row], title: str, load: str) -> str:
    """Return a title of the first runs of some settings at one load, or of one."""
    if len(rows) == 1:
        return f"{title} ({one_run_in_words(results, rows[0])})"
    return in_title(f"{title} {load}".rstrip(), seed_in_words(results.of(rows[0])))


def in_title(*parts: str) -> str:
    """Return the parts of a title that are there."""
    return ", ".join(filter(None, parts))


def _by_load(rows: Sequence[Row]) -> dict[float, list[Row]]:
    loads: dict[float, list[Row]] = {}
    for row in rows:
        loads.setdefault(rate(row), []).append(row)
    return loads


def _load_in_words(row: Row) -> str:
    key = next(key for key in plots.RATE_KEYS if key in row.settings)
    unit = "times the trace's rate" if key.endswith("rate_scale") else "requests/s"
    return f"at {row.settings[key]} {unit}"


def _sweeps_rate(rows: Sequence[Row]) -> bool:
    return any(
        len({row.settings[key] for row in rows if key in row.settings}) > 1
        for key in plots.RATE_KEYS
    )


def _over_rates(name: str, rows: Sequence[Row]) -> Iterator[Drawing]:
    drawn = [row for row in rows if math.isfinite(rate(row))]
    front = _in_front(drawn)
    yield Drawing(
        "throughput_p99",
        "Tail latency against the throughput that was reached. Lower and further right is better.",
        lambda: plots.throughput_against_p99(drawn, name, highlight=front),
    )
    yield Drawing(
        "latency_rate",
        "Tail latency against the rate at which requests arrive.",
        lambda: plots.latency_against_rate(drawn, name, highlight=front),
    )
    if any(math.isfinite(row.mean("slo_attainment")) for row in drawn):
        yield Drawing(
            "slo_attainment",
            "Share of requests that hold all their latency targets.",
            lambda: plots.attainment_against_rate(drawn, name, highlight=front),
        )


def _between_settings(results: SavedResults) -> Iterator[Drawing]:
    rows = results.rows
    answered = any(math.isfinite(row.mean("p99_ttft_ms")) for row in rows)
    if answered:
        yield Drawing(
            "pareto",
            "All settings by output throughput and tail latency, with those that no other beats.",
            lambda: plots.pareto(rows, results.name),
        )
    if _sweeps_rate(rows) and any(row.mean("median_tpot_ms") > 0 for row in rows):
        yield Drawing(
            "gpu_frontier",
            "Output tokens a second of a GPU against those that a user sees.",
            lambda: plots.gpu_frontier(
                rows, results.name, [num_gpus(results.of(row)[0]) for row in rows]
            ),
        )
    there, load = shown_load(rows)
    title = f"{results.name} {load}".rstrip()
    if 1 < len(there) <= _MOST_LINES:
        where = f" {load[0].upper()}{load[1:]}." if load else ""
        yield Drawing(
            "heat_map",
            f"The settings side by side.{where} Darker is further from the best of the column.",
            lambda: plots.heat_map(there, title),
        )
    front = _in_front(there)
    shown = [row for row in there if front is None or plots.curve_name(row) in front]
    runs = {plots.curve_name(row): results.of(row)[0] for row in shown if results.of(row)}
    if not (runs and answered):
        return
    for metric, words in (("ttft", "time to first token"), ("e2el", "end-to-end latency")):

        def cdf(metric: str = metric) -> Figure:
            return plots.latency_cdf(
                {label: run.load() for label, run in runs.items()},
                first_runs_in_words(results, shown, results.name, load),
                metric,
            )

        yield Drawing(
            f"{metric}_cdf",
            f"Distribution of the {words} over requests (first replication).",
            cdf,
        )


def _of_one_run(results: SavedResults) -> Iterator[Drawing]:
    run = results.runs[0].load()
    title = f"{results.name} ({one_run_in_words(results, results.rows[0])})"
    for metric, words in (("ttft", "time to first token"), ("e2el", "end-to-end latency")):

        def cdf(metric: str = metric) -> Figure:
            return plots.latency_cdf({run.policy: run}, title, metric)

        if completed(run.requests).any():
            yield Drawing(f"{metric}_cdf", f"Distribution of the {words} over requests.", cdf)
    if ran(run):
        yield Drawing(
            "time_series",
            "Requests, KV memory, its waste and preemptions over the time of the run.",
            lambda: plots.time_series(run, title),
        )
    yield Drawing(
        "gantt", "What happened to each of the first requests.", lambda: plots.gantt(run, title)
    )


def _of_one_fleet(results: SavedResults) -> Iterator[Drawing]:
    run = results.runs[0].load()
    title = f"{results.name} ({one_run_in_words(results, results.rows[0])})"
    if not run.engines or not ran(run):
        return
    yield Drawing(
        "engines_over_time",
        "Requests and KV memory of every engine over time, and how uneven requests are.",
        lambda: plots.engines_over_time(run, title),
    )
    yield Drawing(
        "engine_shares",
        "What each engine had of the requests, of the tokens and of its time.",
        lambda: plots.engine_shares(run.observation(), title),
    )
    if "transfer_end_ns" in run.requests:
        yield Drawing(
            "transfers",
            "When KV of the first prompts was sent from engine to engine.",
            lambda: plots.transfers(run, title),
        )


def _in_front(rows: Sequence[Row]) -> list[str] | None:
    """Return which curves to draw in colour: all of a few, else those that are best somewhere."""
    names = list(curves(rows))
    if len(names) <= _MOST_CURVES:
        return None
    found: dict[str, None] = {}
    for metric in ("p99_ttft_ms", "p99_tpot_ms", "mean_e2el_ms"):
        values = [[row.mean("request_throughput"), row.mean(metric)] for row in rows]
        best = on_frontier(values, [True, False])
        found |= dict.fromkeys(
            plots.curve_name(row) for row, is_best in zip(rows, best, strict=True) if is_best
        )
    return list(found)[:_MOST_CURVES]
