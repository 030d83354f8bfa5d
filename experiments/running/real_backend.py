"""The real backend of an experiment: a model on a device, and the clock it is measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from schedlab.experiments.running.backend import Served, Task, serve_on_engines
from schedlab.experiments.running.fleet import Kind
from schedlab.experiments.running.resolved import Resolved
from schedlab.experiments.specification.experiment import ExperimentSpec, Real
from schedlab.sim.config import EngineConfig
from schedlab.sim.core.engine import Engine
from schedlab.sim.core.executor import Executor
from schedlab.sim.cost.pricing import Pricing
from schedlab.sim.drive.simulation import simulate
from schedlab.sim.errors import SpecError
from schedlab.sim.record.log import RunLog

if TYPE_CHECKING:
    from schedlab.gpu_backend.clock import Clock
    from schedlab.gpu_backend.executor import TorchExecutor
    from schedlab.gpu_backend.runner import ModelRunner
    from schedlab.gpu_backend.stopwatch import Stopwatch


class RealBackend:
    """Kernels on a device under one of four clocks; see `schedlab.gpu_backend.clock`."""

    def __init__(
        self, executor: TorchExecutor, clock: Clock, stopwatch: Stopwatch, real: Real
    ) -> None:
        self._executor = executor
        self._stopwatch = stopwatch
        self._clock = clock
        self._real = real

    def executors(self, kinds: Sequence[Kind]) -> list[Executor]:
        """Return the device's; several engines are refused before."""
        assert len(kinds) == 1
        return [self._executor]

    def serve(self, task: Task) -> Served:
        """Run a workload to its end."""
        try:
            return serve_on_engines(self, task)._replace(drafts=self._executor.drafts)
        except BaseException:
            _runner.cache_clear()  # copies may be under way there, and files hold room
            raise

    def drive(
        self, engines: Sequence[Engine], task: Task, new_engine: Callable[[int], Engine]
    ) -> RunLog:
        """Run the workload of a task to its end."""
        (engine,) = engines
        arrivals, max_concurrency = task.arrivals, task.spec.workload.max_concurrency
        from schedlab.gpu_backend.clock import WallClock
        from schedlab.gpu_backend.replay import replay

        if isinstance(self._clock, WallClock):
            log = replay(engine, arrivals, self._clock, max_concurrency)
        else:
            log = simulate(engine, arrivals, max_concurrency)
        self._executor.wait_for_copies()
        return log

    def describe(self) -> dict[str, object]:
        """Return device, clock and where the time went."""
        steps = self._executor.steps
        return {
            "device": self._real.device,
            **({"threads": self._real.threads} if self._real.device == "cpu" else {}),
            "clock": self._clock.mode,
            **self._stopwatch.describe(),
            "weights": self._real.weights or "seeded random",
            "graph_buckets": list(self._executor.runner.graph_buckets),
            "estimates": self._executor.num_estimates,
            "device_s": sum(step.device_ns for step in steps) / 1e9,
            "prepare_s": sum(step.prepare_ns for step in steps) / 1e9,
            "overhead_s": sum(step.overhead_ns for step in steps) / 1e9,
        }


