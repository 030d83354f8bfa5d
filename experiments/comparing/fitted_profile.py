"""What a calibration measured, fitted, judged, and written down as a profile."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.comparing.measured_runs import read_steps
from schedlab.sim.cost import registry
from schedlab.sim.cost.profile import FIT_FILE, Fit, fit_texts, read_meta
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.errors import SpecError
from schedlab.sim.files import parse_json, read_json_object, read_text, write_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.gpu_backend.calibration_fit import MeasuredBatch

HELD_OUT = "held_out"
"""Kind of the batches that judge a fit."""

READINGS = "points.jsonl"
"""File of a profile folder: raw, as measured."""

RUN_STEPS = "run_steps.jsonl"
"""File of a profile folder: steps of the runs that tell its level, one a line."""

MAPE_BAR, BIAS_BAR = 0.06, 0.02
"""Held-out error that a profile should not exceed."""


@dataclass(frozen=True)
class Calibrated:
    """What a calibration gave.

    Attributes
    ----------
    fit : Fit
        The cost model and its errors.
    overhead : dict of str to float
        Scheduling overhead of the real engine.
    drift : list of float
        Largest sentinel deviation of each round.
    held_out : dict
        Error on held-out batches by kind; see `gpu_backend.calibration_fit.error_by_kind`.
    verdict : str
        One sentence.
    """

    fit: Fit
    overhead: dict[str, float]
    drift: list[float]
    held_out: dict[str, dict[str, float]]
    verdict: str


def write_profile(
    folder: Path,
    meta: Mapping[str, Any],
    batches: Sequence[tuple[str, MeasuredBatch]],
    run_steps: Sequence[MeasuredBatch],
    others: Mapping[str, str] | None = None,
) -> tuple[Calibrated, list[dict[str, Any]]]:
    """Fit measured batches, and write the files of a profile folder once all is known.

    Parameters
    ----------
    folder : Path
        Of the profile: gets meta.json, fit.json, residuals.json and, if there are any,
        run_steps.jsonl.
    meta : mapping
        What was measured; what the fit is judged to be good for is added.
    batches : sequence of (str, MeasuredBatch)
        With their kind; those that are ``held_out`` judge the fit, the others make it.
    run_steps : sequence of MeasuredBatch
        Steps of runs, that tell the level; none leave it at that of the batches.
    others : mapping of str to str, optional
        Name to text of files that are written with these, all or none.

    Returns
    -------
    found : Calibrated
    residuals : list of dict
        A batch each, as residuals.json has them.

    Raises
    ------
    SpecError
        If the folder holds a profile of another kind.
    """
    from schedlab.gpu_backend.calibration_fit import (
        SwapTime,
        coefficient_intervals,
        error_by_kind,
        fit_profile,
        predictions,
        run_level,
        step_spread,
        sustained_level,
        with_swapping,
    )

    registry.refuse_other_kind(folder, FIT_FILE)
    overhead, drift = meta["scheduling_overhead"], meta["sentinel_drift_by_round"]
    buckets, swapping = meta["graph_buckets"], [SwapTime(**one) for one in meta["swap_times"]]
    train = [row for kind, row in batches if kind != HELD_OUT]
    test = [row for kind, row in batches if kind == HELD_OUT]
    fit = fit_profile(train, test, buckets)
    level = (run_level if "engine_measured" in meta else sustained_level)(fit, run_steps)
    if swapping:
        fit = with_swapping(fit, swapping)
    by_kind = error_by_kind(fit, test)
    rows = [row for _, row in batches]
    residuals = [
        {"kind": kind, **_row_json(row), "predicted_s": float(predicted)}
        for (kind, row), predicted in zip(batches, predictions(fit, rows), strict=True)
    ]
    intervals = coefficient_intervals(train, buckets, meta["seed"])
    text = json.dumps({"coefficient_intervals_s": intervals, "points": residuals}, indent=1)
    texts = {**(others or {}), "residuals.json": text + "\n"}
    if run_steps:
        texts[RUN_STEPS] = "".join(json.dumps(_row_json(step)) + "\n" for step in run_steps)
    of_runs = replace(fit, run_level=level)
    of_runs = replace(of_runs, step_spread=step_spread(of_runs, run_steps))
    texts |= fit_texts({**meta, "held_out_error_by_kind": by_kind}, of_runs)
    found = Calibrated(fit, overhead, drift, by_kind, verdict(fit, by_kind, drift))
    write_texts(folder, texts)
    if not run_steps:  # those of an earlier profile tell nothing of this one
        (folder / RUN_STEPS).unlink(missing_ok=True)
    return found, residuals


def refit(profile: Path, folder: Path, runs: Sequence[Path] = ()) -> Calibrated:
    """Fit what a calibration measured anew, without the device.

    Parameters
    ----------
    profile : Path
        A profile that was calibrated.
    folder : Path
        Gets the new one; may be the same.
    runs : sequence of Path
        Runs that were kept where the profile was measured, each a folder, to tell its level;
        without any those tell it that told it before, and where their steps are not kept the new
        profile is at the level of its batches.

    Returns
    -------
    Calibrated

    Raises
    ------
    SpecError
        If the profile or a run cannot be read, or `folder` holds a profile of another kind.
    """
    from schedlab.gpu_backend.calibration_fit import without_overhead
    from schedlab.gpu_backend.stopwatch import ReferenceSpeed

    # All is read before anything is written.
    meta = read_meta(profile)
    others, speed = {READINGS: read_text(profile / READINGS)}, ReferenceSpeed.read(profile)
    if speed is not None:
        others |= speed.texts()
    points = read_json_object(profile / "residuals.json")
    known = profile / RUN_STEPS
    lines = read_text(known).splitlines() if known.exists() and not runs else []
    steps = [step for run in runs for step in read_steps(run)[1:]]
    if runs:
        meta["level_of_runs"] = [run.name for run in runs]
    elif not lines:
        meta.pop("level_of_runs", None)
    try:
        source = profile / "residuals.json"
        batches = [
            (point["kind"], _row(point, f"{source}: points[{i}]"))
            for i, point in enumerate(points["points"])
        ]
        of_runs = without_overhead(steps) or [
            _row(parse_json(line, where), where)
            for where, line in ((f"{known}:{n}", line) for n, line in enumerate(lines, start=1))
        ]
        found, residuals = write_profile(folder, meta, batches, of_runs, others)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"{profile} is no profile that can be fitted anew: no {error}") from error
    save_residuals(residuals, folder)
    return found


def _row(data: Mapping[str, Any], where: str) -> MeasuredBatch:
    """Return a batch, as `_row_json` writes it; an error says where it stands."""
    from schedlab.gpu_backend.calibration_fit import MeasuredBatch

    num_decodes, context_sum, context_max = data["features"]
    chunks = tuple((new, cached) for new, cached in data["chunks"])
    rows = num_decodes + len(chunks)
    shape = BatchShape(
        num_decodes, context_sum, context_max, chunks, rows_sampled=rows, num_running=rows
    )
    measured_s = data["measured_s"]
    if not isinstance(measured_s, int | float) or not 0 < measured_s < math.inf:
        raise SpecError(f"{where}: measured_s must be a number above 0, got {measured_s!r}")
    return MeasuredBatch(shape, measured_s)


def _row_json(row: MeasuredBatch) -> dict[str, Any]:
    shape = row.shape
    features = [
        shape.num_decodes, shape.decode_context_sum_tokens, shape.decode_context_max_tokens,
    ]  # fmt: skip
    return {"features": features, "chunks": list(shape.chunks), "measured_s": row.seconds}


def verdict(fit: Fit, by_kind: dict[str, dict[str, float]], drift: Sequence[float]) -> str:
    """Say whether the profile may be trusted, and what speaks against it."""
    from schedlab.gpu_backend.calibration import DRIFT_BAR

    error = fit.held_out
    worst = max(drift, default=0.0)
    shaky = f"; sentinels moved by up to {worst:.1%}: the machine was not quiet"
    shaky = shaky if worst > DRIFT_BAR else ""
    if not error.num_points:
        return f"NOT JUDGED: no batch was held out of the fit{shaky}"
    found = (
        f"held-out error {error.mape:.1%} on average, {error.p90:.1%} at the 90th percentile, "
        f"bias {error.bias:+.1%}, over {error.num_points} replayed batches"
    )
    kinds = {kind: found for kind, found in by_kind.items() if kind != "by_time"}
    told = ", ".join(f"{kind} {e['mape']:.1%} {e['bias']:+.1%}" for kind, e in kinds.items())
    found += f" ({told})" if told else ""
    good = all(
        e["mape"] <= MAPE_BAR and abs(e["bias"]) <= BIAS_BAR
        for e in ({"mape": error.mape, "bias": error.bias}, *kinds.values())
    )
    judgement = "GOOD" if good else f"POOR (bar: {MAPE_BAR:.0%} and {BIAS_BAR:.0%})"
    return f"{judgement}: {found}{shaky}"


def save_residuals(residuals: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draw `residual_figure` into a profile folder."""
    from schedlab.experiments.figures.style import save

    save(residual_figure(residuals, folder.name), folder / "residuals")


