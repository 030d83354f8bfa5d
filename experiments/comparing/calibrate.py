"""Calibrate a cost model on this machine: measure, fit, judge on replayed batches, write down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.comparing.calibrated_engine import open_ours, open_vllm
from schedlab.experiments.comparing.fitted_profile import (
    READINGS,
    Calibrated,
    save_residuals,
    write_profile,
)
from schedlab.experiments.comparing.held_out_batches import replayed_points
from schedlab.experiments.comparing.machine import describe_machine
from schedlab.sim.config import EngineConfig
from schedlab.sim.cost import registry
from schedlab.sim.cost.profile import FIT_FILE
from schedlab.sim.errors import SpecError
from schedlab.sim.hardware.gpus import gpu
from schedlab.sim.hardware.memory import memory_budget
from schedlab.sim.hardware.models import model

if TYPE_CHECKING:
    from schedlab.gpu_backend.calibration import Measurement
    from schedlab.gpu_backend.stopwatch import Stopwatch

Progress = Callable[[int, int, str], None]

_GPU_MEMORY_UTILIZATION = 0.9
"""vLLM's default: a calibration has no experiment that says another."""


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
        If the device is missing, the model does not fit, or `folder` holds another calibration or a
        profile of another kind.
    """
    from schedlab.gpu_backend.calibration import measure, measured
    from schedlab.gpu_backend.calibration_design import design

    begun_s = time.monotonic()
    registry.refuse_other_kind(folder, FIT_FILE)
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