def open_device(point: Resolved, pricing: Pricing) -> RealBackend:
    """Put the experiment's model on its device.

    Raises
    ------
    SpecError
        If torch or the device is missing, or the model does not fit.
    """
    try:
        import torch
    except ImportError as error:
        raise SpecError(
            "backend: real needs torch, which is not installed: pip install 'schedlab[gpu]' (on a "
            "machine without an NVIDIA GPU, install a CPU build of torch first)"
        ) from error
    from schedlab.gpu_backend.clock import ModelledClock, VirtualClock, WallClock
    from schedlab.gpu_backend.executor import TorchExecutor
    from schedlab.gpu_backend.speculating_executor import PromptLookup, SpeculatingExecutor

    spec, config, real = point.spec, point.config, point.spec.real
    stopwatch = open_stopwatch(spec)
    clock: Clock
    if real.clock == "modelled":
        clock = ModelledClock(pricing)
    else:
        clock = WallClock() if real.clock == "wall" else VirtualClock(stopwatch, real.clock)
    torch.set_num_threads(real.threads)
    runner = _runner(
        spec.model, config, spec.engine.dtype, spec.seed, real.device, real.weights,
        real.temperature, real.cuda_graphs, _tier_folders(spec), spec.engine.max_num_resident,
    )  # fmt: skip
    executor: TorchExecutor
    if (speculation := point.speculation) is None:
        executor = TorchExecutor(
            runner, config, clock, estimate_step_ns=pricing.estimate_ns, seed=spec.seed
        )
    else:
        executor = SpeculatingExecutor(
            runner, config, clock, estimate_step_ns=pricing.estimate_ns, seed=spec.seed,
            lookup=PromptLookup(
                speculation.spec.prompt_lookup_min, speculation.spec.prompt_lookup_max
            ),
            modelled_drafter=speculation.drafter,
        )  # fmt: skip
    return RealBackend(executor, clock, stopwatch, real)


def open_stopwatch(spec: ExperimentSpec) -> Stopwatch:
    """Return what the clock of an experiment is read from.

    Raises
    ------
    SpecError
        If it is the machine at its reference speed, and there is none, or not on this device.
    """
    from schedlab.gpu_backend.stopwatch import (
        ElapsedTime,
        ReferenceSpeed,
        ReferenceTime,
        require_cpu,
    )

    real, profile = spec.real, spec.cost_model.profile
    if real.clock != "reference":
        return ElapsedTime()
    require_cpu("real.clock: reference", real.device, ("virtual", "wall"))
    speed = None if profile is None else ReferenceSpeed.read(Path(profile))
    if speed is None:
        raise SpecError(
            f"real.clock: reference is the speed that the machine had when its profile was "
            f"measured, and cost_model {profile or spec.cost_model.name!r} tells none; measure "
            "one with schedlab calibrate --clock reference, then cost_model=FOLDER"
        )
    return ReferenceTime(_sentinel(spec.model, real.threads), speed.sentinel_s * 1e9)


@lru_cache(maxsize=1)
def _sentinel(model: str, threads: int) -> Callable[[], int]:
    from schedlab.gpu_backend.stopwatch import sentinel_of

    return sentinel_of(model, threads)


@lru_cache(maxsize=1)
def _runner(
    model: str,
    config: EngineConfig,
    dtype: str,
    seed: int,
    device: str,
    weights: str | None,
    temperature: float,
    use_graphs: bool,
    tier_folders: tuple[Path | None, ...],
    max_rows: int | None,
) -> ModelRunner:
    """Load weights and allocate the cache once for all runs of a comparison."""
    from schedlab.gpu_backend.runner import open_runner

    _require_host_memory(config)
    return open_runner(
        model,
        config,
        device=device,
        dtype=dtype,
        weights=Path(weights) if weights else None,
        seed=seed,
        temperature=temperature,
        use_graphs=use_graphs,
        tier_folders=tier_folders,
        max_rows=max_rows,
    )


def _tier_folders(spec: ExperimentSpec) -> tuple[Path | None, ...]:
    """Return where the tiers below the first one lie."""
    asked = spec.engine.kv_offload
    tiers = () if asked is None else asked.tiers[1:]
    return tuple(None if tier.path is None else Path(tier.path) for tier in tiers)


def _require_host_memory(config: EngineConfig) -> None:
    """Refuse a tier that does not fit into what is free of the host's memory."""
    if not config.kv_tiers:
        return
    import torch

    from schedlab.gpu_backend.device import free_bytes

    tier = config.kv_tiers[0]
    needed, free = tier.num_blocks * config.kv_block_bytes, free_bytes(torch.device("cpu"))
    if needed > free:
        raise SpecError(
            f"engine.kv_offload.tiers[0]: {tier.name} takes {needed / 2**30:.2f} GiB "
            f"({tier.num_blocks} blocks), and this machine has {free / 2**30:.2f} GiB free; lower "
            "its gib or num_blocks"
        )
