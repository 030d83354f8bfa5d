"""Every figure of rows, runs and files written by hand: all that is drawn, in milliseconds each.

What `drawn.py` asks of a sweep takes seconds, so nobody asks it often. Here rows are numbers, and
runs a few requests, so that each figure is looked at whenever tests are run.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from schedlab.experiments.comparing.compare_figures import step_figure
from schedlab.experiments.figures import plots, style
from schedlab.experiments.figures.chosen import SEARCHES
from schedlab.experiments.results.tables import Estimate, Row
from schedlab.experiments.running.run import run
from schedlab.experiments.specification.loading import make_spec
from schedlab.sim.result import RunResult
from tests.golden import digest_table
from tests.golden.drawn import _FOUND, seen
from tests.golden.rounding import json_digest

KEPT = Path(__file__).with_name("by_hand.json")
_ENGINE = {
    "max_num_seqs": 3, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 40,
    "scheduler_reserve_full_isl": False, "max_model_len": 500,
}  # fmt: skip
_FLEET = {
    "model": "schedlab-small", "hardware": "a100-80gb", "slo": {"ttft_ms": 500},
    "workload": {"trace": "fixed", "num_requests": 7, "request_rate": 200,
                 "prompt_tokens": 300, "output_tokens": 9},
    "cluster": {
        "pools": {"prompts": {"role": "prefill"}, "answers": {"role": "decode", "count": 2}},
        "start_up": {"load_gb_per_s": 100, "warm_up_s": 0.01},
        "failures": {"engines": [{"engine": 2, "at_s": 0.01, "down_s": 0.01}]},
    },
}  # fmt: skip


@functools.cache
def one_engine(policy: str = "fcfs") -> RunResult:
    """Run a few requests that preempt each other."""
    spec = {
        "name": "few", "policy": policy, "engine": _ENGINE,
        "workload": {
            "num_requests": 8, "request_rate": 40,
            "prompt_tokens": {"distribution": "uniform", "low": 40, "high": 400},
            "output_tokens": {"distribution": "uniform", "low": 1, "high": 60},
        },
    }  # fmt: skip
    return run(make_spec(spec))


@functools.cache
def fleet() -> RunResult:
    """Run a few requests in two pools, an engine of which is down for a while."""
    return run(make_spec({"name": "fleet", **_FLEET}))


def row(policy: str, rate: object, number: float, seeds: int = 5, half: float | None = 0.1) -> Row:
    """Return a setting whose metrics are all apart, at a rate; the more the later they are."""
    values = {
        "offered_request_rate": 1.1 * number, "request_throughput": 3.0 * number,
        "output_throughput": 700.0 / number, "completed": 100.0, "num_requests": 110.0,
        "duration_s": 33.0 / number, "slo_attainment": 1.0 / (1.0 + 0.1 * number),
        "request_goodput": 2.0 * number, "num_preemptions": 4.0 * (number > 2),
    }  # fmt: skip
    for i, name in enumerate(("ttft", "tpot", "itl", "e2el", "queue_time")):
        for j, part in enumerate(("mean", "median", "p50", "p90", "p99")):
            values[f"{part}_{name}_ms"] = (1 + i) * (10 + j) * number**1.5
    shown = {name: Estimate(value, half and half * value) for name, value in values.items()}
    keys = {"policy": policy, "workload.request_rate": str(rate), "engine.max_num_seqs": "8"}
    return Row(f"{policy} {rate}", policy, keys, seeds, shown)


def rows(seeds: int = 5) -> list[Row]:
    """Return two policies at four rates, one of which is not known at the last."""
    found = [
        row(policy, rate, rate * factor, seeds)
        for policy, factor in (("fcfs", 1.0), ("a longer name of one", 1.3))
        for rate in (0.5, 1, 2, 4)
    ]
    return [*found[:-1], row("a longer name of one", 4, math.nan, seeds)]


def _comparison() -> dict[str, Any]:
    errors = {"request_throughput": 0.02, "p99_ttft_ms": 1.5, "mean_ttft_ms": -0.9,
              "p99_itl_ms": None, "mean_e2el_ms": -0.11, "kv_utilization": 0.07}  # fmt: skip
    return {
        "bars": {"throughput": 0.05, "latency": 0.1},
        "points": [
            {"load": load, "policy": policy, "metrics": [
                {"metric": name, "error": error, "spread": spread,
                 "within_bar_or_spread": abs(error or 1.0) < 0.1}
                for name, error in errors.items()
            ]}
            for load in ("request_rate=2", "at_once")
            for policy, spread in (("a", 0.01), ("b", 0.3))
        ],
    }  # fmt: skip


def _claim() -> dict[str, Any]:
    said = [
        {"name": "capacity", "compare": "ratio", "paper": 2.6, "accept": [1.8, "inf"]},
        {"name": "gap that is told in a long line of words", "compare": "reduction",
         "accept": [0.6, 0.9]},
        {"name": "seconds", "compare": "value", "paper": [0.5, 0.7], "accept": [0.4, 0.8]},
        {"name": "more", "compare": "increase", "paper": 0.2, "accept": [-0.1, 0.3]},
    ]  # fmt: skip
    found = [
        {"estimate": 3.0, "interval": [2.9, 3.1], "verdict": "reproduced"},
        {"estimate": 0.5, "interval": None, "verdict": "direction only"},
        {"estimate": 0.6, "interval": [0.5, 0.65], "verdict": "reproduced"},
        {"estimate": -0.2, "interval": [-0.3, -0.1], "verdict": "opposite"},
    ]
    return {"claim": {"system": "Sys", "source": "a paper", "figures": said}, "figures": found}


class _Point:
    label = "a point"
    measured_ns = np.array([1e6, 2e6, 4e6, 8e6])
    predicted_ns = np.array([1.1e6, 1.9e6, 4.4e6, 7.6e6])


def _noted(size: str | None) -> Figure:
    """Draw panels with names and a note below, as for a screen or a paper."""
    with style.paper(size):
        figure, axes = style.panels(6.0, 3.0, 2, sharex=False)
        axes[0].plot([1, 2], [3, 4])
        looks = zip(("first", "second, which is longer"), style.looks(), strict=False)
        if size != "page":
            style.name_below(figure, looks)
        style.note(figure, "what a reader has to know of it, " * 5)
    return figure


def _axes(low: float, high: float) -> Figure:
    """Draw a logarithmic axis of plain numbers."""
    figure = style.new_figure(4, 3)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, 3 * high)
    for axis in "xy":
        style.plain_numbers(axes, axis)
        along = axes.xaxis if axis == "x" else axes.yaxis
        along.set_ticks(along.get_majorticklocs())
    return figure


def _two() -> dict[str, RunResult]:
    return {"fcfs": one_engine(), "other": one_engine("prefill_first")}


def _cdf(metric: str) -> Figure:
    return plots.latency_cdf(_two(), "title", metric)


def _alone() -> Any:
    return np.linspace(0.05, 0.4, len(one_engine().requests["id"]))


FIGURES: dict[str, Callable[[], Figure]] = {
    "throughput": lambda: plots.throughput_against_p99(rows(), "title"),
    "throughput, one in colour": lambda: plots.throughput_against_p99(
        rows(1), "title", ("itl", "e2el"), {"fcfs"}
    ),
    "latency": lambda: plots.latency_against_rate(rows(), "title"),
    "attainment": lambda: plots.attainment_against_rate(rows(), "title"),
    "attainment of two limits": lambda: plots.attainment_against_rate(rows(1), "title", target=0.8),
    "lines": lambda: plots.lines(rows(), "title", ["p99_ttft_ms", "num_preemptions"]),
    "line": lambda: plots.lines(rows(1)[:4], "", ["mean_e2el_ms"]),
    "lines by policy": lambda: plots.lines(
        [row(p, 2, 2.0 + i) for i, p in enumerate(("x", "y", "z"))], "title", ["p99_ttft_ms"],
        "policy",
    ),
    "lines over a metric": lambda: plots.lines(
        rows(), "title", ["mean_ttft_ms"], "request_throughput", ["policy"]
    ),
    "lines in another order": lambda: plots.lines(
        [rows()[i] for i in (6, 2, 0, 5, 3, 1, 4)], "title", ["p99_ttft_ms"]
    ),
    "lines of a key that varies not": lambda: plots.lines(
        [replace(row(p, 2, 2.0 + i), settings={"policy": p, "engine.max_num_seqs": "8"})
         for i, p in enumerate(("x", "y"))], "title", ["p99_ttft_ms"],
    ),
    "lines over rates that are names": lambda: plots.lines(
        [row("fcfs", rate, 1.0 + i) for i, rate in enumerate(("inf", "slow", "fast"))], "t",
        ["p99_tpot_ms"], "request_rate",
    ),
    "pareto": lambda: plots.pareto(rows(), "title"),
    "pareto of others": lambda: plots.pareto(rows(1), "t", "request_throughput", "mean_e2el_ms"),
    "frontier of GPUs": lambda: plots.gpu_frontier(rows(), "title", [1, 2, 4, 8] * 2),
    "heat map": lambda: plots.heat_map(rows()[::4], "title"),
    "heat map of few": lambda: plots.heat_map(rows(2)[1:7], "t", ["p99_ttft_ms", "slo_attainment"]),
    "dollars": lambda: plots.goodput_per_dollar({"a": [3.0, 4.0], "a longer name": [5.0]}, "title"),
    "agreement": lambda: plots.measured_against_simulated(_comparison(), "title"),
    "claim": lambda: plots.claim(_claim()),
    "steps": lambda: step_figure([_Point(), _Point()], "title"),  # type: ignore[list-item]
    **{f"search {name}": functools.partial(SEARCHES[name].draw, _FOUND, "title")
       for name in SEARCHES},
    **{f"cdf of {name}": functools.partial(_cdf, name)
       for name in ("ttft", "tpot", "e2el", "queue_time")},
    "time series": lambda: plots.time_series(one_engine(), "title"),
    "time series of a fleet": lambda: plots.time_series(fleet(), "title"),
    "gantt": lambda: plots.gantt(one_engine(), "title"),
    "gantt of few": lambda: plots.gantt(one_engine(), "title", 3),
    "batching": lambda: plots.batching(
        {"fcfs": one_engine(), "static": one_engine("static")}, "title"
    ),
    "slowdown": lambda: plots.slowdown_against_length(_two(), _alone(), "title"),
    "predictability": lambda: plots.predictability({"x": [*_two().values()]}, "title"),
    "engines": lambda: plots.engines_over_time(fleet(), "title"),
    "shares": lambda: plots.engine_shares(fleet().observation(), "title"),
    "transfers": lambda: plots.transfers(fleet(), "title"),
    "first transfers": lambda: plots.transfers(fleet(), "title", 3),
    **{f"panels on {size}": functools.partial(_noted, size) for size in (None, *style.SIZES)},
    **{f"axis from {low:g} to {high:g}": functools.partial(_axes, low, high)
       for low, high in ((1, 2), (1, 4), (1, 50), (2, 200), (1, 1e3), (1, 1e4), (0.1, 1e5))},
}  # fmt: skip


def digests(figure: Figure) -> dict[str, str]:
    """Return a digest of each part of a figure."""
    return {part: json_digest(value) for part, value in seen(figure).items()}


def kept() -> dict[str, dict[str, str]]:
    """Read the digests."""
    return digest_table.read(KEPT)


def write() -> None:
    """Write them anew."""
    digest_table.write(KEPT, {name: digests(make()) for name, make in FIGURES.items()})
