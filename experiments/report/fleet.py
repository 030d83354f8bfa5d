"""What a report says of the engines of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schedlab.experiments.figures.fleets import engine_name, of_engines
from schedlab.experiments.results.saved_results import SavedResults
from schedlab.experiments.results.tables import Row
from schedlab.experiments.statistics import with_interval
from schedlab.sim.metrics.registry import metric_named
from schedlab.sim.result import RunResult

_METRICS = (
    "num_engines", "load_imbalance", "request_imbalance", "min_engine_busy_share",
    "max_engine_busy_share", "availability_share", "cost_usd", "usd_per_million_output_tokens",
    "transferred_bytes", "mean_handover_ms", "num_moves", "requests_retried",
)  # fmt: skip


class FleetTable(NamedTuple):
    """Rows of a fleet, or of several beside each other."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_text: int
    note: str


def fleet_table(results: SavedResults) -> FleetTable | None:
    """Return what each engine of a run did, or each fleet of several settings; None without any.

    Parameters
    ----------
    results : SavedResults
        A results folder.
    """
    if len(results.rows) > 1:
        return _of_settings(results.rows)
    if not results.runs:
        return None
    run = results.runs[0].load()
    return _of_engines(run) if run.engines else None


def _of_settings(rows: Sequence[Row]) -> FleetTable | None:
    fleets = [row for row in rows if "num_engines" in row.metrics]
    if not fleets:
        return None
    told = [
        name
        for name in _METRICS
        if any(np.isfinite(row.mean(name)) and row.mean(name) != 0 for row in fleets)
    ]
    lines = [
        (
            row.label,
            *(with_interval(*row.estimate(name), metric_named(name).scale) for name in told),
        )
        for row in fleets
    ]
    note = "Imbalance: of the engine with the most, over the mean of all; 1 = even."
    return FleetTable(("setting", *(metric_named(m).axis for m in told)), lines, 1, note)


def _of_engines(run: RunResult) -> FleetTable:
    observed = run.observation()
    columns = of_engines(observed)
    lines = []
    for index, engine in enumerate(run.engines):
        price = engine.usd_per_gpu_hour
        lines.append(
            (
                engine_name(run, index), engine.role, engine.hardware, engine.policy,
                str(engine.num_gpus), f"{engine.kv_capacity_tokens:,}",
                *(f"{values[index]:,.0f}" for values in columns.values()),
                "-" if price is None else f"{price * engine.num_gpus:.2f}",
            )
        )  # fmt: skip
    note = (
        "A request counts where it was answered. Prices are those of GPU hours while it is there."
    )
    return FleetTable(
        ("engine", "role", "hardware", "policy", "GPUs", "KV tokens", *columns, "USD an hour"),
        lines, 4, note,
    )  # fmt: skip
