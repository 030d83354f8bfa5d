"""What figures and tables say of a small sweep: every curve, bar, cell, remark and verdict."""

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from schedlab.experiments.analysis.by_class import class_table
from schedlab.experiments.analysis.comparison import compare_runs, rank_agreement, step_errors
from schedlab.experiments.analysis.frontier import on_frontier
from schedlab.experiments.analysis.latencies import latencies_s, slowdowns, spread
from schedlab.experiments.analysis.policy_comparison import compare_policies
from schedlab.experiments.analysis.rate_curves import curves, saturated_from
from schedlab.experiments.analysis.run_intervals import run_intervals
from schedlab.experiments.figures import distributions, gantt, plots
from schedlab.experiments.figures import fleets as fleets_drawn
from schedlab.experiments.figures.chosen import FIGURES, SEARCHES, Chosen
from schedlab.experiments.figures.figures import drawings, shown_load
from schedlab.experiments.figures.interactive import traces_and_layout
from schedlab.experiments.outcomes import Results, _of_setting
from schedlab.experiments.report import page
from schedlab.experiments.report.live import live_data
from schedlab.experiments.results.saved_results import SavedResults, read_results
from schedlab.experiments.results.selection import filtered, merged, relabelled
from schedlab.experiments.results.tables import (
    notes,
    result_table,
    summary_csv,
    summary_data,
    warnings,
)
from schedlab.experiments.results.text_table import html_table, text_table
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.experiments.sweeps.sweep_all import run_into
from schedlab.experiments.sweeps.workers import InProcess
from tests.golden.fleets import SlowSteps
from tests.golden.rounding import json_digest, rounded

_SWEEP = {
    "name": "small",
    "cost_model": f"{SlowSteps.__module__}:SlowSteps",
    "replications": 3,
    "slo": {"ttft_ms": 900, "e2el_ms": 9000},
    "engine": {
        "max_model_len": 900, "num_gpu_blocks_override": 130, "max_num_seqs": 5,
        "scheduler_reserve_full_isl": False,
    },
    "workload": {
        "num_requests": 14,
        "prompt_tokens": {"distribution": "uniform", "low": 60, "high": 1000},
        "output_tokens": {"distribution": "uniform", "low": 1, "high": 90},
        "classes": {
            "paying": {"share": 1, "slo": {"ttft_ms": 500, "tpot_ms": 60}, "priority": 1},
            "free": {"share": 1, "prompt_tokens": 200},
        },
    },
    "sweep": {
        "policy": [{"name": "static", "max_batch_size": 4}, "vtc"],
        "workload.request_rate": [0.5, 6],
    },
}  # fmt: skip
_KEPT = TemporaryDirectory(prefix="golden-")


@functools.cache
def results() -> SavedResults:
    """Run the sweep, once a process."""
    folder = Path(_KEPT.name) / "sweep"
    run_into(make_spec(_SWEEP), folder, InProcess())
    return read_results(folder)


def _numbers(values: Any) -> list[Any]:
    """Return numbers to six digits: what eyes see, on any machine."""
    array = np.asarray(values)
    if array.dtype.kind in "fiu":
        return [f"{value:.6g}" for value in array.ravel().tolist()]
    return [str(value) for value in array.ravel().tolist()]


def _lines(csv: str) -> list[str]:
    """Return lines with numbers of eight digits: quantiles differ between releases of SciPy."""
    return re.sub(r"\d+\.\d{7,}", lambda n: f"{float(n[0]):.8g}", csv).splitlines()


def _box(vertices: Any) -> list[list[str]]:
    """Return two corners: how a bar is made of vertices differs between releases."""
    return [_numbers(np.min(vertices, axis=0)), _numbers(np.max(vertices, axis=0))]


_LOOK = (
    "alpha", "zorder", "linewidth", "linewidths", "markersize", "markeredgewidth", "drawstyle",
    "fontsize", "rotation", "ha", "va", "position", "sizes",
)  # fmt: skip
_COLORS = ("color", "edgecolor", "facecolor", "markeredgecolor")


