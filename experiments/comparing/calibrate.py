"""Calibrate a cost model on this machine: measure, fit, judge on replayed batches, write down."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.comparing.calibrated_engine import chat, open_ours, open_vllm
from schedlab.experiments.comparing.machine import describe_machine
from schedlab.experiments.comparing.measured_runs import read_steps
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import SimExecutor, Steps, Work
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.cost.profile import Fit, read_meta, write_fit
from schedlab.sim.cost.roofline import RooflineCostModel
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.files import read_json_object, read_text, write_text
from schedlab.sim.hardware.deployment import Deployment
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import memory_budget
from schedlab.sim.hardware.models import model
from schedlab.sim.rng import stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.gpu_backend.calibration import Measurement
    from schedlab.gpu_backend.calibration_design import BatchPoint
    from schedlab.gpu_backend.calibration_fit import MeasuredBatch
    from schedlab.gpu_backend.stopwatch import Stopwatch

Progress = Callable[[int, int, str], None]

HELD_OUT = "held_out"
READINGS = "points.jsonl"

MAPE_BAR, BIAS_BAR = 0.06, 0.02
"""Held-out error that a profile should not exceed."""

_GPU_MEMORY_UTILIZATION = 0.9
"""vLLM's default: a calibration has no experiment that says another."""

HELD_OUT_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fcfs", {}),
    ("prefill_first", {}),
    ("static", {"max_batch_size": 8, "pad_prompts": False, "pad_decodes": False}),
)
"""Whose batches a profile is judged on. Padding rows are not measured, so they are left out."""


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


def calibrate(
    folder: Path,
    *,
    model_name: str,
    hardware: str,
    device: str,
    dtype: str,
    config: EngineConfig,
    engine: str = "schedlab",
    clock: str = "virtual",
    threads: int = 1,
    num_rounds: int = 5,
    num_random: int = 60,
    num_held_out: int = 60,
    max_s: float = math.inf,
    seed: int = 0,
    progress: Progress | None = None,
) -> Calibrated:
    """Measure a model on a device and write a profile folder.

    Parameters
    ----------
    folder : Path
        Gets points.jsonl (raw, as measured; an interrupted calibration goes on from it),
        meta.json, fit.json and residuals.json after each round, and residuals.png.
    model_name, hardware : str
        Names that results and the simulator will use.
    device, dtype : str
        Where and in what format to run.
    config : EngineConfig
        Limits to calibrate within; they bound the validity of the profile.
    engine : {"schedlab", "vllm"}
        Whose steps are measured.
    clock : {"virtual", "reference"}
        Time as it passes, or CPU time at the speed that the machine has as the calibration begins;
        see `schedlab.gpu_backend.stopwatch.ReferenceTime`. Runs that are held against the profile
        are measured by the same.
    threads : int
        Of the kernels on a CPU.
    num_rounds, num_random, num_held_out : int
        Size of the design; see `schedlab.gpu_backend.calibration_design`. A third of the held-out
        batches is of each kind: decode, mixed, prefill.
    max_s : float
        No round but the first begins that would likely end later than this.
    seed : int
        Of everything random.
    progress : callable, optional
        Told how far it is.

    Returns
    -------
    Calibrated
        Fit, errors and verdict.

    Raises
    ------
    SpecError
        If the device is missing, the model does not fit, or `folder` holds another calibration.
    """
    from schedlab.gpu_backend.calibration import measure, measured
    from schedlab.gpu_backend.calibration_design import design

    begun_s = time.monotonic()
    held_out = replayed_points(config, model_name, hardware, dtype, num_held_out, seed)
    # What does not depend on the batch is measured before the rounds, so that the first one leaves
    # a profile that is whole.
    stopwatch = _stopwatch(folder, clock, model_name, device, threads)
    opened = {"schedlab": open_ours, "vllm": open_vllm}[engine](
        model_name, config, device, dtype, threads, seed, stopwatch
    )
    buckets = opened.buckets
    fitted_on = design(config, num_random, seed, buckets)
    points = [*fitted_on, *held_out]
    about = f"{model_name} {hardware} {device} {dtype} kernels {opened.kernels} threads {threads}"
    about += "" if clock == "virtual" else f" clock {clock}"
    same = {
        "model": model(model_name).name,
        "hardware": gpu(hardware).name,
        "dtype": dtype,
        "tensor_parallel_size": 1,
        "scheduling_overhead": opened.overhead,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "engine": {name: getattr(config, name) for name in config.__dataclass_fields__},
        "graph_buckets": list(buckets),
        "swap_times": [time._asdict() for time in opened.swapping],
        "seed": seed,
        "kernels": opened.kernels,
        **({"engine_measured": opened.about} if opened.about else {}),
        "machine": describe_machine(device),
    }

    def write(taken: Measurement) -> tuple[Calibrated, list[dict[str, Any]]]:
        spreads = [taken.spread(i) for i in range(len(points))]
        meta = {
            **same,
            "clock": {"name": clock, **stopwatch.describe()},
            "rounds": len(taken.drift),
            "sentinel_drift_by_round": taken.drift,
            "median_repeat_spread": float(np.median(spreads)),
        }
        batches = [
            (point.kind, row) for point, row in zip(points, measured(taken, points), strict=True)
        ]
        return write_profile(folder, meta, batches, opened.run_steps)

    taken = measure(
        opened.timer, config, points, folder / READINGS,
        about=about, num_rounds=num_rounds, repetitions=opened.repetitions, seed=seed,
        progress=progress, max_s=max_s - (time.monotonic() - begun_s), on_round=write,
    )  # fmt: skip
    found, residuals = write(taken)
    save_residuals(residuals, folder)
    return found


