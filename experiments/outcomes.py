"""What the functions of `schedlab.experiments.facade` return: tables that show themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.analysis.frontier import on_frontier
from schedlab.experiments.analysis.policy_comparison import (
    METRICS,
    PolicyChange,
    compare_policies,
    left_out,
)
from schedlab.experiments.figures.accessor import Plots, Shown
from schedlab.experiments.results.saved_results import SavedResults
from schedlab.experiments.results.tables import Row, notes, result_table
from schedlab.experiments.results.text_table import html_table, text_table
from schedlab.sim.errors import SchedlabError, SpecError
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.text import json_number, number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.experiments.search.find import Found
    from schedlab.experiments.specification.experiment import ExperimentSpec
    from schedlab.sim.result import RunResult

DataFrame = Any
"""A pandas.DataFrame; pandas need not be installed."""


class _Shown:
    """Something that shows itself as a table: in a terminal as text, in a notebook as HTML."""

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        """Return title, header, rows, number of key columns, and lines below."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, header, rows, num_keys, lines = self._table()
        return "\n".join([text_table(title, header, rows, 120, num_keys), "", *lines]).rstrip()

    def _repr_html_(self) -> str:
        title, header, rows, _, lines = self._table()
        return html_table(title, header, rows, lines)


@dataclass(repr=False)
class Results(_Shown):
    """Finished runs of an experiment.

    Attributes
    ----------
    saved : SavedResults
        What the folder holds.
    """

    saved: SavedResults

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.saved.name

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.saved.folder

    @property
    def rows(self) -> list[Row]:
        """One `Row` a setting: its label, settings, and metrics with intervals."""
        return self.saved.rows

    @cached_property
    def runs(self) -> list[RunResult]:
        """Every run with its requests and steps, replications of a setting side by side."""
        return [point.load() for point in self.saved.runs]

    @property
    def run(self) -> RunResult:
        """The first run."""
        return self.saved.runs[0].load() if "runs" not in self.__dict__ else self.runs[0]

    @property
    def plot(self) -> Plots:
        """Figures: ``results.plot.latency_against_rate()``."""
        return Plots(self.saved)

    def compare(self, *metrics: str, against: str | None = None, key: str = "policy") -> Comparison:
        """Return verdicts; see `compare`."""
        changes = compare_policies(self.saved.runs, metrics or METRICS, against, key)
        return Comparison(changes, left_out(self.saved.runs, against, key))

    def frontier(self, *metrics: str) -> list[Row]:
        """Return the settings that no other one is better than in all of these metrics.

        Raises
        ------
        SpecError
            If a metric does not exist or has no better and worse.
        """
        upwards = [metric_named(metric).larger_is_better for metric in metrics]
        for metric, side in zip(metrics, upwards, strict=True):
            if side is None:
                raise SpecError(f"{metric} is neither better large nor small: it has no frontier")
        values = [[row.mean(metric) for metric in metrics] for row in self.rows]
        best = on_frontier(values, [bool(side) for side in upwards])
        return [row for row, is_best in zip(self.rows, best, strict=True) if is_best]

    def report(self, file: str | Path | None = None) -> Path:
        """Write one HTML page, and return where."""
        from schedlab.experiments.report.page import write_page

        return write_page(self.folder, None if file is None else Path(file))

    def to_frame(self, of: str = "settings") -> DataFrame:
        """Return a pandas DataFrame.

        Parameters
        ----------
        of : {"settings", "runs", "requests", "steps"}
            What a row is: a setting, with ``<metric>_ci95`` beside each metric where there are
            replications; a run; or a request or a step of a run. The rows of runs begin with their
            policy, their settings and ``replication``.

        Raises
        ------
        SchedlabError
            If pandas is not installed.
        """
        pandas = _pandas()
        if of == "settings":
            return pandas.DataFrame([_of_setting(row) for row in self.rows])
        if of not in ("runs", "requests", "steps"):
            raise SpecError(f"to_frame({of!r}): choose from settings, runs, requests, steps")
        keys = [
            {"policy": point.policy, **_numbers(point.settings), "replication": point.replication}
            for point in self.saved.runs
        ]
        if of == "runs":
            return pandas.DataFrame(
                [{**key, **point.metrics} for key, point in zip(keys, self.saved.runs, strict=True)]
            )
        frames = []
        for key, run in zip(keys, self.runs, strict=True):
            frame = pandas.DataFrame(dict(run.requests if of == "requests" else run.log.steps()))
            for i, (name, value) in enumerate(key.items()):
                frame.insert(i, name, value)
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True)

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        table = result_table(self.rows)
        lines = [table.note] if table.note else []
        told = notes(self.saved.cost_models, self.saved.warnings, self.saved.predictors)
        return self.name, table.header, table.rows, table.num_keys, lines + told