def residual_figure(residuals: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw predicted against measured times, and the relative error against the measured time."""
    from schedlab.experiments.figures.style import house_style, looks, new_figure, plain_numbers

    with house_style():
        figure = new_figure(9.0, 3.9)
        left, right = figure.subplots(1, 2)
        kinds = dict.fromkeys(r["kind"] for r in residuals)
        for kind, look in zip(kinds, looks(), strict=False):
            rows = [r for r in residuals if r["kind"] == kind]
            true = np.array([r["measured_s"] for r in rows]) * 1e3
            said = np.array([r["predicted_s"] for r in rows]) * 1e3
            style = {"linestyle": "none", "marker": look.marker, "color": look.color}
            name = kind.replace("_", " ")
            left.plot(true, said, markersize=4, label=name, **style)
            right.plot(true, (said / true - 1) * 100, markersize=4, **style)
        span = [min(r["measured_s"] for r in residuals) * 1e3,
                max(r["measured_s"] for r in residuals) * 1e3]  # fmt: skip
        left.plot(span, span, color="#666666", linewidth=0.8)
        right.axhline(0, color="#666666", linewidth=0.8)
        left.set_xscale("log")
        left.set_yscale("log")
        right.set_xscale("log")
        for axes in (left, right):
            axes.set_xlabel("measured step (ms)")
            plain_numbers(axes, "x")
        plain_numbers(left, "y")
        left.set_ylabel("predicted step (ms)")
        left.set_title(title)
        right.set_ylabel("error of the prediction (%)")
        left.legend()
    return figure