def write_profile(
    folder: Path,
    meta: Mapping[str, Any],
    batches: Sequence[tuple[str, MeasuredBatch]],
    run_steps: Sequence[MeasuredBatch],
) -> tuple[Calibrated, list[dict[str, Any]]]:
    """Fit measured batches and write meta.json, fit.json and residuals.json.

    Parameters
    ----------
    folder : Path
        Of the profile.
    meta : mapping
        What was measured; what the fit is judged to be good for is added.
    batches : sequence of (str, MeasuredBatch)
        With their kind; those that are ``held_out`` judge the fit, the others make it.
    run_steps : sequence of MeasuredBatch
        Steps of runs, that tell the level; none leave it at that of the batches.

    Returns
    -------
    found : Calibrated
    residuals : list of dict
        A batch each, as residuals.json has them.
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
        {"kind": kind, "features": _decode_features(row.shape),
         "chunks": list(row.shape.chunks),
         "measured_s": row.seconds, "predicted_s": float(predicted)}
        for (kind, row), predicted in zip(batches, predictions(fit, rows), strict=True)
    ]  # fmt: skip
    intervals = coefficient_intervals(train, buckets, meta["seed"])
    text = json.dumps({"coefficient_intervals_s": intervals, "points": residuals}, indent=1)
    write_text(folder / "residuals.json", text + "\n")
    of_runs = replace(fit, run_level=level)
    of_runs = replace(of_runs, step_spread=step_spread(of_runs, run_steps))
    write_fit(folder, {**meta, "held_out_error_by_kind": by_kind}, of_runs)
    overhead, drift = meta["scheduling_overhead"], meta["sentinel_drift_by_round"]
    return Calibrated(fit, overhead, drift, by_kind, verdict(fit, by_kind, drift)), residuals


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
        without any the new profile is at the level of its batches.

    Returns
    -------
    Calibrated

    Raises
    ------
    SpecError
        If the profile or a run cannot be read.
    """
    from schedlab.gpu_backend.calibration_fit import MeasuredBatch, without_overhead
    from schedlab.gpu_backend.stopwatch import ReferenceSpeed

    # All is read before anything is written.
    meta = {key: value for key, value in read_meta(profile).items() if key != "level_of_runs"}
    if runs:
        meta["level_of_runs"] = [run.name for run in runs]
    readings, speed = read_text(profile / READINGS), ReferenceSpeed.read(profile)
    points = read_json_object(profile / "residuals.json")
    steps = [step for run in runs for step in read_steps(run)[1:]]
    try:
        batches = [
            (point["kind"], MeasuredBatch(_shape(point), point["measured_s"]))
            for point in points["points"]
        ]
        found, residuals = write_profile(folder, meta, batches, without_overhead(steps))
    except (KeyError, TypeError) as error:
        raise SpecError(f"{profile} is no profile that can be fitted anew: no {error}") from error
    write_text(folder / READINGS, readings)
    if speed is not None:
        speed.write(folder)
    save_residuals(residuals, folder)
    return found