@dataclass(repr=False)
class Comparison(_Shown):
    """Verdicts on policies.

    Attributes
    ----------
    changes : list of PolicyChange
        By metric, then setting, then policy.
    left_out : list of str
        What could not be compared, and why.
    """

    changes: list[PolicyChange]
    left_out: Sequence[str] = ()

    def __iter__(self) -> Iterator[PolicyChange]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame, a row a verdict."""
        return _pandas().DataFrame(
            [
                {
                    "setting": one.setting, "metric": one.metric, "of": one.of,
                    "against": one.against, "mean": one.means[0], "mean_against": one.means[1],
                    **one.change._asdict(), "verdict": one.verdict,
                }
                for one in self.changes
            ]
        )  # fmt: skip

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        rows = [(one.setting or "-", one.verdict) for one in self.changes]
        return "", ("setting", "verdict"), rows, 1, [f"left out: {one}" for one in self.left_out]


@dataclass(repr=False)
class Findings(_Shown):
    """Answers of a search, one a setting.

    Attributes
    ----------
    spec : ExperimentSpec
        What was asked.
    found : list of Found
        Answers with all that was tried.
    lines : list of str
        What was asked, how surely, and what is odd.
    """

    spec: ExperimentSpec
    found: list[Found]
    lines: list[str]

    @property
    def key(self) -> str:
        """What was searched."""
        assert self.spec.find is not None
        return self.spec.find.key

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame, a row a setting and seed."""
        return _pandas().DataFrame(
            [
                {
                    "setting": one.label, "replication": i, "bound": one.bound or None,
                    self.key: bracket.value, "breaks_at": bracket.breaks_at,
                }
                for one in self.found
                for i, bracket in enumerate(one.brackets)
            ]
        )  # fmt: skip

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        from schedlab.experiments.search.search_report import find_table

        return "", *find_table(self.spec, self.found), 1, self.lines


@dataclass(repr=False)
class Measurement(_Shown):
    """Runs on a device beside the simulation of them.

    Attributes
    ----------
    data : mapping
        What `schedlab measure` writes into comparison.json.
    """

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of the experiment."""
        return str(self.data["name"])

    @property
    def points(self) -> list[dict[str, Any]]:
        """One a setting: runs, decisions, errors by metric, errors of the cost model by step."""
        return list(self.data["points"])

    @property
    def ranking(self) -> dict[str, dict[str, float | None]]:
        """Kendall's tau of the measured and the simulated order of policies, by load and metric."""
        return dict(self.data["rank_agreement_kendall_tau"])

    def plot(self) -> Shown:
        """Draw the error of the simulation for each metric, policy and load."""
        from schedlab.experiments.figures.interactive import shown
        from schedlab.experiments.figures.plots import measured_against_simulated

        return shown(measured_against_simulated(self.data, self.name))

    def to_frame(self) -> DataFrame:
        """Return a pandas DataFrame, a row a setting and metric."""
        return _pandas().DataFrame(
            [
                {
                    "label": point["label"], "policy": point["policy"], "load": point["load"],
                    **metric,
                }
                for point in self.points
                for metric in point["metrics"]
            ]
        )  # fmt: skip

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        shown = (
            "request_throughput",
            "mean_ttft_ms",
            "p99_ttft_ms",
            "mean_tpot_ms",
            "mean_e2el_ms",
        )
        header = (
            "setting", "decisions", "step error", "step bias",
            *(metric_named(name).label for name in shown),
        )  # fmt: skip
        rows = []
        for point in self.points:
            errors = {metric["metric"]: metric["error"] for metric in point["metrics"]}
            steps = point["cost_error_by_step"]
            rows.append(
                [
                    point["label"], point["decisions"]["same_step_times"],
                    percent(steps["mape"]), percent(steps["bias"], signed=True),
                    *(percent(json_number(errors.get(name)), signed=True) for name in shown),
                ]
            )  # fmt: skip
        lines = ["errors: simulated / measured - 1; decisions: with equal step times"]
        return self.name, header, rows, 1, lines


@dataclass(repr=False)
class Claims(_Shown):
    """What sources say of serving systems, and what came out.

    Attributes
    ----------
    data : mapping
        What `schedlab claims -o` writes into its JSON.
    """

    data: Mapping[str, Any]

    @property
    def experiments(self) -> list[dict[str, Any]]:
        """One a claim: the claim as stated, its figures with readings and verdicts."""
        return list(self.data["experiments"])

    @property
    def verdicts(self) -> Counter[str]:
        """How many figures came to each verdict."""
        return Counter(figure["verdict"] for one in self.experiments for figure in one["figures"])

    def plot(self) -> Iterator[Figure]:
        """Draw the claims, a figure each: a strip a number, with its band and its source."""
        from schedlab.experiments.figures.interactive import shown
        from schedlab.experiments.figures.plots import claim

        # Stills: there is nothing to look closer at, and they are many.
        return (shown(claim(one), still=True) for one in self.experiments)

    def _table(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]], int, list[str]]:
        rows = [
            [one["claim"]["system"], figure["name"], _with_interval(figure), figure["verdict"]]
            for one in self.experiments
            for figure in one["figures"]
        ]
        told = ", ".join(f"{n} {verdict}" for verdict, n in self.verdicts.most_common())
        return "", ("claim", "figure", "measured", "verdict"), rows, 1, [told]


def _with_interval(figure: Mapping[str, Any]) -> str:
    if figure["estimate"] is None:
        return "-"
    ends = ", ".join("-" if end is None else number(end) for end in figure["interval"])
    return f"{number(figure['estimate'])} [{ends}]"


def _of_setting(row: Row) -> dict[str, Any]:
    of: dict[str, Any] = {"label": row.label, "policy": row.policy, **_numbers(row.settings)}
    several = row.num_replications > 1
    for name, (mean, half_width) in row.metrics.items():
        of[name] = mean
        if several:
            of[f"{name}_ci95"] = half_width
    return of


def _numbers(settings: Mapping[str, str]) -> dict[str, float | str]:
    """Return settings with what is a number as one, to plot and sort by."""

    def value(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return {key: value(text) for key, text in settings.items()}


def _pandas() -> Any:  # noqa: ANN401 - a module that may be absent
    try:
        import pandas
    except ImportError:
        raise SchedlabError(
            "to_frame() needs pandas, which is not installed: pip install pandas"
        ) from None
    return pandas
