"""The engine that a calibration is of: our own on a device, or vLLM."""

from __future__ import annotations

import math
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
from schedlab.sim.errors import SpecError, TraceError
from schedlab.sim.request import Arrival
from schedlab.traces.lengths import exponential, independent, lognormal
from schedlab.traces.synthetic import synthesize
from schedlab.traces.trace import Trace
from schedlab.traces.workload import workload

if TYPE_CHECKING:
    from schedlab.gpu_backend.calibration import BatchTimer
    from schedlab.gpu_backend.calibration_fit import MeasuredBatch, SwapTime
    from schedlab.gpu_backend.executor import StepTime
    from schedlab.gpu_backend.runner import ModelRunner
    from schedlab.gpu_backend.stopwatch import Stopwatch

_SLOWEST = 0.99
_NUM_REQUESTS = 128
_NUM_SHORT, _MEAN_ANSWER = 320, 16.0
_SHARE_OF_SEATS = 8
"""Of the seats, one in so many is a client's of the second run whose steps tell a GPU's level."""
_SHARE_ALONE = 4
"""One in so many of the short requests is also sent by itself, which takes a step a token."""
_MEMORIES = 6
"""How many times all memory the long requests need together."""


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
        What the engine costs beside the model; see `overhead_of`.
    about : dict
        What else its profile says.
    repetitions : int
        How often a batch is timed when its turn comes.
    run_steps : list of MeasuredBatch
        Steps of runs in this engine, which say at what level a profile of single batches stands;
        none where that is not measured.
    """

    timer: BatchTimer
    kernels: str
    buckets: tuple[int, ...]
    swapping: list[SwapTime]
    overhead: dict[str, float]
    about: dict[str, object] = field(default_factory=dict)
    repetitions: int = 2
    run_steps: list[MeasuredBatch] = field(default_factory=list)


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

    On a GPU the steps of a run say at what level a profile of single batches stands: a device that
    computes without a pause draws more power than one that waits between batches, and clocks lower.

    Raises
    ------
    SpecError
        If the device is missing, or the model does not fit.
    """
    import torch

    from schedlab.gpu_backend.calibration_fit import without_overhead
    from schedlab.gpu_backend.runner import open_runner
    from schedlab.gpu_backend.step_timer import StepTimer
    from schedlab.gpu_backend.swap_timing import swap_times

    torch.set_num_threads(threads)
    runner = open_runner(model, config, device=device, dtype=dtype, seed=seed)
    swapping = swap_times(runner, stopwatch)
    steps = chat_steps(runner, config, seed, stopwatch)
    return CalibratedEngine(
        StepTimer(runner, config, seed, stopwatch),
        kernels("real", device),
        runner.graph_buckets,
        swapping,
        overhead_of([s.shape for s in steps], [s.overhead_ns for s in steps]),
        run_steps=without_overhead(steps) if runner.is_cuda else [],
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
    """Open vLLM, and measure what its loop costs beside the model, and what it does to steps.

    That is measured with `fcfs` in `schedlab.gpu_backend.vllm.scheduler.PolicyScheduler`, on short
    requests all at once and sent by one or a few clients in turn, so that steps of all sizes are
    met, and on long ones for which memory is short, so that somebody waits though a seat is free.
    On a CPU a batch is timed once a visit: vLLM keeps oneDNN's matrix products of the latest 32
    numbers of rows, which a second repetition finds and prompts of a run, all of other lengths, do
    not.

    Raises
    ------
    SpecError
        If vLLM or the device is missing, or the model does not fit.
    """
    from schedlab.experiments.running.vllm_backend import require_vllm

    require_vllm()
    from schedlab.gpu_backend.calibration_fit import without_overhead
    from schedlab.gpu_backend.vllm.clock import MeasuredStepClock
    from schedlab.gpu_backend.vllm.engine import VllmSetup
    from schedlab.gpu_backend.vllm.opening import first_requests, open_core
    from schedlab.gpu_backend.vllm.release import with_switches
    from schedlab.gpu_backend.vllm.replay import Replay
    from schedlab.gpu_backend.vllm.step_timer import VllmStepTimer

    limits = with_switches(vllm_config(config))
    core = open_core(VllmSetup(model, limits, device, dtype, seed=seed, threads=threads))

    def refuse(_: BatchShape, num_steps: int) -> int:
        raise SpecError("fcfs asks for no estimates")

    first = first_requests(core.setup.config)
    requests = short(config, min(_NUM_SHORT, 20 * config.max_num_seqs), seed)
    runs = [
        (requests[: len(requests) // _SHARE_ALONE], 1),
        (requests, None),
        (requests, max(1, config.max_num_seqs // 4)),
        (requests, max(1, config.max_num_seqs // 2)),
        (long(config, seed), None),
    ]
    logs = [
        Replay(
            core, {"name": "fcfs"}, MeasuredStepClock(stopwatch=stopwatch), refuse, warm_up=first
        ).run(some, clients)
        for some, clients in runs
        if some
    ]
    steps = [step for log in logs for step in log.recorded()]
    spent = [log.seconds() for log in logs]
    total_s = sum(sum(one.values()) for one in spent)
    return CalibratedEngine(
        VllmStepTimer(core, stopwatch),
        kernels("vllm", device),
        core.graph_buckets,
        [],
        overhead_of([s.shape for s in steps], [s.overhead_ns for s in steps]),
        {
            **core.describe(),
            "share_of_time": {
                name[:-2]: sum(one[name] for one in spent) / total_s for name in spent[0]
            },
        },
        repetitions=1 if device == "cpu" else 2,
        run_steps=without_overhead(steps),
    )


def vllm_config(config: EngineConfig) -> EngineConfig:
    """Return limits as any vLLM has them; its release adds its own rules (`with_switches`)."""
    return replace(config, null_blocks=1, scheduler_reserve_full_isl=True)


def chat_steps(
    runner: ModelRunner,
    config: EngineConfig,
    seed: int,
    stopwatch: Stopwatch | None = None,
) -> list[StepTime]:
    """Serve a chat workload on the real backend, with `fcfs`, by the virtual clock.

    All requests come at once, so that the device computes without a pause; there nearly all prompts
    are computed in full steps. On a GPU a few clients send them once more, one after the other
    each: then a prompt or two is computed at a time, between steps that wait for memory. The first
    step of a run is left out.
    """
    from schedlab.gpu_backend.clock import VirtualClock
    from schedlab.gpu_backend.executor import TorchExecutor

    requests = chat(config, min(_NUM_REQUESTS, 2 * config.max_num_seqs), seed)
    few = max(1, config.max_num_seqs // _SHARE_OF_SEATS)
    steps: list[StepTime] = []
    for clients in (None, few) if runner.is_cuda else (None,):
        executor = TorchExecutor(runner, config, VirtualClock(stopwatch), seed=seed)
        simulate(Engine(config, registry.make("fcfs"), executor), requests, clients)
        steps += executor.steps[1:]
    return steps


def overhead_of(shapes: Sequence[BatchShape], overheads_ns: Sequence[int]) -> dict[str, float]:
    """Fit the time outside the model to a base, who runs and waits, if anybody does, and prompts.

    By non-negative least squares, which keeps the mean of what is fitted; the slowest 1 % of the
    steps (other processes) are left out.

    Returns
    -------
    dict of str to float
        Terms of `schedlab.sim.cost.overhead.SchedulingOverhead`.
    """
    from scipy.optimize import nnls

    seconds = np.array(overheads_ns) / 1e9
    kept = seconds <= np.quantile(seconds, _SLOWEST)
    columns = np.array(
        [
            (1.0, one.num_running, one.num_waiting, bool(one.chunks), one.num_waiting > 0)
            for one in shapes
        ],
        dtype=float,
    )
    solution: Any = nnls(columns[kept], seconds[kept])[0]
    names = "base_s", "per_running_s", "per_waiting_s", "per_prefill_step_s", "per_queued_step_s"
    return {name: float(value) for name, value in zip(names, solution, strict=True)}


def short(config: EngineConfig, num_requests: int, seed: int) -> Sequence[Arrival]:
    """Return requests of few tokens, all at once: prompts of a quarter of a step, short answers.

    A run of them has as many steps with prompts, of as many sizes, as one has with decodes alone.
    """
    middle = max(1, min(config.max_num_batched_tokens, config.max_model_len // 2) // 4)
    lengths = independent(lognormal(math.log(middle), 0.8), exponential(_MEAN_ANSWER))
    trace = synthesize(num_requests, lengths=lengths, rate=float("inf"), seed=seed)
    return fitting(trace, config)


def long(config: EngineConfig, seed: int) -> Sequence[Arrival]:
    """Return requests all at once of which half of the seats fill the memory; none if none can."""
    memory_tokens = config.num_blocks * config.block_size
    mean_tokens = 2 * memory_tokens / config.max_num_seqs
    if mean_tokens > config.max_model_len:
        return ()
    lengths = independent(lognormal(math.log(mean_tokens), 0.4), exponential(_MEAN_ANSWER))
    num_requests = math.ceil(_MEMORIES * memory_tokens / mean_tokens)
    trace = synthesize(num_requests, lengths=lengths, rate=float("inf"), seed=seed)
    return fitting(trace, config)


def chat(config: EngineConfig, num_requests: int, seed: int) -> Sequence[Arrival]:
    """Return chat requests that fit the limits, all at once."""
    trace = synthesize(num_requests, preset="azure-conv", rate=float("inf"), seed=seed)
    return fitting(trace, config)


def fitting(trace: Trace, config: EngineConfig) -> Sequence[Arrival]:
    """Return the requests of a trace, prompts cut to what the limits allow."""
    try:
        cut = trace.fit(config.max_model_len, "clip_prompt")
    except TraceError:
        raise SpecError(
            f"max_model_len {config.max_model_len}: none of the {len(trace)} requests that are to "
            "be timed or judged by has so short an answer; give more (--max-model-len, "
            "engine.max_model_len)"
        ) from None
    return list(workload(cut, max_model_len=config.max_model_len))