def _look(artist: Artist) -> list[Any]:
    """Return where something stands, how large it is and of what colour."""
    found: list[Any] = [
        [name, _numbers(getattr(artist, f"get_{name}")())]
        for name in _LOOK
        if hasattr(artist, f"get_{name}")
    ]
    found += [
        [name, _numbers(to_rgba_array(getattr(artist, f"get_{name}")()))]
        for name in _COLORS
        if hasattr(artist, f"get_{name}")
    ]
    if isinstance(artist, Annotation):
        found.append([_numbers(artist.xy), _numbers(artist.xyann), str(artist.anncoords)])
    return found


def _looks(axes: Axes) -> list[Any]:
    """Return how a panel looks, beside the data in it."""
    spec = axes.get_subplotspec()
    found: list[Any] = [
        spec and _numbers([*spec.get_geometry(), *spec.get_gridspec().get_width_ratios()]),
        _numbers(axes.get_xlim()), _numbers(axes.get_ylim()), bool(axes.axison),
        [[name, bool(spine.get_visible())] for name, spine in sorted(axes.spines.items())],
    ]  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        locator = axis.get_major_locator()
        ticks = axis.get_tick_params()
        found.append([type(locator).__name__, type(axis.get_major_formatter()).__name__])
        found.append([str(ticks.get(name)) for name in ("gridOn", "labelsize", "labelcolor")])
        if isinstance(locator, FixedLocator):
            found.append([_numbers(locator.locs), axis.get_major_formatter().format_ticks([0, 1])])
    drawn = (axes.lines, axes.patches, axes.collections, axes.texts)
    found += [[_look(artist) for artist in some] for some in drawn]
    if legend := axes.get_legend():
        found.append([str(legend._loc), int(legend._ncols), *map(_look, legend.get_texts()[:1])])
    return found


def seen(figure: Figure) -> dict[str, Any]:
    """Return what a figure shows: words as they are, numbers few or as a digest."""
    found: dict[str, Any] = {
        "size": _numbers(figure.get_size_inches()),
        "words look": json_digest(
            [_look(text) for text in (*figure.texts, figure._suptitle) if text]
        ),
        "words": [text.get_text() for text in (*figure.texts, figure._suptitle) if text],
        "legends": [[t.get_text() for t in one.get_texts()] for one in figure.legends],
    }
    for number, axes in enumerate(figure.axes):
        lines = [
            [line.get_label().lstrip("_child0123456789"), line.get_linestyle(), line.get_marker(),
             str(line.get_color()), str(line.get_markerfacecolor()),
             _numbers(line.get_xdata()), _numbers(line.get_ydata())]
            for line in axes.lines
        ]  # fmt: skip
        bars = [
            [*_box(patch.get_patch_transform().transform(patch.get_path().vertices)),
             str(patch.get_facecolor()), patch.get_hatch()]
            for patch in axes.patches
        ]  # fmt: skip
        areas = [
            _numbers(one.get_offsets())
            if isinstance(one, PathCollection)
            else [sorted({tuple(_numbers(v)) for v in path.vertices}) for path in one.get_paths()]
            for one in axes.collections
        ]
        legend = axes.get_legend()
        found[f"axes {number}"] = {
            "titles": [axes.get_title(loc=side) for side in ("left", "center")],
            "labels": [axes.get_xlabel(), axes.get_ylabel()],
            "scales": [axes.get_xscale(), axes.get_yscale()],
            "texts": [
                text.get_text() + " (bold)" * (text.get_fontweight() == "bold")
                for text in axes.texts
            ],
            "legend": [t.get_text() for t in legend.get_texts()] if legend else [],
            "ticks": [t.get_text() for t in axes.get_yticklabels()] * bool(axes.images),
            "num": [len(lines), len(bars), len(areas)],
            "looks": json_digest(_looks(axes)),
            "lines": json_digest(lines),
            "bars": json_digest(bars),
            "areas": json_digest(areas),
            "image": [json_digest(_numbers(one.get_array().filled(-1))) for one in axes.images],
        }
    return found


# -- figures --------------------------------------------------------------------------------------

_CHOSEN: dict[str, Chosen] = {
    "lines": Chosen(metrics=["p99_ttft_ms", "num_preemptions"], by=["policy"]),
    "pareto": Chosen(metrics=["mean_e2el_ms"], x="request_throughput"),
    "heat_map": Chosen(metrics=["mean_ttft_ms", "request_throughput", "num_preemptions"]),
    "cdf": Chosen(metrics=["tpot"]),
}


