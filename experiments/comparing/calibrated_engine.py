"""The engine that a calibration is of: our own on a device, or vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.comparing.machine import kernels
from schedlab.policies import registry
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.cost.shape import BatchShape
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.request import Arrival
from schedlab.traces.synthetic import synthesize
from schedlab.traces.workload import workload

if TYPE_CHECKING:
    from schedlab.gpu_backend.calibration import BatchTimer
    from schedlab.gpu_backend.runner import ModelRunner
    from schedlab.gpu_backend.stopwatch import Stopwatch
    from schedlab.gpu_backend.swap_timing import SwapTime

_SLOWEST = 0.95
_NUM_REQUESTS = 128


@dataclass(frozen=True)
class CalibratedEngine:
    """What is measured.

    Attributes
    ----------
    timer : BatchTimer
        Runs batches.
    kernels : str
        What computes them.
    buckets : tuple of int
        Batch sizes of captured CUDA graphs.
    swapping : list of SwapTime
        What copies to the host and back take; none where the engine does not swap.
    overhead : dict of str to float
        What the engine costs beside the model: base_s, per_running_s, per_waiting_s.
    about : dict
        What else its profile says.
    repetitions : int
        How often a batch is timed when its turn comes.
    """

    timer: BatchTimer
    kernels: str
    buckets: tuple[int, ...]
    swapping: list[SwapTime]
    overhead: dict[str, float]
    about: dict[str, object] = field(default_factory=dict)
    repetitions: int = 2


def open_ours(
    model: str,
    config: EngineConfig,
    device: str,
    dtype: str,
    threads: int,
    seed: int,
    stopwatch: Stopwatch,
) -> CalibratedEngine:
    """Open the real backend, and measure what does not depend on the batch.

    Raises
    ------
    SpecError
        If the device is missing, or the model does not fit.
    """
    import torch

    from schedlab.gpu_backend.runner import open_runner
    from schedlab.gpu_backend.step_timer import StepTimer
    from schedlab.gpu_backend.swap_timing import swap_times

    torch.set_num_threads(threads)
    runner = open_runner(model, config, device=device, dtype=dtype, seed=seed)
    return CalibratedEngine(
        StepTimer(runner, config, seed, stopwatch),
        kernels("real", device),
        runner.graph_buckets,
        swap_times(runner, stopwatch),
        scheduling_overhead(runner, config, seed, stopwatch),
    )


def open_vllm(
    model: str,
    config: EngineConfig,
    device: str,
    dtype: str,
    threads: int,
    seed: int,
    stopwatch: Stopwatch,
) -> CalibratedEngine:
    """Open vLLM, and measure what its loop costs beside the model.

    That is measured with `fcfs` in `schedlab.gpu_backend.vllm.scheduler.PolicyScheduler`. On a CPU
    a batch is timed once a visit: vLLM keeps oneDNN's matrix products of the latest 32 numbers of
    rows, which a second repetition finds and prompts of a run, all of other lengths, do not.

    Raises
    ------
    SpecError
        If vLLM or the device is missing, or the model does not fit.
    """
    from schedlab.experiments.running.vllm_backend import require_vllm

    require_vllm()
    from schedlab.gpu_backend.vllm.clock import MeasuredStepClock
    from schedlab.gpu_backend.vllm.engine import VllmSetup
    from schedlab.gpu_backend.vllm.opening import open_core
    from schedlab.gpu_backend.vllm.replay import Replay
    from schedlab.gpu_backend.vllm.step_timer import VllmStepTimer

    core = open_core(
        VllmSetup(model, vllm_config(config), device, dtype, seed=seed, threads=threads)
    )

    def refuse(_: BatchShape, num_steps: int) -> int:
        raise SpecError("fcfs asks for no estimates")

    replay = Replay(core, {"name": "fcfs"}, MeasuredStepClock(stopwatch=stopwatch), refuse)
    log = replay.run(chat(config, min(_NUM_REQUESTS, 2 * config.max_num_seqs), seed), None)
    steps = log.recorded()[1:]
    overhead = overhead_of([s.shape for s in steps], [s.overhead_ns for s in steps])
    total_s = sum(log.seconds().values())
    return CalibratedEngine(
        VllmStepTimer(core, stopwatch),
        kernels("vllm", device),
        core.graph_buckets,
        [],
        overhead,
        {
            **core.describe(),
            "share_of_time": {name[:-2]: s / total_s for name, s in log.seconds().items()},
        },
        repetitions=1 if device == "cpu" else 2,
    )


def vllm_config(config: EngineConfig) -> EngineConfig:
    """Return limits with the switches of the newest release of vLLM that is known."""
    return replace(
        config,
        null_blocks=1,
        preempt_in_order=True,
        threshold_spares_lone_request=True,
        free_uncached_first=True,
        scheduler_reserve_full_isl=True,
    )


def scheduling_overhead(
    runner: ModelRunner,
    config: EngineConfig,
    seed: int,
    stopwatch: Stopwatch | None = None,
    num_requests: int = _NUM_REQUESTS,
) -> dict[str, float]:
    """Measure what the engine itself costs between two steps of the real backend.

    A chat workload runs on the device by the virtual clock; see `overhead_of`.
    """
    from schedlab.gpu_backend.clock import VirtualClock
    from schedlab.gpu_backend.executor import TorchExecutor

    executor = TorchExecutor(runner, config, VirtualClock(stopwatch), seed=seed)
    requests = chat(config, min(num_requests, 2 * config.max_num_seqs), seed)
    simulate(Engine(config, registry.make("fcfs"), executor), requests)
    steps = executor.steps[1:]
    return overhead_of([s.shape for s in steps], [s.overhead_ns for s in steps])


def overhead_of(shapes: Sequence[BatchShape], overheads_ns: Sequence[int]) -> dict[str, float]:
    """Fit the time outside the model to a base, the running and the waiting requests.

    By non-negative least squares; the slowest 5 % of the steps (garbage collection, other
    processes) are left out.
    """
    from scipy.optimize import nnls

    seconds = np.array(overheads_ns) / 1e9
    kept = seconds <= np.quantile(seconds, _SLOWEST)
    columns = np.array([(1.0, shape.num_running, shape.num_waiting) for shape in shapes])
    solution: Any = nnls(columns[kept], seconds[kept])[0]
    names = ("base_s", "per_running_s", "per_waiting_s")
    return {name: float(value) for name, value in zip(names, solution, strict=True)}


def chat(config: EngineConfig, num_requests: int, seed: int) -> Sequence[Arrival]:
    """Return chat requests that fit the limits, all at once."""
    trace = synthesize(num_requests, preset="azure-conv", rate=float("inf"), seed=seed)
    fitting = trace.fit(config.max_model_len, "clip_prompt")
    return list(workload(fitting, max_model_len=config.max_model_len))