def _shape(point: Mapping[str, Any]) -> BatchShape:
    num_decodes, context_sum, context_max = point["features"]
    chunks = tuple((new, cached) for new, cached in point["chunks"])
    rows = num_decodes + len(chunks)
    return BatchShape(
        num_decodes, context_sum, context_max, chunks, rows_sampled=rows, num_running=rows
    )


def _decode_features(shape: BatchShape) -> list[int]:
    return [
        shape.num_decodes, shape.decode_context_sum_tokens, shape.decode_context_max_tokens,
    ]  # fmt: skip


def _stopwatch(folder: Path, clock: str, model_name: str, device: str, threads: int) -> Stopwatch:
    """Return what readings are taken by; the speed of an interrupted calibration is kept."""
    from schedlab.gpu_backend.stopwatch import (
        ElapsedTime,
        ReferenceSpeed,
        ReferenceTime,
        require_cpu,
        sentinel_of,
    )

    if clock == "virtual":
        return ElapsedTime()
    require_cpu("--clock reference", device, ("virtual",))
    speed = ReferenceSpeed.read(folder)
    stopwatch = ReferenceTime(
        sentinel_of(model_name, threads), speed.sentinel_s * 1e9 if speed else 0
    )
    if speed is None:
        ReferenceSpeed(stopwatch.reference_ns / 1e9).write(folder)
    return stopwatch


def calibration_config(
    model_name: str,
    hardware: str,
    dtype: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    num_blocks: int | None,
) -> EngineConfig:
    """Return the limits to calibrate within; the KV cache fills the memory unless it is given.

    Raises
    ------
    SpecError
        If the limits contradict each other, or a CPU's cache is not given.
    """
    if num_blocks is None:
        if hardware == "cpu":
            num_blocks = -(-max_model_len * max_num_seqs // (2 * block_size))
        else:
            num_blocks = memory_budget(
                model(model_name), gpu(hardware), dtype=dtype,
                gpu_memory_utilization=_GPU_MEMORY_UTILIZATION, block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
            ).num_blocks  # fmt: skip
    try:
        return EngineConfig(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
    except ValueError as error:
        raise SpecError(f"calibration: {error}") from error


def replayed_points(
    config: EngineConfig, model_name: str, hardware: str, dtype: str, count: int, seed: int
) -> list[BatchPoint]:
    """Return batches that occur when a chat workload is served under these limits.

    They are drawn from simulated runs of `HELD_OUT_POLICIES` and serve to judge a fit, never to
    make one: a third each of decode, mixed and prefill batches, or all there are of a kind. Drawn
    from all steps alike they would nearly all be decode batches.
    """
    from schedlab.gpu_backend.calibration_design import BatchPoint, batch_kind

    seen: list[BatchPoint] = []

    class Watching(SimExecutor):
        """Notes the batch of every step."""

        def execute(self, work: Work, max_steps: int, horizon_ns: int) -> Steps:
            decodes: tuple[int, ...] = ()
            if work.shape.num_decodes:
                decodes = tuple(s.num_computed_tokens for s in work.decodes.members.values())
            seen.append(BatchPoint(HELD_OUT, decodes, work.shape.chunks))
            return super().execute(work, 1, horizon_ns)

    pricing = Pricing(RooflineCostModel(Deployment(model(model_name), gpu(hardware), dtype=dtype)))
    for name, knobs in HELD_OUT_POLICIES:
        executor = Watching(pricing)
        simulate(
            Engine(config, registry.make(name, **knobs), executor),
            chat(config, 4 * config.max_num_seqs, seed),
        )
    rng = stream(seed, "held_out")
    drawn: list[BatchPoint] = []
    for kind in ("decode", "mixed", "prefill"):
        some = [p for p in seen if batch_kind(p.shape) == kind and p.fits(config)]
        picks = rng.choice(len(some), size=min(count // 3, len(some)), replace=False)
        drawn += [some[i] for i in sorted(picks.tolist())]
    return drawn


def verdict(fit: Fit, by_kind: dict[str, dict[str, float]], drift: Sequence[float]) -> str:
    """Say whether the profile may be trusted, and what speaks against it."""
    from schedlab.gpu_backend.calibration import DRIFT_BAR

    error = fit.held_out
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
    worst = max(drift, default=0.0)
    shaky = f"; sentinels moved by up to {worst:.1%}: the machine was not quiet"
    return f"{judgement}: {found}{shaky if worst > DRIFT_BAR else ''}"


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