_OF_FLEETS = ("engines_over_time", "engine_shares", "transfers", "goodput_per_dollar")
"""Looked at in tests/unit/test_fleet_figures.py."""


def figure(name: str) -> dict[str, Any]:
    """Draw one of the figures that can be asked for."""
    shown = results()
    if name in ("time_series", "gantt"):
        shown = filtered(shown, {"policy": ["vtc"], "request_rate": ["6"]})
    return seen(FIGURES[name].draw(shown, "title", _CHOSEN.get(name, Chosen())))


def report_figures(_: str) -> dict[str, Any]:
    """Draw what a report shows of a sweep, of one run, and of many curves."""
    whole = results()
    one = filtered(whole, {"policy": ["vtc"], "request_rate": ["6"]})
    many = [(i, row) for i in range(10) for row in whole.rows[i % 2 * 2 : i % 2 * 2 + 2]]
    crowd = replace(
        whole,
        rows=[
            replace(row, label=f"{i} {row.label}", settings={**row.settings, "policy": f"p{i}"})
            for i, row in many
        ],
        runs=[replace(whole.of(row)[0], label=f"{i} {row.label}") for i, row in many],
    )
    found = {}
    for name, shown in (
        ("sweep", whole), ("one run", one), ("many", crowd),
    ):  # fmt: skip
        for drawing in drawings(shown, "title")[: 4 if name == "many" else None]:
            drawn = seen(drawing.draw())
            found[f"{name}: {drawing.name}"] = [drawing.caption, json_digest(drawn), drawn["words"]]
    rows, load = shown_load(whole.rows)
    return {**found, "shown": [load, [row.label for row in rows]]}


def run_figures(_: str) -> dict[str, Any]:
    """Draw the figures that only a notebook asks for."""
    runs = {row.label: results().of(row)[0].load() for row in results().rows[1::2]}
    one = next(iter(runs.values()))
    alone = latencies_s(one, "e2el") * np.linspace(0.2, 1.0, len(one.requests["id"]))
    spreads = [run.load() for run in results().runs[:3]]
    same = {name: spreads[0].requests[name] for name in ("prompt_tokens", "output_tokens")}
    alike = [replace(run, requests={**run.requests, **same}) for run in spreads]
    seats = [stay for run in runs.values() for stay in gantt.seats(run)]
    return {
        "batching": seen(gantt.batching(runs, "title")),
        "slowdown": seen(distributions.slowdown_against_length(runs, alone, "title")),
        "predictability": seen(distributions.predictability({"x": alike}, "title")),
        "attainment": seen(plots.attainment_against_rate(results().rows, "t", target=0.5)),
        "seats": json_digest([_numbers([s.seat, s.begin_s, s.end_s, s.used_s]) for s in seats]),
        "spread": _numbers(spread(alike)),
        "slowdowns": _numbers(slowdowns(one, alone)),
        "by length": [_numbers(part) for part in distributions._by_length(
            np.repeat(np.arange(1.0, 9.0), 10), np.arange(80.0))],
    }  # fmt: skip


