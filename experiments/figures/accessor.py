"""Figures of results as methods: ``results.plot.latency_against_rate()``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from schedlab.experiments.figures import plots
from schedlab.experiments.figures.figures import (
    first_runs_in_words,
    good_requests_per_usd,
    in_title,
    seed_in_words,
    shown_load,
)
from schedlab.experiments.figures.heat_map import DEFAULT_METRICS
from schedlab.experiments.figures.interactive import shown
from schedlab.experiments.results.saved_results import SavedResults
from schedlab.experiments.results.selection import num_gpus
from schedlab.experiments.results.tables import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.sim.result import RunResult


Shown = Any
"""A plotly.graph_objects.Figure, or a matplotlib.figure.Figure."""


class Plots:
    """Figures of some results: Plotly's in a notebook where it is installed, else matplotlib's.

    Parameters
    ----------
    results : SavedResults
        What to draw. Figures that set settings side by side are of the highest request rate that
        not every setting is saturated at, unless `rate` names another.
    still : bool
        Whether they are matplotlib's everywhere.
    """

    def __init__(self, results: SavedResults, still: bool = False) -> None:
        self._results = results
        self._still = still

    def __getattr__(self, name: str) -> Never:
        from schedlab.sim.errors import nearest

        known = [one for one in dir(type(self)) if not one.startswith("_")]
        hint = f"; {nearest(name, known)}" if not name.startswith("_") else ""
        raise AttributeError(f"no figure is called {name!r} here{hint}", name=name, obj=self)

    @property
    def matplotlib(self) -> Plots:
        """The same as matplotlib figures everywhere: to be changed, or saved as files."""
        return Plots(self._results, still=True)

    def throughput_against_p99(
        self, metrics: tuple[str, str] = ("ttft", "tpot"), highlight: Sequence[str] | None = None
    ) -> Shown:
        """Draw P99 latencies over achieved throughput."""
        return self._shown(
            plots.throughput_against_p99(self._rows, self._results.name, metrics, highlight)
        )

    def latency_against_rate(
        self, metrics: tuple[str, str] = ("ttft", "tpot"), highlight: Sequence[str] | None = None
    ) -> Shown:
        """Draw P99 latencies over the request rate."""
        return self._shown(
            plots.latency_against_rate(self._rows, self._results.name, metrics, highlight)
        )

    def attainment_against_rate(
        self,
        metric: str = "slo_attainment",
        target: float = 0.9,
        highlight: Sequence[str] | None = None,
    ) -> Shown:
        """Draw the share of requests within their targets over the request rate."""
        return self._shown(
            plots.attainment_against_rate(self._rows, self._results.name, metric, target, highlight)
        )

    def pareto(self, x: str = "output_throughput", y: str = "p99_ttft_ms") -> Shown:
        """Draw all settings by two metrics, with those that no other beats."""
        return self._shown(plots.pareto(self._rows, self._results.name, x, y))

    def gpu_frontier(self) -> Shown:
        """Draw output tokens a second of a GPU against those that a user sees."""
        gpus = [num_gpus(self._results.of(row)[0]) for row in self._rows]
        return self._shown(plots.gpu_frontier(self._rows, self._results.name, gpus))

    def lines(self, *metrics: str, x: str | None = None, by: Sequence[str] = ()) -> Shown:
        """Draw metrics over a swept key or over another metric, a curve a setting."""
        return self._shown(
            plots.lines(self._rows, self._results.name, metrics or ("p99_ttft_ms",), x, by)
        )

    def heat_map(
        self, metrics: Sequence[str] = DEFAULT_METRICS, rate: float | None = None
    ) -> Shown:
        """Draw the settings against metrics at one load."""
        rows, title = self._at(rate)
        return self._shown(plots.heat_map(rows, title, metrics))

    def latency_cdf(self, metric: str = "ttft", rate: float | None = None) -> Shown:
        """Draw the distribution of a latency over requests (first replication) at one load."""
        rows, title = self._first_at(rate)
        return self._shown(plots.latency_cdf(self._first(rows), title, metric))

    def slowdown_against_length(self, rate: float | None = None) -> Shown:
        """Draw latencies over those on a server of one's own, by output length, at one load."""
        from schedlab.experiments.analysis.latencies import alone_s
        from schedlab.experiments.specification.loading import load_spec

        rows, title = self._first_at(rate)
        alone = alone_s(load_spec(self._results.of(rows[0])[0].folder / "spec.yaml"))
        return self._shown(plots.slowdown_against_length(self._first(rows), alone, title))

    def predictability(self) -> Shown:
        """Draw how much the latency of one and the same request varies from run to run."""
        runs = {row.label: [p.load() for p in self._results.of(row)] for row in self._rows}
        return self._shown(plots.predictability(runs, self._results.name))

    def time_series(self, setting: str | None = None) -> Shown:
        """Draw requests, memory and preemptions over the time of one run, by a setting's label."""
        label, run = self._one(setting)
        return self._shown(plots.time_series(run, label))

    def gantt(self, setting: str | None = None) -> Shown:
        """Draw what happened to each of the first requests of one run, by a setting's label."""
        label, run = self._one(setting)
        return self._shown(plots.gantt(run, label))

    def batching(self) -> Shown:
        """Draw who sat in which seat of the batch, a panel a setting."""
        title = first_runs_in_words(self._results, self._rows, self._results.name, "")
        return self._shown(plots.batching(self._first(self._rows), title))

    def engines_over_time(self, setting: str | None = None) -> Shown:
        """Draw requests and memory of each engine of a fleet over time, of one run."""
        label, run = self._one(setting)
        return self._shown(plots.engines_over_time(run, label))

    def engine_shares(self, setting: str | None = None) -> Shown:
        """Draw what each engine of a fleet had of requests, tokens and time, of one run."""
        label, run = self._one(setting)
        return self._shown(plots.engine_shares(run.observation(), label))

    def transfers(self, setting: str | None = None) -> Shown:
        """Draw when KV of the first prompts went from engine to engine, of one run."""
        label, run = self._one(setting)
        return self._shown(plots.transfers(run, label))

    def goodput_per_dollar(self, rate: float | None = None) -> Shown:
        """Draw requests within their targets for a dollar, a bar a setting, at one load."""
        rows, title = self._at(rate)
        return self._shown(
            plots.goodput_per_dollar(good_requests_per_usd(self._results, rows), title)
        )

    @property
    def _rows(self) -> list[Row]:
        return self._results.rows

    def _shown(self, figure: Figure) -> Shown:
        return shown(figure, self._still)

    def _at(self, rate: float | None) -> tuple[list[Row], str]:
        rows, load = shown_load(self._rows, rate)
        return rows, f"{self._results.name} {load}".rstrip()

    def _first(self, rows: Sequence[Row]) -> dict[str, RunResult]:
        return {plots.curve_name(row): self._results.of(row)[0].load() for row in rows}

    def _first_at(self, rate: float | None) -> tuple[list[Row], str]:
        rows, load = shown_load(self._rows, rate)
        return rows, first_runs_in_words(self._results, rows, self._results.name, load)

    def _one(self, setting: str | None) -> tuple[str, RunResult]:
        from schedlab.sim.errors import SpecError, nearest

        labels = {point.label: point for point in reversed(self._results.runs)}
        if setting is not None and setting not in labels:
            raise SpecError(f"no setting is called {setting!r} here; {nearest(setting, labels)}")
        point = self._results.runs[0] if setting is None else labels[setting]
        alike = [run for run in self._results.runs if run.label == point.label]
        return in_title(point.label, seed_in_words(alike)), point.load()