_SEEDS = [
    {"value": 2.0, "breaks_at": 2.1, "tried": [
        {"value": 2.0, "excess": {"a": -30.0, "b": -0.05}},
        {"value": 4.0, "excess": {"a": 500.0, "b": 0.2}}]},
    {"value": 3.0, "breaks_at": 3.2, "tried": [
        {"value": 4.0, "excess": {"a": 900.0, "b": None}},
        {"value": 2.0, "excess": {"a": -50.0, "b": -0.01}}]},
]  # fmt: skip
_FOUND = {
    "name": "asked",
    "find": {"maximize": "workload.request_rate", "at_most": {"p99_ttft_ms": 800.0},
             "at_least": {"slo_attainment": 0.9}},
    "settings": [
        {"label": "x", "mean": 2.5, "ci95": 0.7, "bound": None, "replications": _SEEDS},
        {"label": "y", "mean": 4.0, "ci95": 0.1, "bound": "at least", "replications": _SEEDS[:1]},
        {"label": "z", "mean": 1.0, "ci95": None, "bound": "below", "replications": _SEEDS[1:]},
        {"label": "none", "mean": None, "ci95": None, "bound": None, "replications": []},
    ],
    "tune": {"maximize": "output_throughput", "over": {"engine.a": [1, 8], "engine.b": [2, 4]},
             "at_most": {"p99_itl_ms": 50.0}, "at_least": {}},
    "tried": [
        {"values": {"engine.a": a, "engine.b": b}, "goals": [a * 10.0, a * b], "holds": a < 5,
         "stage": "seats", "label": f"{a} {b}", "mean": a * 1.0, "ci95": None, "bound": None,
         "replications": _SEEDS}
        for a in (1, 3, 8) for b in (2, 4)
    ],
    "best_on_new_seeds": {"values": {"engine.a": 3, "engine.b": 4}, "goals": [30.0, 40.0]},
    "given_on_new_seeds": {"values": {"engine.a": 1, "engine.b": 2}, "goals": [9.0, None]},
    "question": {"attainment": 0.9},
}  # fmt: skip


def search_figure(name: str) -> dict[str, Any]:
    """Draw a figure of a search."""
    return seen(SEARCHES[name].draw(_FOUND, "title"))


def by_hand() -> Figure:
    """Draw all that a live figure takes over, at places that no font moves."""
    figure = Figure(figsize=(6, 4))
    (one, two), (three, four) = figure.subplots(2, 2)
    one.plot([1, 2, 5], [3, 1, 2], "o--", color="#112233", label="named", linewidth=2)
    one.plot([1, 5], [2, 2], color="red", label="_said by the pointer", alpha=0.5)
    one.plot([4], [1.5], "s", markerfacecolor="white", label="point")
    one.fill_between([1, 2, 5], [0, 1, 0], [1, 2, 3], color="green", alpha=0.2)
    one.axvline(3, color="grey", linewidth=0.5)
    one.axhline(1.5, linestyle=":")
    one.text(2, 1, "in data <b>", ha="right", va="top", fontweight="bold")
    one.text(0.25, 0.75, "on axes", transform=one.transAxes, va="center", color="red")
    one.annotate("points", (3, 2), xytext=(5, 7), textcoords="offset points", ha="center")
    one.set_title("left", loc="left")
    one.set_title("middle")
    one.set_xlabel("along")
    one.legend(loc="upper right")
    two.bar([0, 1], [3, 5], color=["#445566", "red"], hatch="//", width=0.5)
    two.barh([2], [4], left=[1], height=0.25, edgecolor="black")
    two.set_yscale("log")
    two.annotate("high", (0.5, 4), xytext=(0, -9), textcoords="offset points", fontsize=7)
    two.set_xticks([0, 1], ["zero", "one"])
    two.set_xlim(-1, 6)
    two.invert_yaxis()
    image = three.imshow(np.array([[1.0, 2.0], [np.nan, 4.0]]), aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=three, label="heat")
    three.set_yticks([0, 1], ["a", "b"])
    four.set_xscale("log")
    four.step([1, 10, 100], [1, 2, 1], where="post", label="named", color="#112233")
    four.sharey(one)
    four.set_ylabel("up")
    figure.suptitle("above")
    figure.text(0.5, 0.01, "below")
    return figure


def live_figure(_: str) -> dict[str, Any]:
    """Return a figure as browsers are given it."""
    found = traces_and_layout(by_hand())
    found["data"] = [json.loads(json.dumps(_six_digits(trace))) for trace in found["data"]]
    return {
        "layout": _six_digits(found["layout"]),
        **{f"trace {i}": trace for i, trace in enumerate(found["data"])},
    }


def _six_digits(value: Any) -> Any:
    """Write numbers as `_numbers` does, wherever they stand."""
    if isinstance(value, dict):
        return {key: _six_digits(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_six_digits(one) for one in value]
    return f"{value:.6g}" if isinstance(value, float | np.floating) else value


_FLEET = {
    "name": "fleet", "cost_model": f"{SlowSteps.__module__}:SlowSteps",
    "slo": {"ttft_ms": 900, "tpot_ms": 90},
    "engine": {"max_model_len": 900, "num_gpu_blocks_override": 130, "max_num_seqs": 4},
    "workload": {
        "num_requests": 30, "request_rate": 8.0, "prompt_tokens": 90,
        "output_tokens": {"distribution": "uniform", "low": 2, "high": 40},
    },
    "cluster": {
        "pools": {"prompts": {"role": "prefill"}, "answers": {"role": "decode", "count": 2}},
        "start_up": {"load_gb_per_s": 100, "warm_up_s": 0.05},
        "failures": {"engines": [{"engine": 2, "at_s": 1.5, "down_s": 0.5}]},
    },
}  # fmt: skip


def fleet_figures(_: str) -> dict[str, Any]:
    """Draw what a fleet did, of which an engine dies and comes back."""
    result = run(make_spec(_FLEET))
    of_engines = fleets_drawn.of_engines(result.observation())
    goods = {"few": [1.0, 1.5, 1.2], "more": [2.0, 2.5, 2.25], "one": [0.5]}
    return {
        "over time": seen(fleets_drawn.engines_over_time(result, "title")),
        "shares": seen(fleets_drawn.engine_shares(result.observation(), "title")),
        "transfers": seen(fleets_drawn.transfers(result, "title")),
        "few transfers": seen(fleets_drawn.transfers(result, "title", max_requests=3)),
        "dollars": seen(fleets_drawn.goodput_per_dollar(goods, "title")),
        "of engines": {name: _numbers(one) for name, one in of_engines.items()},
        "names": [fleets_drawn.engine_name(result, i) for i in range(result.num_engines)],
    }  # fmt: skip


# -- tables ---------------------------------------------------------------------------------------


def tables(_: str) -> dict[str, Any]:
    """Write the tables of a sweep, of part of it and of a run."""
    whole = results()
    few = filtered(whole, {"policy": ["static"]})
    there = replace(few, folder=Path("elsewhere"))
    table = result_table(whole.rows, ["mean_queue_time_ms"])
    plain = result_table([replace(row, num_replications=1, settings={}) for row in few.rows[:1]])
    torn = Path(_KEPT.name) / "torn"
    shutil.copytree(whole.folder, torn)
    shutil.rmtree(torn / whole.runs[4].folder.name)
    left = [[row.label, row.num_replications] for row in read_results(torn).rows]
    shutil.rmtree(torn)
    renamed = relabelled(whole, {"static": "sealed"})
    cells = [["a", "1", "x|y"], ["bb", "-2.5", "<b>"]]
    return {
        "left": left,
        "table": list(table),
        "plain": list(plain),
        "html": html_table("t", ["p\nq", "v", "w"], cells, ["line <"]),
        "text": text_table("t", ["p\nq", "v", "w"], cells, 40, 1).splitlines(),
        "csv": _lines(summary_csv(whole.rows))[:2],
        "csv of one": _lines(summary_csv([replace(r, num_replications=1) for r in few.rows])),
        "data": json_digest(json.loads(json.dumps(rounded(summary_data(whole.rows))))),
        "renamed": [[row.label, row.policy] for row in renamed.rows],
        "merged": [[row.label, row.num_replications] for row in merged([whole, there]).rows],
        "shown": repr(Results(whole)).splitlines(),
        "frame": json_digest(rounded([_of_setting(row) for row in whole.rows])),
        "warnings": [warnings(run.load()) for run in whole.runs[::5]],
        "notes": notes(
            [{"name": "fitted", "model": "m", "hardware": "h", "calibration": "measured",
              "error": {"held_out": {"mape": 0.0412, "bias": -0.01, "p90": 0.1}}},
             {"name": "x", "calibration": "UNCALIBRATED"}, {"published_error": "5 %",
              "calibration": "imported"}],
            [f"warning {i}" for i in range(10)],
            [f"predictor {i}" for i in range(11)],
        ),
    }  # fmt: skip


def report(_: str) -> dict[str, Any]:
    """Return all that the page of a sweep says but for its figures and versions."""
    whole = results()
    heads = [run.head() for run in whole.runs]
    measured = {
        "name": "fitted", "validity": {}, "calibration": "measured", "model": "m",
        "meta": {"rounds": 3, "engine": {}, "clock": {"name": "virtual", "x": 0.123456}},
        "error": {"train": {"mape": 0.01, "bias": -0.002, "num_points": 7},
                  "held_out": {"mape": 0.04, "p90": 0.08}},
    }  # fmt: skip
    described = replace(
        whole,
        cost_models=[
            measured,
            {"name": "r", "calibration": "UNCALIBRATED"},
            {"name": "i", "published_error": {"mape": 3}},
        ],
    )
    return {
        "lead": page._lead(whole, heads),
        "results": list(page._results_table(whole)),
        "one": list(page._results_table(replace(whole, rows=whole.rows[:1]))),
        "verdicts": rounded(page._verdicts(whole)),
        "by class": list(page._by_class(whole)),
        "cost models": rounded(page._cost_models(described, heads)),
        "metrics": json_digest(list(page._all_metrics(whole.rows))),
        "cells": [page._effect(x) for x in (1.26, -0.04, float("nan"), float("inf"))],
        "live": json_digest(rounded(live_data(whole.rows, "name"))),
    }


def whole_page(_: str) -> dict[str, Any]:
    """Lay out a page of little, with what has to be escaped."""
    table = page.PageTable(("a & b", "c"), [("<i>", "1"), ("x", "-2")])
    plain = page.render("n <b>", 'lead "&"', ["note <1>"], table)
    full = page.render("n", "l", [], table, warnings=["w <2>"], command="schedlab run 'x' > y")
    return {
        "plain": [json_digest(plain), *(line for line in plain.splitlines() if "&" in line)],
        "full": [json_digest(full), len(full.splitlines())],
    }


def compared(_: str) -> dict[str, Any]:
    """Compare settings, classes and pairs of runs with each other."""
    whole = results()
    found = compare_policies(whole.runs, against="vtc")
    rates = compare_policies(whole.runs, ["mean_e2el_ms"], key="workload.request_rate")
    runs = [run.load() for run in whole.runs]
    few = run_intervals(_longer(runs[-1]), 5)
    rows = compare_runs("p", runs[:2], [runs[2]], 4)
    ns = np.array([[1_000, 2_000, 4_000], [1_100, 1_500, 4_100]])
    return {
        "policies": [[c.setting, c.metric, c.of, c.against, *c.means, c.verdict] for c in found],
        "changes": [list(one.change) for one in found[::4]],
        "rates": [[c.of, c.against, *c.means, *c.change] for c in rates],
        "by class": list(class_table(whole.folder)),
        "by priority": list(class_table(whole.folder, "priority", ["longest_wait"])),
        "intervals": {name: list(one) for name, one in few.items()},
        "backends": [[row.metric, row.measured, row.low, row.high, row.simulated, row.error,
                      row.interval, row.spread, row.holds, row.off_by_chance] for row in rows],
        "ranks": rank_agreement(
            [row for i, run in enumerate(runs[::3])
             for row in compare_runs(str(i), [run], [runs[1::3][i]])]),
        "steps": step_errors(ns[0], ns[1]),
        "frontier": on_frontier(
            [[1, 5], [2, 5], [2, 4], [0, 9], [2, 4], [float("nan"), 0], [3, 9]], [True, False]
        ).tolist(),
        "saturated": saturated_from(curves(whole.rows).values()),
    }  # fmt: skip


def _longer(run: Any) -> Any:
    """Repeat the requests of a run until they fill batches."""
    repeated = {name: np.tile(np.asarray(column), 5) for name, column in run.requests.items()}
    return replace(run, requests=repeated)


Case = tuple[Callable[[str], dict[str, Any]], str]
CASES: dict[str, Case] = {
    **{f"figure {name}": (figure, name) for name in FIGURES if name not in _OF_FLEETS},
    **{f"figure of a search: {name}": (search_figure, name) for name in SEARCHES},
    "figures of reports": (report_figures, ""),
    "figures of runs": (run_figures, ""),
    "figures of fleets": (fleet_figures, ""),
    "live figure": (live_figure, ""),
    "tables": (tables, ""),
    "report": (report, ""),
    "page": (whole_page, ""),
    "compared": (compared, ""),
}
